"""The collectives over Gloo, and over zipccl uncoded, coded and as it decides, on links of different rates.

    python benchmarks/collectives.py [--quick] [--worlds 2x1 4x1 2x4 1x2] [--links 1gbit 10gbit unlimited] [--sizes 16M]
                                     [--collectives all-gather] [--ways raw zip] [--seconds 2] [--time-slices]
                                     [--json FILE]

Needs root and the package iproute2, for the virtual hosts of benchmarks/network. A world is hosts x ranks on each; with
one host there are no links, and the ranks use loopback. Sizes are of a part: what one rank has for one other in a call.
An all-gather sends a part to each, the input of an all-to-all or a reduce-scatter has one for each, and so has the
tensor of an all-reduce.

All ways take turns in the same processes, and a round is as long as its slowest rank; the figures are medians. Ranks
run in real time, as if each thread had a processor when it wakes; with --time-slices they share processors as the
system lets them, and Gloo's threads wait for one another more than ours. Before anything is timed, results are
compared: zipccl's bit by bit, Gloo's sums with a tolerance, as it rounds in between.

What the switcher predicts for each way, and which one it takes, is compared with what was measured.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from network import Network, Rates, exit_on_signals, missing, parse_rate, rate_name
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zipccl
from zipccl.backend import backend_of

# Also in a file, where a table would be cut at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
SIGMA = 0.02
PERIOD = 4_194_301  # values that are drawn; a prime, so that no two segments or ranks have the same
SIZES = ["1K", "4K", "16K", "64K", "256K", "1M", "4M", "16M"]
UNITS = {"K": 1 << 10, "M": 1 << 20}
WAYS = ("gloo", "raw", "zip", "hierarchical", "auto")
ROUTES = {"native": "gloo"} | {way: way for way in WAYS[1:-1]}  # of zipccl.stats(), by what is measured here
LEAST_SECONDS = 2e-3  # of what is timed at once; short calls are repeated
SLOW_SECONDS = 0.5  # first calls make no difference then
LEAST_ROUNDS, MOST_ROUNDS = 5, 1001


class Collective(NamedTuple):
    name: str
    dtype: torch.dtype

    @property
    def stats(self) -> str:
        """Its name in zipccl.stats()."""
        return self.name.split()[0].replace("-", "_")


COLLECTIVES = [
    Collective("all-gather bf16", torch.bfloat16),
    Collective("all-to-all bf16", torch.bfloat16),
    Collective("reduce-scatter bf16", torch.bfloat16),
    Collective("reduce-scatter fp32 of bf16", torch.float32),
    Collective("all-reduce bf16", torch.bfloat16),
]


@dataclass
class Result:
    """One collective and size, in seconds a call and bytes that a rank sends in one."""

    collective: str
    part_bytes: int
    rounds: int = 0
    repeats: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, tuple[float, float]] = field(default_factory=dict)
    raw_bytes: int = 0
    wire_bytes: dict[str, float] = field(default_factory=dict)  # of the ways that used zipccl's exchange
    crossing_bytes: dict[str, float] = field(default_factory=dict)  # those of them that went to other hosts
    route: str = ""  # that "auto" took
    reason: str = ""
    predicted: dict[str, float] = field(default_factory=dict)  # seconds by way; none where sizes decide

    def error(self, way: str) -> float:
        """How far the prediction is off, as a part of what was measured."""
        return self.predicted[way] / self.seconds[way] - 1

    @property
    def best(self) -> str:
        return min(self.predicted.keys() & self.seconds.keys(), key=lambda way: self.seconds[way])

    def spreads(self, way: str) -> bool:
        """Whether a quarter of the rounds or more took much longer than another: the median says less then."""
        lower, upper = self.quartiles[way]
        return upper > 1.25 * lower


@dataclass
class Setting:
    """A world on links of one rate."""

    hosts: int
    ranks_per_host: int
    rate: int | None
    received: tuple[float, ...]  # what TCP got, in Mbit/s
    results: list[Result] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def link(self) -> str:
        return rate_name(self.rate) if self.hosts > 1 else "loopback"

    def __str__(self) -> str:
        ranks = f"{self.ranks_per_host} rank{'s' * (self.ranks_per_host > 1)}"
        return f"{self.hosts} host{'s' * (self.hosts > 1)} x {ranks}, {self.link}"

    def share(self, result: Result, way: str) -> float | None:
        """The rate of a host's bytes to other hosts, as a share of what TCP got from its link."""
        sent = result.raw_bytes if way == "gloo" else result.crossing_bytes.get(way)
        # Where hosts have several ranks, Gloo's rings send less over the links than a direct exchange.
        if self.hosts == 1 or not sent or (way == "gloo" and self.ranks_per_host > 1):
            return None
        return sent * self.ranks_per_host * 8 / result.seconds[way] / 1e6 / min(self.received)


