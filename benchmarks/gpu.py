"""The CUDA codec against a copy in GPU memory, and the collectives against NCCL's.

Needs a GPU, and two for the collectives. Everything is interleaved in one run and reported by medians, so that what
else the machine does touches all alike. Before anything is timed, its results are compared bit by bit.

    python benchmarks/gpu.py [--minutes 4] [--quick] [--json FILE] [--dietgpu LIBRARY] [--require]

A bf16 element is 2 bytes in memory and about 1.4 on the wire: a codec that the GPU's memory alone limits takes 3.4 / 4
of the time that a copy takes, which moves 2 bytes twice. Columns in % say how much of that speed is reached.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import zipccl
from zipccl import _C

# Also in a file, where a table would be cut at 80 columns.
console = Console(width=None if sys.stdout.isatty() else 120)
SIGMA = 0.02
WIRE_BYTES = 1.4  # of an element without its low half
# Tensors are taken in turn from so much memory, so that they do not come from a cache.
ROTATED_BYTES = 512 << 20
LEAST_ROUNDS = 3


def what_is_missing() -> str | None:
    if not torch.cuda.is_available():
        return "there is no GPU that this PyTorch can use"
    if not _C.built_with_cuda:
        return "zipccl is built without its CUDA part; a build with ZIPCCL_CUDA=1 tells why"
    return None


class Case(NamedTuple):
    name: str
    dtype: torch.dtype
    elements: int

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


SIZES = {"4 MiB": 4 << 20, "32 MiB": 32 << 20, "256 MiB": 256 << 20, "1 GiB": 1 << 30}
CASES = [Case(f"bf16, {name}", torch.bfloat16, size // 2) for name, size in SIZES.items()]
CASES.append(Case("fp32 of bf16, 256 MiB", torch.float32, 64 << 20))


def gaussian(elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """fp32 values are rounded to bf16, as gradients are that FSDP2 reduces in fp32."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(elements, generator=generator, device="cuda") * SIGMA).bfloat16().to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# ---- Time on the GPU


def captured(call: Callable[[int], Any], repeats: int) -> Callable[[], Any]:
    """So many calls as a graph: their time is then the GPU's, and not that of Python, which takes longer to launch a
    kernel than a small tensor needs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for repeat in range(repeats):
            call(repeat)
    return graph.replay


def medians(calls: dict[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """Seconds of each call, of so many rounds or of fewer where time runs out."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds
    for round_ in range(rounds + 2):
        if round_ >= 2 + LEAST_ROUNDS and time.perf_counter() > stop:
            break
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            # The first rounds let the clocks rise.
            if round_ >= 2:
                times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


# ---- The codec


