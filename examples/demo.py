"""Trains a small transformer with FSDP2 on two CPU processes, first over gloo, then over zipccl, and compares.

What is compared: the loss of every step and all weights after the last one, bit for bit, and what went over the wire.
The exit code is 0 if every bit is the same. `make demo` runs it; `--help` lists what can be changed.
"""

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

WORLD_SIZE = 2
VOCABULARY = 256
WIDTH = 256
HEADS = 4
LAYERS = 4
SEQUENCE = 64
BATCH = 8  # sequences a process and step

# The most that wire bytes / raw bytes may be: bf16 parameters, and bf16 gradients that travel as fp32.
TARGETS = {"all_gather": 0.72, "reduce_scatter": 0.38}


class Linear(nn.Linear):
    """bf16 parameters and activations, fp32 arithmetic: many CPUs have no fast bf16 matrix multiplication."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = Linear(WIDTH, 3 * WIDTH)
        self.projection = Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = Linear(WIDTH, 4 * WIDTH)
        self.down = Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = Linear(WIDTH, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.tokens.weight, std=0.5)  # well apart from the start: learns within 20 steps

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MarkovText:
    """Endless text in which each token has few likely successors: the loss can fall from ln 256 = 5.5 to about 1."""

    def __init__(self, rank: int) -> None:
        language = torch.Generator().manual_seed(1)  # the same on all ranks
        self.successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=language)
        self.likelihood = torch.tensor([0.6, 0.25, 0.1, 0.05])
        self.generator = torch.Generator().manual_seed(100 + rank)

    def batch(self) -> Tensor:
        text = torch.empty(BATCH, SEQUENCE + 1, dtype=torch.long)
        text[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=self.generator)
        choices = torch.multinomial(self.likelihood, BATCH * SEQUENCE, replacement=True, generator=self.generator).view(
            BATCH, SEQUENCE
        )
        for i in range(SEQUENCE):
            text[:, i + 1] = self.successors[text[:, i], choices[:, i]]
        return text


@dataclass
class Run:
    """What one training run over one backend gave."""

    losses: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)  # a digest of each rank's shards, in rank order
    seconds: float = 0.0
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)  # zipccl only: rank 0's


def steps(rank: int, backend: str, count: int, reporter: Connection) -> None:
    """Reports ("step", loss) after each step of rank 0, then ("end", Run)."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Transformer()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = MarkovText(rank)
    run = Run()
    start = time.perf_counter()
    for _ in range(count):
        batch = text.batch()
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / WORLD_SIZE
        dist.all_reduce(mean)
        run.losses.append(mean.item())
        if rank == 0:
            reporter.send(("step", mean.item()))
    run.seconds = time.perf_counter() - start
    if backend == "zipccl":
        import zipccl

        run.stats = zipccl.stats(mesh.get_group())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.to_local().detach().numpy().tobytes())  # type: ignore[attr-defined]
    digests: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(digests, digest.hexdigest())
    run.weights = digests
    if rank == 0:
        reporter.send(("end", run))


def train(rank: int, backend: str, count: int, rendezvous: str, reporter: Connection) -> None:
    """One process."""
    options: Any = None
    if backend == "zipccl":
        import zipccl  # importing it registers the backend

        # Left to itself, zipccl measures what is faster: within one machine, that is to compress nothing.
        options = zipccl.Options(mode="zip")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORLD_SIZE))
    torch.manual_seed(0)
    dist.init_process_group(
        backend, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE, pg_options=options
    )
    try:
        steps(rank, backend, count, reporter)
    finally:
        # FSDP's modules hold the group: if it went with the interpreter, its threads could end it with an error.
        gc.collect()
        dist.destroy_process_group()


def run_backend(backend: str, steps: int, console: Console) -> Run:
    """Trains in two new processes; shows a bar on a terminal and a line a step elsewhere."""
    columns = (
        TextColumn("{task.description:>7}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    reports, reporter = mp.get_context("spawn").Pipe(duplex=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task(backend, total=steps, loss="starting two processes")
        if not console.is_terminal:
            console.print(f"{backend}: starting two processes")
        arguments = (backend, steps, str(Path(folder, "rendezvous")), reporter)
        processes = mp.start_processes(train, arguments, nprocs=WORLD_SIZE, join=False, start_method="spawn")
        assert processes is not None
        done = 0
        while True:
            while not reports.poll(1):
                processes.join(timeout=0)  # raises what a process raised
            kind, value = reports.recv()
            if kind == "end":
                break
            done += 1
            progress.update(bar, completed=done, loss=f"loss {value:.3f}")
            if not console.is_terminal:
                console.print(f"{backend}: step {done}/{steps}, loss {value:.3f}")
        while not processes.join():
            pass
    return value


def losses_table(runs: dict[str, Run]) -> Table:
    table = Table("step", *runs, "same bits", title="Loss", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for step, losses in enumerate(zip(*(run.losses for run in runs.values()), strict=True), 1):
        same = "yes" if len(set(losses)) == 1 else "[red]NO"
        table.add_row(str(step), *(f"{loss:.9f}" for loss in losses), same)
    return table


def stats_table(stats: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="zipccl.stats() of rank 0", title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("collective", no_wrap=True)
    for name in ("calls", "zipped", "raw MB", "wire MB", "wire/raw", "target", "seconds"):
        table.add_column(name, justify="right")
    for name, entry in stats.items():
        target = TARGETS.get(name)
        table.add_row(
            name,
            str(entry["calls"]),
            str(entry["zipped"]),
            f"{entry['raw_bytes'] / 1e6:.2f}",
            f"{entry['wire_bytes'] / 1e6:.2f}",
            f"{ratio(entry):.3f}" if entry["raw_bytes"] else "",
            f"{target} " + ("met" if ratio(entry) <= target else "[red]missed") if target else "",
            f"{entry['seconds']['total']:.2f}",
        )
    return table


def ratio(entry: dict[str, Any]) -> float:
    return entry["wire_bytes"] / entry["raw_bytes"] if entry["raw_bytes"] else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="training steps over each backend (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    if importlib.util.find_spec("zipccl") is None:
        console.print("zipccl is not installed in this Python: `make demo` builds it and runs this.")
        return 2

    parameters = sum(parameter.numel() for parameter in Transformer().parameters())
    console.print(f"A transformer of {parameters / 1e6:.1f} M parameters, FSDP2 on {WORLD_SIZE} processes:")
    console.print("bf16 parameters are gathered, bf16 gradients are reduced in fp32.")
    runs = {backend: run_backend(backend, arguments.steps, console) for backend in ("gloo", "zipccl")}

    same = {
        "losses": runs["gloo"].losses == runs["zipccl"].losses,
        "weights": runs["gloo"].weights == runs["zipccl"].weights,
    }
    console.print(losses_table(runs))
    console.print(stats_table(runs["zipccl"].stats))
    console.print("MB: 10^6 bytes that this rank sends, without those of calls handed to gloo.")
    for what, equal in same.items():
        console.print(f"The {what} over gloo and zipccl: " + ("[green]bit-identical" if equal else "[red]DIFFERENT"))
    seconds = ", ".join(f"{run.seconds:.1f} s over {backend}" for backend, run in runs.items())
    console.print(f"Training took {seconds}, on one machine.")
    if arguments.json:
        arguments.json.write_text(json.dumps({backend: asdict(run) for backend, run in runs.items()}, indent=2))
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