# ---- On each rank


def values(elements: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Gaussian bf16 values that differ by rank and position."""
    drawn = (torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * SIGMA).bfloat16()
    return drawn.roll(-rank * 1_000_003).repeat(-(-elements // PERIOD))[:elements].to(dtype)


class Case:
    """A collective of parts of so many bytes: its tensors, how it is called, and what must come out."""

    def __init__(self, collective: Collective, part_bytes: int):
        self.collective = collective
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.part = part_bytes // collective.dtype.itemsize
        self.kind = collective.stats
        self.input = values(self.part * (1 if self.kind == "all_gather" else self.world_size), self.rank, self.dtype)
        parts_out = 1 if self.kind == "reduce_scatter" else self.world_size
        self.output = torch.zeros(self.part * parts_out, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.collective.dtype

    def call(self, group: dist.ProcessGroup) -> None:
        if self.kind == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input, group=group)
        elif self.kind == "all_to_all":
            dist.all_to_all_single(self.output, self.input, group=group)
        elif self.kind == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input, group=group)
        else:
            dist.all_reduce(self.output, group=group)

    def _of(self, rank: int) -> Tensor:
        """What a rank has for this one; of an all-reduce, for all."""
        if self.kind == "all_gather":
            return values(self.part, rank, self.dtype)
        theirs = values(self.part * self.world_size, rank, self.dtype)
        return theirs if self.kind == "all_reduce" else theirs.split(self.part)[self.rank].clone()

    def expected(self, hosts: list[list[int]]) -> Tensor:
        """Sums are accumulated inside each host, given by its ranks, and then over the hosts."""
        if self.kind in ("all_gather", "all_to_all"):
            return torch.cat([self._of(rank) for rank in range(self.world_size)])
        sums = (functools.reduce(torch.add, (self._of(rank).float() for rank in ranks)) for ranks in hosts)
        return functools.reduce(torch.add, sums).to(self.dtype)

    def check(self, groups: dict[str, dist.ProcessGroup]) -> None:
        expected = self.expected(backend_of(groups["auto"]).hosts)
        for way, group in groups.items():
            if self.kind == "all_reduce":
                self.output.copy_(self.input)
            else:
                self.output.fill_(-1)
            if way != "gloo":
                zipccl.reset_stats(group)
            self.call(group)
            # What zipccl hands on is Gloo's as well.
            if "reduce" in self.kind and (way == "gloo" or zipccl.stats(group)[self.kind]["native"]):
                slack = self.world_size * 2.0**-8 * expected.abs().max().item()
                same = (self.output.float() - expected.float()).abs().max().item() <= slack
            else:
                same = torch.equal(self.output.view(torch.uint8), expected.view(torch.uint8))
            if not same:
                raise AssertionError(f"rank {self.rank}: {self.collective.name} over {way} has a wrong result")


def timed(case: Case, group: dist.ProcessGroup, repeats: int) -> float:
    """Seconds a call."""
    if repeats > 1:
        case.call(group)  # so that no way finds its memory and threads as another has left them
    if case.kind == "all_reduce":  # in place: later, all ranks would have the same, whose sums are other values
        case.output.copy_(case.input)
    dist.barrier()  # over a group of its own, as it wakes that group's threads
    begin = time.perf_counter()
    for _ in range(repeats):
        case.call(group)
    return (time.perf_counter() - begin) / repeats


def of_slowest(seconds: list[list[float]]) -> list[list[float]]:
    table = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return table.tolist()


def measure(case: Case, groups: dict[str, dist.ProcessGroup], seconds: float) -> Result:
    result = Result(case.collective.name, case.part * case.dtype.itemsize)
    case.check(groups)

    # All ranks know the same times, so that they agree on how often to call. The first calls may be slow.
    estimates = [column[0] for column in of_slowest([[timed(case, group, 1)] for group in groups.values()])]
    if max(estimates) < SLOW_SECONDS:
        estimates = list(map(min, of_slowest([[timed(case, group, 1) for _ in range(3)] for group in groups.values()])))
    result.repeats = max(1, min(100, math.ceil(LEAST_SECONDS / max(estimates))))
    result.rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(seconds / (result.repeats * sum(estimates)))))

    ours = [way for way in groups if way != "gloo"]
    for way in ours:
        zipccl.reset_stats(groups[way])
    times: dict[str, list[float]] = {way: [] for way in groups}
    shuffled = random.Random(0)  # the same on all ranks
    for _ in range(result.rounds):
        for way in shuffled.sample(list(groups), len(groups)):
            times[way].append(timed(case, groups[way], result.repeats))
    for way, column in zip(times, of_slowest(list(times.values())), strict=True):
        result.seconds[way] = statistics.median(column)
        lower, _, upper = statistics.quantiles(column, n=4)
        result.quartiles[way] = (lower, upper)
    result.raw_bytes = (case.world_size - 1) * result.part_bytes * (2 if case.kind == "all_reduce" else 1)
    for way in ours:
        counted = zipccl.stats(groups[way])[case.kind]
        if counted["native"] == 0:
            result.wire_bytes[way] = counted["wire_bytes"] / counted["calls"]
            result.crossing_bytes[way] = (counted["wire_bytes"] - counted["local_bytes"]) / counted["calls"]
    decision = max(zipccl.stats(groups["auto"])[case.kind]["decisions"], key=lambda one: one["calls"])
    result.route, result.reason = ROUTES[decision["route"]], decision["reason"]
    result.predicted = {ROUTES[route]: value for route, value in decision["predicted"].items()}
    return result


def groups_of(options: dict[str, zipccl.Options]) -> dict[str, Any]:
    """Begins this rank; a group over Gloo, and one over zipccl for each of the ways in `options`."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # the names that older versions of torch know, too
    dist.init_process_group("gloo")
    groups: dict[str, Any] = {"gloo": dist.new_group(backend="gloo")}
    return groups | {way: dist.new_group(backend="zipccl", pg_options=options[way]) for way in options}


def group_over(backend: Any) -> dist.ProcessGroup:
    """A group of all ranks whose CPU tensors this Gloo backend serves."""
    group = dist.ProcessGroup(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def run_in_real_time() -> None:
    """Threads of this process that are begun from now on run until they wait for something.

    Else a thread that a message wakes waits for the end of another's time slice, as there are more threads than
    processors: calls of 0.1 ms take .1 to 2 ms then, and any two series of the same call differ.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        if os.environ["RANK"] == "0":
            print("No real-time scheduling is permitted here: times of short calls will scatter.", flush=True)


def work(arguments: argparse.Namespace) -> None:
    """What a rank does. Rank 0 writes one line of JSON for each result."""
    if not arguments.time_slices:
        run_in_real_time()
    # The message size from which "auto" compresses is its own; the others show what is below it.
    options = {way: zipccl.Options(mode=way, min_bytes=0) for way in WAYS[1:-1] if way in arguments.ways}
    groups = groups_of(options | {"auto": zipccl.Options(mode="auto")})
    # On the same connections as what "auto" hands on: two groups over Gloo differ by some per cent.
    groups["gloo"] = group_over(backend_of(groups["auto"]).plain)
    with open(arguments.worker if dist.get_rank() == 0 else os.devnull, "w", buffering=1) as file:
        for collective in arguments.collectives:
            for size in arguments.sizes:
                result = measure(Case(collective, size), groups, arguments.seconds)
                file.write(json.dumps(asdict(result)) + "\n")
                if dist.get_rank() == 0:
                    took = ", ".join(f"{way} {milliseconds(value)}" for way, value in result.seconds.items())
                    print(f"  {collective.name}, {size_name(size)}: {took} ms", flush=True)
    dist.destroy_process_group()


# ---- The settings


def run(hosts: int, ranks_per_host: int, rate: int | None, arguments: argparse.Namespace) -> Setting:
    with Network(hosts, rate) as network, tempfile.TemporaryDirectory() as folder:
        rates: Rates = network.measure(arguments.seconds / 2)
        setting = Setting(hosts, ranks_per_host, rate, rates.received)
        console.print(f"{setting}: {rates}" + ("" if rates.as_asked else " [yellow](not what was asked for)"))
        results = Path(folder) / "results"
        command = [sys.executable, __file__, "--worker", str(results), "--seconds", str(arguments.seconds)]
        command += ["--time-slices"] if arguments.time_slices else []
        command += ["--sizes", *map(str, arguments.sizes)]
        ways = [way for way in arguments.ways if way != "hierarchical" or (hosts > 1 and ranks_per_host > 1)]
        command += ["--ways", *ways]
        command += ["--collectives", *(collective.name for collective in arguments.collectives)]
        network.run(command, ranks_per_host)
        setting.results = [Result(**json.loads(line)) for line in results.read_text().splitlines()]
    return setting


# ---- Report


def size_name(size: int) -> str:
    return f"{size / (1 << 20):g} MiB" if size >= 1 << 20 else f"{size / (1 << 10):g} KiB"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 1 else 1 if seconds >= 0.01 else 3}f}"


def result_table(setting: Setting) -> Table:
    tcp = f"TCP {min(setting.received):.0f} Mbit/s"
    table = Table(title=f"{setting} ({tcp})", title_justify="left")
    table.add_column("collective")
    ways = [way for way in WAYS if way in setting.results[0].seconds]
    times = [f"{way[:4]}\nms" for way in ways]
    hierarchical = "hierarchical" in ways
    comparisons = [(way, "gloo") for way in ways[1:]] + [("zip", "raw"), ("hierarchical", "zip")]
    comparisons = [(way, than) for way, than in comparisons if way in ways and than in ways]
    speeds = [f"{way[:4]} /\n{than}" for way, than in comparisons]
    shares_of = [way for way in (("zip", "hierarchical") if hierarchical else ("gloo", "raw", "zip")) if way in ways]
    for column in ("part", *times, *speeds, "bound", "wire /\nraw", *(f"of TCP\n{way[:4]}" for way in shares_of)):
        table.add_column(column, justify="right")
    table.add_column("auto\ntook")
    table.add_column("predic-\nted", justify="right")
    for index, result in enumerate(setting.results):
        seconds, wire = result.seconds, result.wire_bytes.get("zip")

        faster = (f"{seconds[than] / seconds[way]:.2f}" for way, than in comparisons)
        shares = (setting.share(result, way) for way in shares_of)
        route = result.route if result.predicted else ""
        missed = route in seconds and seconds[route] > 1.1 * seconds[result.best]
        table.add_row(
            result.collective if index == 0 or setting.results[index - 1].collective != result.collective else "",
            size_name(result.part_bytes),
            *(("~" if result.spreads(way) else "") + milliseconds(seconds[way]) for way in ways),
            *faster,
            f"{result.raw_bytes / wire:.2f}" if wire else "",
            f"{wire / result.raw_bytes:.3f}" if wire else "",
            *(f"{share:.0%}" if share is not None else "" for share in shares),
            f"[red]{route[:4]}, not {result.best[:4]}[/red]" if missed else route[:4],
            f"{result.error(route):+.0%}" if route in seconds else "",
            end_section=index + 1 < len(setting.results) and setting.results[index + 1].collective != result.collective,
        )
    return table


NOTES = """\
part: what one rank has for one other. ~: the middle half of the rounds differs by more than a quarter. raw / gloo: how
many times as fast as Gloo. bound: what zip could gain over raw if the link alone took time. wire / raw: bytes that zip
sends. of TCP: bytes over time, as a share of what TCP gets from the link; for gloo, bytes that its result needs. auto
took: the way that the switcher chose, in red where another was more than a tenth faster; predicted: how far off."""


def judge(settings: list[Setting]) -> str:
    """The switcher in one line."""
    results = [result for setting in settings for result in setting.results if result.predicted]
    if not results:
        return "No call was long enough to be switched."
    errors = [abs(result.error(way)) for result in results for way in result.predicted if way in result.seconds]
    taken = [abs(result.error(result.route)) for result in results if result.route in result.seconds]
    missed = sum(result.seconds["auto"] > 1.1 * result.seconds[result.best] for result in results)
    return (
        f"Switcher: {sum(error <= 0.2 for error in taken)} of {len(taken)} predictions of the way taken and "
        f"{sum(error <= 0.2 for error in errors)} of {len(errors)} of all ways within 20 %, medians "
        f"{statistics.median(taken):.0%} and {statistics.median(errors):.0%} off; in {missed} of {len(results)} cases "
        "another way was more than a tenth faster than what was taken."
    )


def plot(path: Path, settings: list[Setting]) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result.collective for setting in settings for result in setting.results))
    size = (3.6 * len(names), 2.7 * len(settings))
    figure, axes = plt.subplots(
        len(settings), len(names), figsize=size, sharex=True, squeeze=False, constrained_layout=True
    )
    for row, setting in zip(axes, settings, strict=True):
        for axis, name in zip(row, names, strict=True):
            results = [result for result in setting.results if result.collective == name]
            sizes = [result.part_bytes for result in results]
            for way in (way for way in WAYS[1:] if way in results[0].seconds):
                faster = [result.seconds["gloo"] / result.seconds[way] for result in results]
                axis.plot(sizes, faster, ".-", label=way)
            axis.axhline(1, color="gray", linewidth=0.8)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{name}\n{setting}", fontsize=8)
            axis.set_ylim(bottom=0)
        row[0].set_ylabel("times as fast as Gloo")
    for axis, name in zip(axes[-1], names, strict=True):
        sizes = sorted({result.part_bytes for s in settings for result in s.results if result.collective == name})
        axis.set_xticks(sizes, [size_name(part) for part in sizes], rotation=60, fontsize=7)
    axes[0][0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


def parse_size(text: str) -> int:
    try:
        size = int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)
    except (ValueError, IndexError):
        size = 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected one like 4096, 64K or 16M")
    return size


def parse_world(text: str) -> tuple[int, int]:
    try:
        hosts, ranks = map(int, text.split("x"))
    except ValueError:
        hosts = ranks = 0
    if hosts < 1 or ranks < 1 or hosts * ranks < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no world: expected hosts x ranks on each, like 2x1")
    return hosts, ranks


def parse_link(text: str) -> int | None:
    try:
        return parse_rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=parse_world, nargs="+", metavar="HxR", help="default: 2x1 4x1 2x4 1x2")
    parser.add_argument("--links", type=parse_link, nargs="+", metavar="RATE", help="default: 1gbit 10gbit unlimited")
    parser.add_argument("--sizes", type=parse_size, nargs="+", metavar="SIZE", help=f"default: {' '.join(SIZES)}")
    parser.add_argument(
        "--collectives", nargs="+", metavar="NAME", help=", ".join(repr(collective.name) for collective in COLLECTIVES)
    )
    parser.add_argument("--seconds", type=float, help="for one collective and size, or five rounds (default: 2)")
    parser.add_argument("--time-slices", action="store_true", help="leave the scheduling of ranks as it is")
    parser.add_argument("--quick", action="store_true", help="few links, sizes and rounds: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=Path("results/collectives.png"), help="default: %(default)s"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--ways", choices=WAYS, nargs="+", default=WAYS, help="besides gloo and auto, which are always measured"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.worlds = arguments.worlds or ([(2, 1)] if quick else [(2, 1), (4, 1), (2, 4), (1, 2)])
    arguments.links = arguments.links or [10**9] + ([] if quick else [10**10, None])
    arguments.sizes = arguments.sizes or list(map(parse_size, ["16K", "1M", "4M"] if quick else SIZES))
    arguments.seconds = arguments.seconds or (0.5 if quick else 2.0)
    if arguments.collectives:
        arguments.collectives = [
            collective
            for collective in COLLECTIVES
            if any(collective.name.startswith(name) for name in arguments.collectives)
        ]
        if not arguments.collectives:
            parser.error("no collective has such a name")
    else:
        arguments.collectives = COLLECTIVES
    return arguments


def can_measure() -> bool:
    """Whether there can be virtual hosts, or else says why not. From now on a signal takes them down."""
    reason = missing()
    if reason is not None:
        print(f"Nothing to measure: {reason}.")
        return False
    exit_on_signals()
    return True


def on_network(hosts: int, link: int, script: str, options: dict[str, Any]) -> tuple[Rates, Any]:
    """Runs a script on virtual hosts with --worker FILE and these options: its links' rates, and what FILE holds."""
    with Network(hosts, link) as network, tempfile.TemporaryDirectory() as folder:
        rates = network.measure(1.0)
        console.print(f"{hosts} hosts, {rate_name(link)}: {rates}")
        results = Path(folder) / "results"
        command = [sys.executable, script, "--worker", str(results)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        network.run(command, 1)
        return rates, json.loads(results.read_text())


def main() -> int:
    arguments = parse()
    if arguments.worker:
        work(arguments)
        return 0
    if not can_measure():
        return 2
    settings: list[Setting] = []
    for hosts, ranks_per_host in arguments.worlds:
        for rate in arguments.links if hosts > 1 else [None]:
            settings.append(run(hosts, ranks_per_host, rate, arguments))
    for setting in settings:
        console.print(result_table(setting))
    console.print(NOTES)
    console.print(judge(settings))
    if plot(arguments.plot, settings):
        console.print(f"plot: {arguments.plot}")
    if arguments.json:
        figures: dict[str, Any] = {"processors": os.cpu_count(), "settings": [asdict(setting) for setting in settings]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures: {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
