"""The codec as a Python module: compiles csrc/codec/cpu with c_api.cpp, loads it with ctypes, wraps the calls.

The coder "cuda" is csrc/codec/cuda over the emulator of tests/simt, in a second library with the same functions.
Every wrapper hands the codec outputs of exactly the agreed size and checks guard bytes before and behind them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simt"))
import emulator as simt

HERE = Path(__file__).resolve().parent
CODEC = HERE.parent.parent / "csrc" / "codec"
SOURCES = sorted((CODEC / "cpu").glob("*.cpp"))

BYTES, BF16, FP32 = 0, 1, 2
DTYPES = {"bytes": BYTES, "bf16": BF16, "fp32": FP32}
NUMPY = {BYTES: np.uint8, BF16: np.uint16, FP32: np.uint32}
STORE, SUM, MIN, MAX = range(4)
CHUNK = 8192
GUARD = 256
GUARD_BYTE = 0xA5


class FormatError(Exception):
    """The codec's FormatError."""


# ----------------------------------------------------------------------------------------------------------------------
# Building


def processor_has_avx512() -> bool:
    try:
        return "avx512_vbmi2" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def emulation_flags() -> list[str]:
    """Compiler flags under which the AVX-512 coder runs on any processor; empty without the SIMDe headers."""
    try:
        import simde_py
    except ImportError:
        return []
    header = HERE / "emulated_avx512.h"
    return [f'-DZIPCCL_AVX512_HEADER="{header}"', "-I", simde_py.get_include(), "-mavx2", "-fwrapv", "-Wno-psabi"]


def cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"zipccl-codec-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def build(name: str, sources: Sequence[Path], flags: Sequence[str], link_flags: Sequence[str]) -> Path:
    """Compiles `sources`, in parallel, and links them. What was compiled before is kept."""
    emulate = [] if processor_has_avx512() else emulation_flags()
    folders = [CODEC, CODEC / "cuda", HERE, simt.FOLDER]
    headers = [file.read_bytes() for folder in folders for file in sorted(folder.glob("*.[hc]u*"))]
    headers += [file.read_bytes() for folder in [*folders, CODEC / "cpu"] for file in sorted(folder.glob("*.h"))]
    folder = cache_folder()
    objects, running = [], []
    for source in sources:
        special = emulate if source.name == "avx512.cpp" else [flag for flag in emulate if flag.startswith("-D")]
        command = ["g++", "-std=c++17", "-I", str(CODEC), *flags, *special, "-c", str(source)]
        digest = hashlib.sha256(b"".join([repr(command).encode(), source.read_bytes(), *headers])).hexdigest()
        objects.append(folder / f"{source.stem}-{digest[:16]}.o")
        if not objects[-1].exists():
            partial = objects[-1].with_suffix(f".{os.getpid()}")
            running.append((subprocess.Popen([*command, "-o", str(partial)]), partial, objects[-1]))
    for process, partial, target in running:
        if process.wait() != 0:
            raise RuntimeError(f"{target.name} does not compile")
        os.replace(partial, target)
    output = folder / f"{name}-{hashlib.sha256(repr([objects, link_flags]).encode()).hexdigest()[:16]}"
    if not output.exists():
        partial = output.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *map(str, objects), *link_flags, "-o", str(partial)], check=True)
        os.replace(partial, output)
    return output


def load(path: Path) -> ctypes.CDLL:
    """A library with the functions that all coders have."""
    loaded = ctypes.CDLL(str(path))
    loaded.last_error.restype = ctypes.c_char_p
    u64, pointer, integer, real = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    options = [pointer, u64, integer, pointer, integer, integer, real]
    message = [pointer, u64, pointer, u64, u64, integer]
    calls = {
        "encode": [*options, u64, pointer, pointer, pointer, pointer],
        "encode_contiguous": [*options, pointer, pointer],
        "decode": [*message, pointer],
        "accumulate": [*message, integer, pointer],
        "accumulate_values": [pointer, u64, integer, real, integer, pointer],
        "finish": [pointer, u64, real, integer, pointer],
    }
    for name, arguments in calls.items():
        getattr(loaded, "api_" + name).argtypes = arguments
    return loaded