class Message:
    """Memory for one encoded tensor, with as much of an inline pool as the collectives give it."""

    def __init__(self, tensor: torch.Tensor):
        inline = -(-(tensor.numel() // 24) // 128) * 128
        statics, pool, low = (
            torch.zeros(size, dtype=torch.uint8, device="cuda") for size in _C.cuda_message_bytes(tensor, inline)
        )
        self.parts = statics, pool, low

    def encode(self, tensor: torch.Tensor, tops: torch.Tensor | None = None) -> None:
        _C.cuda_encode(tensor, self.parts, tops)

    def decode(self, output: torch.Tensor) -> torch.Tensor:
        return _C.cuda_decode(self.parts, output)


def reduce(messages: Sequence[Message], output: torch.Tensor) -> torch.Tensor:
    return _C.cuda_reduce([message.parts for message in messages], output)


def codec_calls(case: Case, copies: int, senders: int) -> dict[str, Callable[[int], Any]]:
    inputs = [gaussian(case.elements, case.dtype, seed) for seed in range(copies)]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    messages = [Message(tensor) for tensor in inputs]
    top = zipccl.window(SIGMA).stop - 1
    tops = torch.full((-(-case.elements // 8192),), top, dtype=torch.int16, device="cuda")
    for tensor, output, message in zip(inputs, outputs, messages, strict=True):
        for windows in (tops, None):
            message.encode(tensor, windows)
            assert not message.decode(output).any(), "the decoder finds a fault"
            assert same_bits(tensor, output), "the codec does not return the same bits"
            output.zero_()
    groups = [[messages[(copy + sender) % copies] for sender in range(senders)] for copy in range(copies)]
    assert not reduce(groups[0], outputs[0]).any(), "the reduction finds a fault"
    expected = inputs[0].float()
    for sender in range(1, senders):
        expected = expected + inputs[sender % copies].float()
    assert same_bits(expected.to(case.dtype), outputs[0]), "the reduction does not return the same bits"
    return {
        "copy": lambda turn: outputs[turn % copies].copy_(inputs[turn % copies]),
        "encode": lambda turn: messages[turn % copies].encode(inputs[turn % copies], tops),
        "encode, sampled": lambda turn: messages[turn % copies].encode(inputs[turn % copies]),
        "decode": lambda turn: messages[turn % copies].decode(outputs[turn % copies]),
        "reduce": lambda turn: reduce(groups[turn % copies], outputs[turn % copies]),
    }


def bytes_moved(name: str, itemsize: int, senders: int) -> float:
    """For an element, in GPU memory, at the least."""
    return {"copy": 2.0 * itemsize, "reduce": itemsize + senders * WIRE_BYTES}.get(name, itemsize + WIRE_BYTES)


def dietgpu_calls(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """github.com/facebookresearch/dietgpu: ANS over the exponents."""
    operators = torch.ops.dietgpu
    rows, columns = operators.max_float_compressed_output_size([tensor])
    work = torch.empty(384 << 20, dtype=torch.uint8, device="cuda")
    coded = torch.empty([rows, columns], dtype=torch.uint8, device="cuda")
    sizes = torch.zeros(1, dtype=torch.int32, device="cuda")
    output = torch.empty_like(tensor)
    status, lengths = torch.empty(1, dtype=torch.uint8, device="cuda"), torch.empty(1, dtype=torch.int32, device="cuda")

    def encode() -> None:
        operators.compress_data(True, [tensor], False, work, coded, sizes)

    def decode() -> None:
        operators.decompress_data(True, [coded[0]], [output], False, work, status, lengths)

    encode()
    decode()
    assert same_bits(tensor, output), "DietGPU does not return the same bits"
    return {"DietGPU encode": encode, "DietGPU decode": decode}


def nvcomp_calls(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """NVIDIA's ANS over the bytes. Its calls allocate their outputs."""
    nvcomp = importlib.import_module("nvidia.nvcomp")
    codec = nvcomp.Codec(algorithm="ANS", cuda_stream=torch.cuda.current_stream().cuda_stream)
    source = nvcomp.as_array(tensor.view(torch.uint8))
    coded = codec.encode(source)
    output = torch.as_tensor(codec.decode(coded), device="cuda").view(torch.uint8)
    assert torch.equal(tensor.view(torch.uint8), output), "nvCOMP does not return the same bits"
    return {"nvCOMP ANS encode": lambda: codec.encode(source), "nvCOMP ANS decode": lambda: codec.decode(coded)}


def codec_speed(
    case: Case, rounds: int, senders: int, others: Sequence[Callable], seconds: float
) -> dict[str, float] | None:
    """Seconds a call, or None where the GPU has not the memory for it."""
    copies = max(2, min(256, ROTATED_BYTES // case.bytes))
    if 5 * copies * case.bytes + 6 * case.bytes > torch.cuda.mem_get_info()[0]:
        return None
    calls = codec_calls(case, copies, senders)
    queued = {name: captured(call, copies) for name, call in calls.items()}
    if case.dtype == torch.bfloat16:
        for other in others:
            queued |= other(gaussian(case.elements, case.dtype))
    times = medians(queued, rounds, seconds)
    return {name: value / (copies if name in calls else 1) for name, value in times.items()}


def codec_table(speeds: dict[str, dict[str, float]], senders: int) -> Table:
    table = Table(title=f"GB/s of tensors on {torch.cuda.get_device_name()}", title_justify="left")
    table.add_column("tensor")
    names = list(dict.fromkeys(name for seconds in speeds.values() for name in seconds))
    for name in names:
        table.add_column(f"{name} of {senders}" if name == "reduce" else name, justify="right")
    for case in CASES:
        if case.name not in speeds:
            continue
        seconds, itemsize = speeds[case.name], case.dtype.itemsize
        copied_per_second = bytes_moved("copy", itemsize, senders) * case.elements / seconds["copy"]
        cells = []
        for name in names:
            if name not in seconds:
                cells.append("")
                continue
            # What is reduced is what arrives: all the senders' tensors.
            raw = case.bytes * (senders if name == "reduce" else 1)
            cell = f"{raw / seconds[name] / 1e9:.0f}"
            if name.startswith(("encode", "decode", "reduce")):
                bound = bytes_moved(name, itemsize, senders) * case.elements / copied_per_second
                cell += f" ({100 * bound / seconds[name]:.0f} %)"
            cells.append(cell)
        table.add_row(case.name, *cells)
    return table


def measure_codec(
    rounds: int, senders: int, others: Sequence[Callable], cases: Sequence[Case], deadline: float
) -> dict:
    speeds = {}
    for number, case in enumerate(cases):
        seconds = (deadline - time.time()) / (len(cases) - number)
        speed = codec_speed(case, rounds, senders, others, seconds)
        torch.cuda.empty_cache()
        if speed is None:
            console.print(f"{case.name}: the GPU's free memory is too little", highlight=False)
        else:
            speeds[case.name] = speed
    return speeds


# ---- Collectives

SHARDS = [Case(f"bf16, {name}", torch.bfloat16, SIZES[name] // 2) for name in ("4 MiB", "32 MiB", "256 MiB")]
SHARDS += [Case(f"fp32 of bf16, {name}", torch.float32, SIZES[name] // 4) for name in ("32 MiB", "256 MiB")]
MODES = ("zip", "raw")


def collective_calls(group: Any, shard: torch.Tensor) -> dict[str, Callable[[], Any]]:
    ranks = dist.get_world_size()
    whole = torch.cat([shard] * ranks)
    gathered, piece, exchanged = torch.empty_like(whole), torch.empty_like(shard), torch.empty_like(whole)
    return {
        "all_gather": lambda: dist.all_gather_into_tensor(gathered, shard, group=group) or gathered,
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, group=group) or piece,
        "all_to_all": lambda: dist.all_to_all_single(exchanged, whole, group=group) or exchanged,
    }


def measure_one(calls: dict[str, Callable[[], Any]], rounds: int, stop: float) -> dict[str, float]:
    """Median seconds of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        latest = 0.0
        for name, call in calls.items():
            dist.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            # With the time of day, so that all ranks stop after the same round.
            figures = torch.tensor([time.perf_counter() - begin, time.time()], dtype=torch.float64, device="cuda")
            dist.all_reduce(figures, dist.ReduceOp.MAX)
            seconds, latest = figures.tolist()
            if round_ >= 2:
                times[name].append(seconds)
        if round_ + 1 >= 2 + LEAST_ROUNDS and latest > stop:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def measure_collectives(
    rank: int, ranks: int, folder: str, shards: Sequence[Case], rounds: int, deadline: float
) -> None:
    """One process for each GPU; the first one writes the results."""
    torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    groups = {"nccl": dist.new_group(backend="nccl", timeout=timeout)}
    for mode in MODES:
        groups[mode] = dist.new_group(backend="zipccl", timeout=timeout, pg_options=zipccl.Options(mode=mode))
    results: dict[str, dict[str, dict[str, float]]] = {}
    left = 3 * len(shards)
    for case in shards:
        calls = {
            name: collective_calls(group, gaussian(case.elements, case.dtype, rank)) for name, group in groups.items()
        }
        for collective in calls["nccl"]:
            outputs = {name: calls[name][collective]().clone() for name in groups}
            assert same_bits(outputs["zip"], outputs["raw"]), f"{collective}: zip and raw differ"
            if collective != "reduce_scatter":  # NCCL adds in another order, and rounds in between.
                assert same_bits(outputs["zip"], outputs["nccl"]), f"{collective}: zip and nccl differ"
            del outputs
            stop = time.time() + (deadline - time.time()) / left
            left -= 1
            of_collective = {name: calls[name][collective] for name in groups}
            results.setdefault(collective, {})[case.name] = measure_one(of_collective, rounds, stop)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def collectives(ranks: int, shards: Sequence[Case], rounds: int, deadline: float) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_collectives, (ranks, folder, shards, rounds, deadline), ranks)
        return json.loads(Path(folder, "results.json").read_text())


def collectives_table(results: dict[str, dict[str, dict[str, float]]], ranks: int) -> Table:
    title = f"Collectives of {ranks} GPUs: GB/s that each receives from the others"
    table = Table(title=title, title_justify="left")
    for column in ("", "shard", "nccl", "raw", "zip", "zip / nccl"):
        table.add_column(column, justify="left" if column in ("", "shard") else "right")
    for collective, by_case in results.items():
        for case in SHARDS:
            if case.name not in by_case:
                continue
            seconds = by_case[case.name]
            received = case.bytes * (ranks - 1)
            speeds = [f"{received / seconds[name] / 1e9:.1f}" for name in ("nccl", "raw", "zip")]
            table.add_row(collective, case.name, *speeds, f"{seconds['nccl'] / seconds['zip']:.2f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="about how long it may take; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds: a look, not a measurement")
    parser.add_argument(
        "--senders", type=int, default=4, help="messages that are reduced into one; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument("--dietgpu", type=Path, metavar="LIBRARY", help="compare with this build of DietGPU's library")
    parser.add_argument("--require", action="store_true", help="exit with 2 if nothing can be measured")
    arguments = parser.parse_args()
    begin = time.time()
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

    ranks = torch.cuda.device_count()
    limit = 32 << 20 if arguments.quick else 1 << 30
    rounds = 5 if arguments.quick else 21
    end = begin + 60 * arguments.minutes
    half = end if ranks < 2 else begin + 30 * arguments.minutes
    speeds = measure_codec(rounds, arguments.senders, others, [case for case in CASES if case.bytes <= limit], half)
    console.print(codec_table(speeds, arguments.senders))
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "codec seconds": speeds}

    if ranks < 2:
        console.print("The collectives are not measured: they need two GPUs.")
    else:
        results = collectives(ranks, [case for case in SHARDS if case.bytes <= limit], rounds, end)
        console.print(collectives_table(results, ranks))
        figures |= {"ranks": ranks, "collective seconds": results}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
