"""The CUDA codec against a copy in GPU memory, and the collectives against NCCL's.

Needs a GPU, and two for the collectives. Everything is interleaved in one run and reported by medians, so that what
else the machine does touches all alike. Before anything is timed, its results are compared bit by bit.

    python benchmarks/gpu.py [--quick] [--json FILE] [--dietgpu LIBRARY] [--require]

A bf16 element is 2 bytes in memory and about 1.4 on the wire: a codec that the GPU's memory alone limits takes 3.4 / 4
of the time that a copy takes, which moves 2 bytes twice. Columns in % say how much of that speed is reached.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import zipccl
from zipccl import _C

console = Console()
WIRE_BYTES = 1.4  # of a bf16 element
# Small tensors are taken in turn from this much memory, so that they do not come from a cache.
ROTATED_BYTES = 512 << 20
CODEC_CALLS = ("cuda_message_bytes", "cuda_encode", "cuda_decode", "cuda_reduce")


def native(name: str) -> Callable[..., Any]:
    # By name: a build without the CUDA part does not have it.
    return getattr(_C, name)


def what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU that this PyTorch can use"
    if not all(hasattr(_C, name) for name in CODEC_CALLS):
        return "zipccl was built without its CUDA part (build it where nvcc is, with ZIPCCL_CUDA=1)"
    return None


def gaussian(elements: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(elements, generator=generator, device="cuda") * 0.02).bfloat16()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# ---- Time on the GPU


def medians(calls: dict[str, Callable[[int], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """Seconds of each call. It is given the number of the repeat, to take other memory each time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    turn = 0
    for round_ in range(rounds + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for repeat in range(repeats):
                call(turn + repeat)
            end.record()
            end.synchronize()
            # The first rounds load kernels and let the clocks rise.
            if round_ >= 2:
                times[name].append(begin.elapsed_time(end) / 1e3 / repeats)
        turn += repeats
    return {name: statistics.median(values) for name, values in times.items()}


# ---- The codec


class Message:
    """Memory for one encoded tensor."""

    def __init__(self, tensor: torch.Tensor):
        sizes = native("cuda_message_bytes")(tensor.numel(), tensor.dtype)
        self.statics, self.pool, self.low = (torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes)

    def encode(self, tensor: torch.Tensor) -> None:
        native("cuda_encode")(tensor, self.statics, self.pool, self.low)

    def decode(self, output: torch.Tensor) -> None:
        native("cuda_decode")(self.statics, self.pool, self.low, output)


def reduce(messages: Sequence[Message], output: torch.Tensor) -> None:
    parts = [(message.statics, message.pool, message.low) for message in messages]
    native("cuda_reduce")(parts, output)


def codec_calls(elements: int, copies: int, senders: int) -> dict[str, Callable[[int], Any]]:
    inputs = [gaussian(elements, seed) for seed in range(copies)]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    messages = [Message(tensor) for tensor in inputs]
    for tensor, output, message in zip(inputs, outputs, messages, strict=True):
        message.encode(tensor)
        message.decode(output)
        assert same_bits(tensor, output), "the codec does not return the same bits"
    groups = [[messages[(copy + sender) % copies] for sender in range(senders)] for copy in range(copies)]
    reduce(groups[0], outputs[0])
    expected = torch.zeros(elements, dtype=torch.float32, device="cuda")
    for sender in range(senders):
        expected = inputs[sender % copies].float() + expected if sender else inputs[0].float()
    assert same_bits(expected.bfloat16(), outputs[0]), "the reduction does not return the same bits"
    return {
        "copy": lambda turn: outputs[turn % copies].copy_(inputs[turn % copies]),
        "encode": lambda turn: messages[turn % copies].encode(inputs[turn % copies]),
        "decode": lambda turn: messages[turn % copies].decode(outputs[turn % copies]),
        "reduce": lambda turn: reduce(groups[turn % copies], outputs[turn % copies]),
    }


def bytes_moved(name: str, elements: int, senders: int) -> float:
    """In GPU memory, at the least."""
    per_element = {"copy": 4.0, "encode": 2 + WIRE_BYTES, "decode": 2 + WIRE_BYTES, "reduce": 2 + senders * WIRE_BYTES}
    return per_element[name] * elements


def dietgpu_calls(tensor: torch.Tensor) -> dict[str, Callable[[int], Any]]:
    """github.com/facebookresearch/dietgpu: ANS over the exponents."""
    operators = torch.ops.dietgpu
    rows, columns = operators.max_float_compressed_output_size([tensor])
    work = torch.empty(384 << 20, dtype=torch.uint8, device="cuda")
    coded = torch.empty([rows, columns], dtype=torch.uint8, device="cuda")
    sizes = torch.zeros(1, dtype=torch.int32, device="cuda")
    output = torch.empty_like(tensor)
    status, lengths = torch.empty(1, dtype=torch.uint8, device="cuda"), torch.empty(1, dtype=torch.int32, device="cuda")

    def encode(turn: int) -> None:
        operators.compress_data(True, [tensor], False, work, coded, sizes)

    def decode(turn: int) -> None:
        operators.decompress_data(True, [coded[0]], [output], False, work, status, lengths)

    encode(0)
    decode(0)
    assert same_bits(tensor, output), "DietGPU does not return the same bits"
    return {"DietGPU encode": encode, "DietGPU decode": decode}


def nvcomp_calls(tensor: torch.Tensor) -> dict[str, Callable[[int], Any]]:
    """NVIDIA's ANS over the bytes. Its calls allocate their outputs."""
    nvcomp = importlib.import_module("nvidia.nvcomp")
    codec = nvcomp.Codec(algorithm="ANS", cuda_stream=torch.cuda.current_stream().cuda_stream)
    source = nvcomp.as_array(tensor.view(torch.uint8))
    coded = codec.encode(source)
    output = torch.as_tensor(codec.decode(coded), device="cuda").view(torch.uint8)
    assert torch.equal(tensor.view(torch.uint8), output), "nvCOMP does not return the same bits"
    return {
        "nvCOMP ANS encode": lambda turn: codec.encode(source),
        "nvCOMP ANS decode": lambda turn: codec.decode(coded),
    }


def codec_speed(elements: int, rounds: int, senders: int, others: Sequence[Callable]) -> dict[str, float]:
    """Seconds a call."""
    copies = max(2, min(64, ROTATED_BYTES // (2 * elements)))
    calls = codec_calls(elements, copies, senders)
    for other in others:
        calls |= other(gaussian(elements))
    return medians(calls, rounds, max(1, min(100, (64 << 20) // (2 * elements))))


def codec_table(speeds: dict[str, dict[str, float]], sizes: dict[str, int], senders: int) -> Table:
    table = Table(title=f"GB/s of bf16 on {torch.cuda.get_device_name()}", title_justify="left")
    table.add_column("tensor")
    for name in next(iter(speeds.values())):
        table.add_column(f"{name} of {senders}" if name == "reduce" else name, justify="right")
    for size, seconds in speeds.items():
        elements = sizes[size]
        bytes_per_second = bytes_moved("copy", elements, senders) / seconds["copy"]
        cells = []
        for name, value in seconds.items():
            # What is reduced is what arrives: all the senders' tensors.
            raw = 2 * elements * (senders if name == "reduce" else 1)
            cell = f"{raw / value / 1e9:.0f}"
            if name in ("encode", "decode", "reduce"):
                cell += f" ({100 * bytes_moved(name, elements, senders) / bytes_per_second / value:.0f} %)"
            cells.append(cell)
        table.add_row(size, *cells)
    return table


# ---- Collectives


def collective_calls(group: Any, shard: torch.Tensor) -> dict[str, Callable[[], Any]]:
    ranks = dist.get_world_size()
    whole = torch.cat([shard] * ranks)
    gathered, piece, exchanged = torch.empty_like(whole), torch.empty_like(shard), torch.empty_like(whole)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, shard, group=group) or gathered,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, group=group) or piece,
        "all_to_all": lambda: dist.all_to_all_single(exchanged, whole, group=group) or exchanged,
    }


def measure_collectives(rank: int, ranks: int, folder: str, sizes: dict[str, int], rounds: int) -> None:
    """One process for each GPU; the first one writes the median seconds of the slowest rank."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, device_id=device)
    groups = {"nccl": dist.new_group(backend="nccl")}
    for mode in ("zip", "raw"):
        groups[mode] = dist.new_group(backend="zipccl", pg_options=zipccl.Options(mode=mode))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for size, elements in sizes.items():
        calls = {name: collective_calls(group, gaussian(elements, rank)) for name, group in groups.items()}
        for collective in calls["nccl"]:
            outputs = {name: calls[name][collective]().clone() for name in groups}
            assert same_bits(outputs["zip"], outputs["raw"]), f"{collective}: zip and raw differ"
            if collective != "reduce_scatter":  # NCCL adds in another order, and rounds in between.
                assert same_bits(outputs["zip"], outputs["nccl"]), f"{collective}: zip and nccl differ"
            times: dict[str, list[float]] = {name: [] for name in groups}
            for round_ in range(rounds + 2):
                for name in groups:
                    dist.barrier()
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    calls[name][collective]()
                    torch.cuda.synchronize()
                    seconds = torch.tensor(time.perf_counter() - begin, device=device)
                    dist.all_reduce(seconds, dist.ReduceOp.MAX)
                    if round_ >= 2:
                        times[name].append(seconds.item())
            medians_of = {name: statistics.median(values) for name, values in times.items()}
            results.setdefault(collective, {})[size] = medians_of
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def collectives(ranks: int, sizes: dict[str, int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_collectives, (ranks, folder, sizes, rounds), ranks)
        return json.loads(Path(folder, "results.json").read_text())


def collectives_table(results: dict[str, dict[str, dict[str, float]]], sizes: dict[str, int], ranks: int) -> Table:
    table = Table(title=f"Collectives of {ranks} GPUs: GB/s that each receives from the others", title_justify="left")
    for column in ("", "shard", "nccl", "raw", "zip", "zip / nccl"):
        table.add_column(column, justify="left" if column in ("", "shard") else "right")
    for collective, by_size in results.items():
        for size, seconds in by_size.items():
            received = 2 * sizes[size] * (ranks - 1)
            speeds = [f"{received / seconds[name] / 1e9:.1f}" for name in ("nccl", "raw", "zip")]
            table.add_row(collective, size, *speeds, f"{seconds['nccl'] / seconds['zip']:.2f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds: a look, not a measurement")
    parser.add_argument(
        "--senders", type=int, default=4, help="messages that are reduced into one; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--dietgpu", type=Path, metavar="LIBRARY", help="compare with this build of DietGPU's library")
    parser.add_argument("--require", action="store_true", help="exit with 2 if nothing can be measured")
    arguments = parser.parse_args()
    missing = what_is_missing()
    if missing:
        print(f"Nothing to measure: {missing}.")
        return 2 if arguments.require else 0

    others: list[Callable] = []
    if arguments.dietgpu:
        torch.ops.load_library(str(arguments.dietgpu))
        others.append(dietgpu_calls)
    try:
        importlib.import_module("nvidia.nvcomp")
        others.append(nvcomp_calls)
    except ImportError:
        console.print("nvCOMP is not compared: nvidia-nvcomp is not installed", highlight=False)

    sizes = {"256 KiB": 1 << 17, "4 MiB": 1 << 21, "64 MiB": 1 << 25, "1 GiB": 1 << 29}
    if arguments.quick:
        sizes = {name: elements for name, elements in sizes.items() if elements < 1 << 26}
    rounds = 5 if arguments.quick else 21
    speeds = {name: codec_speed(elements, rounds, arguments.senders, others) for name, elements in sizes.items()}
    console.print(codec_table(speeds, sizes, arguments.senders))
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "codec seconds": speeds}

    ranks = torch.cuda.device_count()
    if ranks < 2:
        console.print("The collectives are not measured: they need two GPUs.")
    else:
        shards = {name: elements for name, elements in sizes.items() if elements < 1 << 29}
        results = collectives(ranks, shards, rounds)
        console.print(collectives_table(results, shards, ranks))
        figures |= {"ranks": ranks, "collective seconds": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