@functools.cache
def library() -> ctypes.CDLL:
    path = build(
        "library",
        [*SOURCES, HERE / "c_api.cpp", HERE / "sweep.cpp"],
        ["-O3", "-fPIC", "-Wall", "-Wextra", "-Werror"],
        ["-shared"],
    )
    loaded = load(path)
    loaded.api_coder_name.restype = ctypes.c_char_p
    u64, pointer, integer, real = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    sizes = {
        "static_bytes": [u64, u64],
        "plain_bytes": [u64, integer],
        "pool_offset": [u64],
        "body_offset": [u64, u64],
        "chunk_count": [u64],
        "pool_bound": [u64],
        "low_bound": [u64, integer],
        "dynamic_bytes": [u64, u64, u64],
        "dynamic_bound": [u64, integer, u64],
        "contiguous_bound": [u64, integer],
    }
    for name, arguments in sizes.items():
        function = getattr(loaded, "api_" + name)
        function.argtypes, function.restype = arguments, u64
    calls = {
        "set_coder": [ctypes.c_char_p],
        "window_top": [real],
        "best_window": [pointer],
        "plan": [pointer, u64, integer, pointer, pointer],
        "contiguous_message": [pointer, u64, pointer, pointer],
        "read_header": [pointer, u64, pointer],
    }
    for name, arguments in calls.items():
        getattr(loaded, "api_" + name).argtypes = arguments
    loaded.sweep.argtypes = [ctypes.c_char_p, integer]
    if loaded.api_set_coder(b"portable") != 0:
        raise RuntimeError("the portable coder must always run")
    return loaded


