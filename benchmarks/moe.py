"""Mixture of experts over Gloo, and over zipccl uncoded, coded in one phase and coded in two, on links of one rate.

    python benchmarks/moe.py [--hosts 4] [--link 1gbit] [--mib 2] [--rounds 11] [--json FILE] [--plot FILE]

Needs root and the package iproute2, for the virtual hosts of benchmarks/network; one rank runs on each.

First a layer's exchange, under each imbalance of tokens: bf16 rows go to their experts' ranks, each rank waits for as
long as slow experts would take for the rows that it got (--row-seconds), and the rows go back. "late": besides, one
rank after the other comes later (--late-seconds) than all others. Then whole training steps of examples/train_moe.py,
with such waits in its experts; processors take long for what accelerators do at once, so that they gain less.

A round is as long as its slowest rank; the ways take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from collectives import can_measure, console, groups_of, of_slowest, on_network
from network import parse_rate, rate_name
from rich.table import Table
from torch import Tensor

import zipccl

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import train_moe

WIDTH = 1024
WARM_UP = 2
WAYS = ("gloo", "raw", "one phase", "two phases")
OPTIONS = {
    "raw": dict(mode="raw"),
    "one phase": dict(mode="zip", two_phase=False),
    "two phases": dict(mode="zip"),
}

# Rows that rank i has for the experts of rank j in a round, where a balanced load has `rows` for each.
Rows = Callable[[int, int, int, int, int], int]  # (rows, i, j, world size, round)
LOADS: dict[str, Rows] = {
    "balanced": lambda rows, i, j, size, turn: rows,
    "hot expert": lambda rows, i, j, size, turn: rows * size * 3 // 4 if j == 0 else rows * size // 4 // (size - 1),
    "hot rank": lambda rows, i, j, size, turn: rows * 2 if i == 0 else rows // 2,
    "ragged": lambda rows, i, j, size, turn: rows * 2 * (i + 1) // (size + 1),
    "idle rank": lambda rows, i, j, size, turn: 0 if i == size - 1 else rows,
    "absent rank": lambda rows, i, j, size, turn: 0 if size - 1 in (i, j) else rows,
    "bursts": lambda rows, i, j, size, turn: rows if turn % 2 else rows * size * (j == turn // 2 % size),
}
TRAININGS = ("balanced", "hot_expert", "hot_rank", "ragged", "idle_rank", "bursts")


@dataclass
class Result:
    """Seconds of each round of a way."""

    seconds: list[float] = field(default_factory=list)
    ratio: float = 1.0  # bytes sent / raw bytes, of all-to-alls

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Case:
    name: str
    results: dict[str, Result]


# ---- On each rank


def interleaved(
    groups: dict[str, dist.ProcessGroup], rounds: int, run: Callable[[str, dist.ProcessGroup, int], None]
) -> dict[str, Result]:
    """Seconds of run(way, group, round) on the slowest rank; the ways take turns."""
    results = {way: Result() for way in groups}
    order = list(groups)
    for index in range(WARM_UP + rounds):
        if index == WARM_UP:
            for way in OPTIONS:
                zipccl.reset_stats(groups[way])
        for way in order:
            dist.barrier()
            begin = time.perf_counter()
            run(way, groups[way], index)
            results[way].seconds.append(time.perf_counter() - begin)
        order = order[1:] + order[:1]
    slowest = of_slowest([result.seconds for result in results.values()])
    for result, seconds in zip(results.values(), slowest, strict=True):
        result.seconds = seconds[WARM_UP:]
    for way in OPTIONS:
        stats = zipccl.stats(groups[way])["all_to_all"]
        results[way].ratio = stats["wire_bytes"] / max(stats["raw_bytes"], 1)
    return results


def exchange_case(
    load: str, late: bool, groups: dict[str, dist.ProcessGroup], arguments: argparse.Namespace, waits: bool = True
) -> dict[str, Result]:
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = int(arguments.mib * 2**20) // (2 * WIDTH)
    source = torch.randn(4 * size * rows, WIDTH, generator=torch.Generator().manual_seed(rank)).mul(0.3).bfloat16()

    def run(way: str, group: dist.ProcessGroup, index: int) -> None:
        sent = [LOADS[load](rows, rank, j, size, index) for j in range(size)]
        received = [LOADS[load](rows, i, rank, size, index) for i in range(size)]
        there = torch.empty(sum(received), WIDTH, dtype=torch.bfloat16)
        back = torch.empty(sum(sent), WIDTH, dtype=torch.bfloat16)
        if late and rank == index % size:
            time.sleep(arguments.late_seconds)
        dist.all_to_all_single(there, source[: sum(sent)], received, sent, group=group)
        if waits:
            time.sleep(arguments.row_seconds * sum(received))
        dist.all_to_all_single(back, there, sent, received, group=group)
        if index == 0 and not torch.equal(back, source[: sum(sent)]):
            raise AssertionError(f"rank {rank}, {load}, {way}: what came back is not what was sent")

    return interleaved(groups, arguments.rounds, run)


class SlowExperts(train_moe.Experts):
    seconds = 0.0

    def forward(self, rows: Tensor, of_expert: list[int]) -> Tensor:
        time.sleep(self.seconds * len(rows))
        return super().forward(rows, of_expert)


def training_case(
    imbalance: str, groups: dict[str, dist.ProcessGroup], arguments: argparse.Namespace
) -> dict[str, Result]:
    train_moe.Experts = SlowExperts  # type: ignore[misc]
    SlowExperts.seconds = arguments.row_seconds
    shape = argparse.Namespace(
        imbalance=imbalance, width=256, blocks=2, experts=dist.get_world_size(), batch=4, length=128
    )
    trainings = {way: train_moe.Training(group, shape) for way, group in groups.items()}
    losses: dict[str, list[float]] = {way: [] for way in groups}
    for way in ("one phase", "two phases"):
        trainings[way].attach()

    def run(way: str, group: dist.ProcessGroup, index: int) -> None:
        losses[way].append(trainings[way].step(index))

    results = interleaved(groups, arguments.steps, run)
    if not losses["raw"] == losses["one phase"] == losses["two phases"]:
        raise AssertionError(f"rank {dist.get_rank()}, {imbalance}: losses differ between coded and uncoded training")
    return results


def work(arguments: argparse.Namespace) -> None:
    """What a rank does. Rank 0 writes the results as JSON."""
    groups = groups_of({way: zipccl.Options(**options) for way, options in OPTIONS.items()})  # type: ignore[arg-type]
    found = []

    def add(name: str, results: dict[str, Result]) -> None:
        found.append(asdict(Case(name, results)))
        if dist.get_rank() == 0:
            took = ", ".join(f"{way} {1e3 * result.median:.0f}" for way, result in results.items())
            print(f"  {name}: {took} ms", flush=True)

    add("balanced, no waits", exchange_case("balanced", False, groups, arguments, waits=False))
    for load in LOADS:
        for late in (False, True):
            add(load + (", late" if late else ""), exchange_case(load, late, groups, arguments))
    for imbalance in TRAININGS:
        add(f"step, {imbalance.replace('_', ' ')}", training_case(imbalance, groups, arguments))
    if dist.get_rank() == 0:
        arguments.worker.write_text(json.dumps(found))
    gc.collect()  # see train_moe
    dist.destroy_process_group()


# ---- Report


def result_table(title: str, cases: list[Case]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("load")
    for way in WAYS:
        table.add_column(f"{way}\nms", justify="right")
    for against in WAYS[:-1]:
        table.add_column(f"two phases\nvs {against}", justify="right")
    table.add_column("bytes sent /\nraw bytes", justify="right")
    for case in cases:
        last = case.results[WAYS[-1]]
        table.add_row(
            case.name,
            *(f"{1e3 * case.results[way].median:.1f}" for way in WAYS),
            *(f"{case.results[way].median / last.median:.2f}" for way in WAYS[:-1]),
            f"{last.ratio:.3f}",
            end_section=case.name.endswith("late"),
        )
    return table


def plot(path: Path, cases: list[Case]) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 4), constrained_layout=True)
    for offset, way in enumerate(WAYS):
        faster = [case.results["gloo"].median / case.results[way].median for case in cases]
        axis.bar([i + 0.2 * offset for i in range(len(cases))], faster, 0.2, label=way)
    axis.set_xticks([i + 0.3 for i in range(len(cases))], [case.name for case in cases], rotation=60, fontsize=7)
    axis.set_ylabel("times as fast as Gloo")
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--link", type=parse_rate, default="1gbit", metavar="RATE")
    parser.add_argument("--mib", type=float, default=2, help="for each rank, balanced (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="of an exchange (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="of a training (default: %(default)s)")
    parser.add_argument("--row-seconds", type=float, default=5e-6, help="of an expert for a row (default: %(default)s)")
    parser.add_argument("--late-seconds", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--plot", type=Path, default=Path("build/moe.png"), metavar="FILE", help="default: %(default)s")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hosts < 3 or arguments.rounds < 2 or arguments.steps < 2:
        parser.error("three hosts and two rounds and steps are the least")
    if arguments.worker:
        work(arguments)
        return 0
    if not can_measure():
        return 2
    names = ("mib", "rounds", "steps", "row_seconds", "late_seconds")
    options = {name: getattr(arguments, name) for name in names}
    rates, found = on_network(arguments.hosts, arguments.link, __file__, options)
    cases = [Case(case["name"], {way: Result(**r) for way, r in case["results"].items()}) for case in found]
    title = f"{arguments.hosts} hosts, {rate_name(arguments.link)} (TCP {min(rates.received):.0f} Mbit/s), "
    console.print(result_table(title + f"{arguments.mib:g} MiB for each rank", cases))
    if plot(arguments.plot, cases):
        console.print(f"plot: {arguments.plot}")
    if arguments.json:
        figures = {"processors": os.cpu_count(), "received": rates.received, "cases": found}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures: {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
