"""Training steps of a transformer over Gloo, and over zipccl uncoded, coded and as it decides, on links of one rate.

    python benchmarks/train.py [--hosts 2] [--link 1gbit] [--width 1024] [--blocks 4] [--tokens 32] [--rounds 7]
                               [--activation gelu] [--json FILE]

Needs root and the package iproute2, for the virtual hosts of benchmarks/network; one rank runs on each. FSDP2 gathers
bf16 parameters and reduces bf16 gradients in fp32; DDP reduces bf16 gradients. The batch is small, so that
communication dominates, as it does where many accelerators share a slow network. Blocks are GPT's, with GELU; with
ReLU, whose units are each active for some tokens only, the values of one chunk of a gradient have several scales.

All ways start from the same model and take turns, a step each; a step is as long as its slowest rank, and the figures
are medians. Coded and uncoded training must have the same losses, bit by bit; Gloo adds in another order, and its
losses may differ by rounding where there are more than two ranks.
"""

from __future__ import annotations

import argparse
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
import torch.nn.functional as F
from collectives import can_measure, console, groups_of, of_slowest, on_network
from network import parse_rate, rate_name
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zipccl

VOCABULARY = 2048
WARM_UP = 2  # steps; DDP builds its buckets in the first
WAYS = ("gloo", "raw", "zip", "auto")


@dataclass
class Result:
    """One way to train: seconds of each step that counts, losses of rank 0, and what zipccl sent for what."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int, activation: str = "gelu"):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, activation=activation, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, VOCABULARY)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).float()


# ---- On each rank


def fsdp(model: Transformer, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.arange(dist.get_world_size()))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def ddp(model: Transformer, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model.bfloat16(), process_group=group, gradient_as_bucket_view=True)


TRAININGS: dict[str, Callable[[Transformer, dist.ProcessGroup], nn.Module]] = {"FSDP2": fsdp, "DDP bf16": ddp}


class Training:
    def __init__(self, model: nn.Module, tokens: int):
        self.model, self.tokens = model, tokens
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, index: int) -> float:
        """Returns the loss of this rank."""
        generator = torch.Generator().manual_seed(1000 * index + dist.get_rank())
        tokens = torch.randint(0, VOCABULARY, (1, self.tokens + 1), generator=generator)
        loss = F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def train(name: str, groups: dict[str, dist.ProcessGroup], arguments: argparse.Namespace) -> dict[str, Result]:
    trainings = {}
    for way, group in groups.items():
        torch.manual_seed(0)
        model = Transformer(arguments.width, arguments.blocks, arguments.activation)
        trainings[way] = Training(TRAININGS[name](model, group), arguments.tokens)
    results = {way: Result() for way in groups}
    order = list(groups)
    for index in range(WARM_UP + arguments.rounds):
        if index == WARM_UP:
            for way in groups.keys() - {"gloo"}:
                zipccl.reset_stats(groups[way])
        for way in order:
            dist.barrier()  # over a group of its own, as it wakes that group's threads
            begin = time.perf_counter()
            loss = trainings[way].step(index)
            results[way].seconds.append(time.perf_counter() - begin)
            results[way].losses.append(loss)
        order = order[1:] + order[:1]
    slowest = of_slowest([result.seconds for result in results.values()])
    for result, seconds in zip(results.values(), slowest, strict=True):
        result.seconds = seconds[WARM_UP:]
    for way in groups.keys() - {"gloo"}:
        for collective, counted in zipccl.stats(groups[way]).items():
            if isinstance(counted, dict) and counted.get("raw_bytes"):
                results[way].ratios[collective] = counted["wire_bytes"] / counted["raw_bytes"]
    if results["zip"].losses != results["raw"].losses:
        raise AssertionError(f"rank {dist.get_rank()}, {name}: losses differ between coded and uncoded training")
    return results


def work(arguments: argparse.Namespace) -> None:
    """What a rank does. Rank 0 writes the results as JSON."""
    groups = groups_of({way: zipccl.Options(mode=way) for way in WAYS[1:]})
    found = {}
    for name in TRAININGS:
        results = train(name, groups, arguments)
        found[name] = {way: asdict(result) for way, result in results.items()}
        if dist.get_rank() == 0:
            took = ", ".join(f"{way} {result.median:.3f}" for way, result in results.items())
            print(f"  {name}: {took} s a step", flush=True)
    if dist.get_rank() == 0:
        arguments.worker.write_text(json.dumps(found))
    dist.destroy_process_group()


# ---- Report


def result_table(title: str, trainings: dict[str, dict[str, Result]]) -> Table:
    """Each training's ways against its first, which is Gloo where that can do it, and against raw."""
    table = Table(title=title, title_justify="left")
    table.add_column("training")
    table.add_column("way")
    for column in (
        "step s",
        "quartiles",
        "times as fast\nas the first",
        "as raw",
        "largest difference\nof a loss",
    ):
        table.add_column(column, justify="right")
    table.add_column("bytes sent / raw bytes")
    for name, results in trainings.items():
        first, raw = next(iter(results.values())), results["raw"]
        for way, result in results.items():
            lower, _, upper = statistics.quantiles(result.seconds, n=4)
            apart = max(abs(a - b) for a, b in zip(result.losses, first.losses, strict=True))
            table.add_row(
                name if result is first else "",
                way,
                f"{result.median:.3f}",
                f"{lower:.3f} .. {upper:.3f}",
                f"{first.median / result.median:.2f}",
                f"{raw.median / result.median:.2f}",
                f"{apart:.2g}",
                ", ".join(f"{collective} {ratio:.3f}" for collective, ratio in result.ratios.items()),
                end_section=way == WAYS[-1],
            )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--link", type=parse_rate, default="1gbit", metavar="RATE")
    parser.add_argument("--width", type=int, default=1024, help="of the model, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--activation", choices=("gelu", "relu"), default="gelu", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, help="a step and rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="steps that count (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hosts < 2 or arguments.width < 64 or arguments.width % 64 or arguments.rounds < 2:
        parser.error("two hosts, a width of 64 and two rounds are the least")
    if arguments.worker:
        work(arguments)
        return 0
    if not can_measure():
        return 2
    options = {name: getattr(arguments, name) for name in ("width", "blocks", "activation", "tokens", "rounds")}
    rates, found = on_network(arguments.hosts, arguments.link, __file__, options)
    trainings = {name: {way: Result(**r) for way, r in ways.items()} for name, ways in found.items()}
    with torch.device("meta"):
        parameters = sum(map(torch.Tensor.numel, Transformer(arguments.width, arguments.blocks).parameters()))
    title = f"{arguments.hosts} hosts, {rate_name(arguments.link)} (TCP {min(rates.received):.0f} Mbit/s), "
    console.print(result_table(title + f"{parameters / 1e6:.1f} million parameters, {arguments.activation}", trainings))
    if arguments.json:
        figures = {"processors": os.cpu_count(), "received": rates.received, "parameters": parameters, **found}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        console.print(f"figures: {arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