@functools.cache
def cuda_library() -> ctypes.CDLL:
    flags = ["-I", str(CODEC.parent), "-I", str(simt.FOLDER), "-isystem", str(simt.cuda_include())]
    flags += ["-O2", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
    # The process may have the real runtime too, which PyTorch brings: each must find its own functions.
    link = ["-shared", "-Wl,-Bsymbolic"]
    return load(build("cuda", [HERE / "cuda_api.cpp", *simt.ENGINE], [*flags, "-Wno-unknown-pragmas"], link))


def size(name: str, *arguments: int) -> int:
    """A size function of format.h or codec.h, by name."""
    return getattr(library(), "api_" + name)(*arguments)


def call(name: str, *arguments) -> None:
    """One of the codec's functions, by the coder in use."""
    own = cuda_library() if cuda_in_use else library()
    result = getattr(own, "api_" + name)(*arguments)
    if result != 0:
        text = own.last_error().decode()
        raise FormatError(text) if result == -1 else RuntimeError(text)


@functools.cache
def cpu_coders() -> list[str]:
    """The CPU's coders that run here; AVX-512 emulated if need be."""
    return [name for name in ("portable", "avx2", "avx512") if library().api_set_coder(name.encode()) == 0]


@functools.cache
def coders() -> list[str]:
    """All coders that run here: the GPU's on the emulator, which needs CUDA's headers."""
    return cpu_coders() + (["cuda"] if simt.cuda_include() else [])


cuda_in_use = False


@contextmanager
def using(coder: str | None) -> Iterator[None]:
    global cuda_in_use
    previous = library().api_coder_name()
    if coder not in (None, "cuda"):
        call("set_coder", coder.encode())
    cuda_in_use = coder == "cuda"
    try:
        yield
    finally:
        cuda_in_use = False
        library().api_set_coder(previous)


# ----------------------------------------------------------------------------------------------------------------------
# Memory


class Guarded:
    """`size` bytes at `offset` behind a 128-byte boundary, between guard bytes."""

    def __init__(self, size: int, offset: int = 0):
        self.whole = np.full(size + 2 * GUARD + 128 + offset, GUARD_BYTE, np.uint8)
        start = GUARD + (-(self.whole.ctypes.data + GUARD) % 128) + offset
        self.before = self.whole[:start]
        self.bytes = self.whole[start : start + size]
        self.behind = self.whole[start + size :]

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def check(self) -> None:
        assert (self.before == GUARD_BYTE).all(), "bytes before an output were overwritten"
        assert (self.behind == GUARD_BYTE).all(), "bytes behind an output were overwritten"


def number(dtype: int | str) -> int:
    return DTYPES[dtype] if isinstance(dtype, str) else int(dtype)


def as_input(array: np.ndarray, dtype: int, offset_elements: int = 0) -> np.ndarray:
    """A copy of the patterns in `array` that starts `offset_elements` elements behind a 128-byte boundary."""
    array = np.ascontiguousarray(array).reshape(-1)
    kind = np.dtype(NUMPY[dtype])
    patterns = array.view(kind) if array.dtype.itemsize == kind.itemsize else array.astype(kind)
    memory = Guarded(patterns.nbytes, offset_elements * kind.itemsize)
    copy = memory.bytes.view(kind)
    copy[:] = patterns
    return copy


def address(data: np.ndarray | None) -> int | None:
    return None if data is None else data.ctypes.data


def as_bytes(data: bytes | np.ndarray, offset: int = 0) -> np.ndarray:
    data = np.frombuffer(data, np.uint8) if isinstance(data, (bytes, bytearray)) else data
    memory = Guarded(len(data), offset)
    memory.bytes[:] = data
    return memory.bytes


# ----------------------------------------------------------------------------------------------------------------------
# The interface


def encode(
    array: np.ndarray,
    dtype: int | str,
    *,
    tops: Sequence[int] | None = None,
    plain: bool = False,
    checksum: bool = False,
    scale: float = 1.0,
    inline_bytes: int | None = None,
    coder: str | None = None,
    offset_elements: int = 0,
    output_offset: int = 0,
) -> tuple[bytes, bytes]:
    """Static and dynamic part. `inline_bytes` is a 24th of the elements unless given."""
    dtype = number(dtype)
    values = as_input(array, dtype, offset_elements)
    n = len(values)
    plain = plain or dtype == BYTES
    if inline_bytes is None:
        inline_bytes = n // 24
    windows = None if tops is None else np.asarray(tops, np.int16)
    statics = Guarded(size("plain_bytes", n, dtype) if plain else size("static_bytes", n, inline_bytes), output_offset)
    bound = 0 if plain else size("dynamic_bound", n, dtype, inline_bytes)
    dynamic = Guarded(bound, output_offset)
    used, escapes = ctypes.c_uint64(), ctypes.c_uint64()
    with using(coder):
        call(
            "encode", address(values), n, dtype, address(windows), plain, checksum, scale, inline_bytes,
            statics.address, dynamic.address if bound else None, ctypes.byref(used), ctypes.byref(escapes),
        )  # fmt: skip
    statics.check()
    dynamic.check()
    if not plain and escapes.value < inline_bytes:
        unused = statics.bytes[size("pool_offset", n) + escapes.value :]
        assert (unused == GUARD_BYTE).all(), "unused bytes of the inline pool were overwritten"
        unused[:] = 0
    return statics.bytes.tobytes(), dynamic.bytes[: used.value].tobytes()


def plan(array: np.ndarray, dtype: int, windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """The windows of an encoding, and the escapes of each chunk with them."""
    values = as_input(array, dtype, 0)
    chosen, escapes = np.array(windows, np.int16), np.zeros(len(windows), np.uint32)
    with using("portable"):
        call("plan", address(values), len(values), dtype, address(chosen), address(escapes))
    return chosen.tolist(), escapes.tolist()


def encode_contiguous(
    array: np.ndarray,
    dtype: int | str,
    *,
    tops: Sequence[int] | None = None,
    plain: bool = False,
    checksum: bool = False,
    scale: float = 1.0,
    coder: str | None = None,
    offset_elements: int = 0,
) -> bytes:
    dtype = number(dtype)
    values = as_input(array, dtype, offset_elements)
    windows = None if tops is None else np.asarray(tops, np.int16)
    output = Guarded(size("contiguous_bound", len(values), dtype))
    used = ctypes.c_uint64()
    with using(coder):
        call(
            "encode_contiguous", address(values), len(values), dtype, address(windows), plain, checksum, scale,
            output.address, ctypes.byref(used),
        )  # fmt: skip
    output.check()
    return output.bytes[: used.value].tobytes()


def split(message: bytes) -> tuple[bytes, bytes]:
    """Static and dynamic part of a contiguous message."""
    static_size, dynamic_offset = ctypes.c_uint64(), ctypes.c_uint64()
    call("contiguous_message", message, len(message), ctypes.byref(static_size), ctypes.byref(dynamic_offset))
    return message[: static_size.value], message[dynamic_offset.value :]


def decode(
    static: bytes,
    dynamic: bytes,
    n: int,
    dtype: int | str,
    *,
    coder: str | None = None,
    offset_elements: int = 0,
    input_offset: int = 0,
) -> np.ndarray:
    dtype = number(dtype)
    kind = np.dtype(NUMPY[dtype])
    output = Guarded(n * kind.itemsize, offset_elements * kind.itemsize)
    static_part, dynamic_part = as_bytes(static, input_offset), as_bytes(dynamic, input_offset)
    with using(coder):
        try:
            call(
                "decode", address(static_part), len(static_part), address(dynamic_part), len(dynamic_part), n, dtype,
                output.address,
            )  # fmt: skip
        finally:
            output.check()
    return output.bytes.view(kind)


def decode_contiguous(message: bytes, n: int, dtype: int | str, *, coder: str | None = None) -> np.ndarray:
    return decode(*split(message), n, dtype, coder=coder)


def accumulate(
    static: bytes,
    dynamic: bytes,
    dtype: int | str,
    reduction: int,
    accumulator: np.ndarray,
    *,
    coder: str | None = None,
) -> np.ndarray:
    """The accumulator after the message was added; `accumulator` stays as it is."""
    target = Guarded(4 * len(accumulator))
    target.bytes.view(np.float32)[:] = accumulator
    static_part, dynamic_part = as_bytes(static), as_bytes(dynamic)
    with using(coder):
        call(
            "accumulate", address(static_part), len(static_part), address(dynamic_part), len(dynamic_part),
            len(accumulator), number(dtype), reduction, target.address,
        )  # fmt: skip
    target.check()
    return target.bytes.view(np.float32)


def accumulate_values(
    values: np.ndarray, dtype: int | str, scale: float, reduction: int, accumulator: np.ndarray, *,
    coder: str | None = None, offset_elements: int = 0,
) -> np.ndarray:  # fmt: skip
    target = Guarded(4 * len(accumulator))
    target.bytes.view(np.float32)[:] = accumulator
    source = as_input(values, number(dtype), offset_elements)
    with using(coder):
        call("accumulate_values", address(source), len(source), number(dtype), scale, reduction, target.address)
    target.check()
    return target.bytes.view(np.float32)


def finish(accumulator: np.ndarray, divisor: float, dtype: int | str, *, coder: str | None = None) -> np.ndarray:
    """Patterns of the rounded quotients."""
    kind = np.dtype(NUMPY[number(dtype)])
    source = np.ascontiguousarray(accumulator, np.float32)
    output = Guarded(len(source) * kind.itemsize)
    with using(coder):
        call("finish", address(source), len(source), divisor, number(dtype), output.address)
    output.check()
    return output.bytes.view(kind)


# ----------------------------------------------------------------------------------------------------------------------
# Values


def bf16(values: np.ndarray) -> np.ndarray:
    """Patterns of fp32 values rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def to_float(patterns: np.ndarray) -> np.ndarray:
    """fp32 values of bf16 or fp32 patterns."""
    if patterns.dtype == np.uint16:
        patterns = patterns.astype(np.uint32) << 16
    return patterns.view(np.float32)
