"""The codec's kernels on a GPU: round trips, messages to and from the CPU's coders, reductions, streams and graphs."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

import zipccl
from zipccl import _C

BF16, FP32 = torch.bfloat16, torch.float32
CHUNK = 8192
GUARD, GUARD_BYTE = 512, 0xA5
HEADER = struct.Struct("<IHBBQQQQfIQQ")

# Around the groups, the sub-block and the chunk; the odd ones make every array end somewhere else.
SIZES = [0, 1, 7, 8, 385, 1023, 1025, 8191, 8193, 24579, (1 << 20) + 3]
LARGE = 64 << 20
KINDS = ["normal", "relu", "zeros", "every_pattern", "escapes", "any_bits", "nan", "mixed"]
FORMS = ["bf16", "fp32_low_zero", "fp32_low"]
DTYPES = {"bf16": BF16, "fp32_low_zero": FP32, "fp32_low": FP32}


# ---- Values


def _upper(kind: str, n: int, g: torch.Generator) -> torch.Tensor:
    """bf16 patterns as int16."""
    device = g.device
    place = torch.arange(n, device=device)
    normal = (torch.randn(n, generator=g, device=device) * 0.02).bfloat16()
    some = torch.rand(n, generator=g, device=device) < 0.5
    bits = torch.randint(-(1 << 15), 1 << 15, (n,), generator=g, device=device, dtype=torch.int16)
    if kind == "normal":
        return normal.view(torch.int16)
    if kind == "relu":
        return normal.relu().view(torch.int16)
    if kind == "zeros":
        return torch.where(some, 0.0, -0.0).bfloat16().view(torch.int16)
    if kind == "every_pattern":
        return (place * 40503 & 0xFFFF).to(torch.int16)
    if kind == "escapes":  # where a sample does not look, but not so many that the chunk becomes a raw one
        return torch.where(some | (place // 64 % 8 == 0), normal.view(torch.int16), bits)
    if kind == "any_bits":  # raw chunks
        return bits
    if kind == "nan":  # both signs, quiet and signalling, all payloads
        return (bits.int() & 0x807F | 0x7F80 | 1).to(torch.int16)
    if kind == "mixed":  # chunks of three kinds, in one message
        which = place // CHUNK % 3
        zeros = torch.zeros_like(bits)
        return torch.where(which == 0, normal.view(torch.int16), torch.where(which == 1, bits, zeros))
    raise ValueError(kind)


def values(kind: str, form: str, n: int, seed: int = 0, device: str = "cuda") -> torch.Tensor:
    g = torch.Generator(device).manual_seed(seed)
    upper = _upper(kind, n, g)
    if form == "bf16":
        return upper.view(BF16)
    words = upper.int() << 16
    if form == "fp32_low":  # chunks with low halves, and some without
        low = torch.randint(0, 1 << 16, (n,), generator=g, device=device, dtype=torch.int32)
        words |= torch.where(torch.arange(n, device=device) // CHUNK % 3 != 1, low, 0)
    return words.view(FP32)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values one element behind a boundary: what a kernel hopes to be aligned is not."""
    copy = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    return copy.copy_(x)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == BF16 else torch.int32)


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, what
    if not torch.equal(bits(got), bits(want)):
        wrong = (bits(got) != bits(want)).nonzero().flatten()
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {got.numel()} differ, first at {at} (chunk {at // CHUNK}): "
            f"got {int(bits(got)[at]):#x}, want {int(bits(want)[at]):#x}"
        )


def assert_number(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Equal bits, but any NaN for a NaN."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaNs in other places"
    zero = torch.zeros_like(want)
    assert_bits(torch.where(got.isnan(), zero, got), torch.where(want.isnan(), zero, want), what)


# ---- Messages


class Guarded:
    """Bytes on a 512-byte boundary between guards, which nobody may write."""

    def __init__(self, size: int, device: torch.device):
        self.whole = torch.full((size + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8, device=device)
        self.bytes = self.whole[GUARD : GUARD + size]

    def check(self) -> None:
        before, behind = self.whole[:GUARD], self.whole[GUARD + self.bytes.numel() :]
        assert bool((before == GUARD_BYTE).all()), "wrote before its memory"
        assert bool((behind == GUARD_BYTE).all()), "wrote behind its memory"


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def room(x: torch.Tensor, inline: int) -> list[Guarded]:
    return [Guarded(size, x.device) for size in _C.cuda_message_bytes(x, inline)]


def parts_of(memory: list[Guarded]) -> Parts:
    statics, pool, low = (one.bytes for one in memory)
    return statics, pool, low


def encode(x: torch.Tensor, inline: int | None = None, tops: torch.Tensor | None = None) -> Parts:
    """Static part, pool beyond the inline one, low halves; `inline` is a 24th of the elements unless given."""
    memory = room(x, x.numel() // 24 if inline is None else inline)
    _C.cuda_encode(x, parts_of(memory), tops)
    for one in memory:
        one.check()
    return parts_of(memory)


def findings_of(tensor: torch.Tensor) -> dict[str, int]:
    fault, message, low, high, deferred, _ = tensor.tolist()
    return {"fault": fault, "message": message, "chunk": (high << 32) + low, "deferred": deferred}


FINE = {"fault": 0, "message": 0, "chunk": 0, "deferred": 0}


def decode(parts: Parts, n: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """To memory that begins `offset` elements behind a boundary."""
    itemsize = dtype.itemsize
    memory = Guarded((n + offset) * itemsize, parts[0].device)
    output = memory.bytes.view(dtype)[offset:]
    findings = _C.cuda_decode(parts, output)
    assert findings_of(findings) == FINE
    memory.check()
    assert bool((memory.bytes[: offset * itemsize] == GUARD_BYTE).all()), "wrote before its output"
    return output


class Header(NamedTuple):
    magic: int
    version: int
    dtype: int
    flags: int
    elements: int
    pool_bytes: int
    inline_bytes: int
    low_bytes: int
    scale: float
    reserved0: int
    checksum: int
    reserved1: int


def header_of(statics: torch.Tensor) -> Header:
    return Header(*HEADER.unpack(bytes(statics[: HEADER.size].tolist())))


def with_inline(statics: torch.Tensor, inline: int) -> torch.Tensor:
    """A copy whose header says so."""
    header = header_of(statics)._replace(inline_bytes=inline)
    copy = statics.clone()
    copy[: HEADER.size] = torch.frombuffer(bytearray(HEADER.pack(*header)), dtype=torch.uint8)
    return copy


def pool_offset(n: int) -> int:
    return _C.cuda_message_bytes(torch.empty(n, dtype=BF16, device="meta"), 0)[0]


def to_contiguous(parts: Parts, n: int) -> torch.Tensor:
    """What the CPU decodes, of a GPU's message."""
    statics, pool, low = (part.cpu() for part in parts)
    header, begin = header_of(statics), pool_offset(n)
    inline = min(header.pool_bytes, header.inline_bytes)
    pieces = [statics[: begin + inline], pool[: header.pool_bytes - inline]]
    if header.low_bytes:
        pieces.append(torch.zeros(-(begin + header.pool_bytes) % 128, dtype=torch.uint8))
        pieces.append(low[: header.low_bytes])
    return with_inline(torch.cat(pieces), header.pool_bytes)


def from_contiguous(message: torch.Tensor, n: int, inline: int, device: str = "cuda") -> Parts:
    """What a GPU decodes, of the CPU's message."""
    header, begin = header_of(message), pool_offset(n)
    pool = message[begin : begin + header.pool_bytes]
    unused = torch.full((max(0, inline - header.pool_bytes),), GUARD_BYTE, dtype=torch.uint8)
    statics = with_inline(torch.cat([message[:begin], pool[:inline], unused]), inline)
    low = message[message.numel() - header.low_bytes :]
    # As new tensors: parts begin on 128-byte boundaries.
    return statics.to(device), pool[inline:].clone().to(device), low.clone().to(device)


def inlines(x: torch.Tensor) -> list[int]:
    """Nothing, some, what the collectives choose, and room for all."""
    n = x.numel()
    return [0, min(n // 100, pool_bound(x)), min(-(-(n // 24) // 128) * 128, pool_bound(x)), pool_bound(x)]


def pool_bound(x: torch.Tensor) -> int:
    return _C.cuda_message_bytes(x, 0)[1]


# ---- Round trips


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str, form: str) -> None:
    for n in SIZES:
        x = values(kind, form, n)
        for inline in inlines(x):
            assert_bits(decode(encode(x, inline), n, x.dtype), x, (n, inline))


# deepspeed 3827
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["normal", "escapes", "any_bits"])
def test_storage_offset_of_one_element(kind: str, form: str) -> None:
    for n in SIZES:
        x = values(kind, form, n)
        assert_bits(decode(encode(unaligned(x)), n, x.dtype, offset=1), x, n)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["normal", "mixed", "any_bits"])
def test_large(kind: str, form: str) -> None:
    x = values(kind, form, LARGE + 5)
    parts = encode(x)
    assert_bits(decode(parts, x.numel(), x.dtype), x)
    if kind == "normal":
        header = header_of(parts[0])
        assert 0.020 < header.pool_bytes / x.numel() < 0.031, "not the share of escapes that normal values have"


@pytest.mark.parametrize("form", FORMS)
def test_given_windows(form: str) -> None:
    top = zipccl.window(0.02).stop - 1
    for n in SIZES[1:]:
        chunks = -(-n // CHUNK)
        mixed = torch.tensor([top, 255, -1, 0, 3, top + 9, 127], dtype=torch.int16).repeat(chunks // 7 + 1)[:chunks]
        for given in (torch.full((chunks,), top, dtype=torch.int16), mixed):
            for kind in ("normal", "relu", "mixed", "every_pattern"):
                x = values(kind, form, n)
                parts = encode(x, tops=given.to(x.device))
                assert_bits(decode(parts, n, x.dtype), x, (kind, n))
                chosen = parts[0][64 + 2 : 64 + 32 * chunks : 32].cpu()
                if kind == "normal" and n > CHUNK:  # the chunks whose window fits have the one that was given
                    assert bool((chosen[:-1][given[:-1] == top] == top).all()), (n, chosen, given)


def test_windows_are_one_a_chunk() -> None:
    x = values("normal", "bf16", 3 * CHUNK)
    for tops in (torch.zeros(2, dtype=torch.int16), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="one int16 window top a chunk"):
            encode(x, tops=tops.cuda())


def test_wrong_tensors_are_refused() -> None:
    x = values("normal", "bf16", 3 * CHUNK)
    parts = encode(x)
    for wrong in (x.cpu(), x.half(), x[::2]):
        with pytest.raises(ValueError, match="contiguous CUDA tensor of bfloat16 or float32"):
            _C.cuda_encode(wrong, parts)
        with pytest.raises(ValueError, match="contiguous CUDA tensor of bfloat16 or float32"):
            _C.cuda_decode(parts, wrong)
    with pytest.raises(ValueError, match="too short"):
        _C.cuda_decode((parts[0][:100], *parts[1:]), x)


# ---- To and from the CPU


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_decodes_what_the_gpu_encodes(kind: str, form: str) -> None:
    for n in SIZES:
        x = values(kind, form, n)
        for inline in inlines(x):
            got = zipccl.decode(to_contiguous(encode(x, inline), n))
            assert_bits(got, x.cpu(), (n, inline))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_decodes_what_the_cpu_encodes(kind: str, form: str) -> None:
    for n in SIZES:
        x = values(kind, form, n)
        message = zipccl.encode(x.cpu())
        for inline in inlines(x):
            parts = from_contiguous(message, n, inline)
            assert_bits(decode(parts, n, x.dtype), x, (n, inline))


@pytest.mark.parametrize("form", FORMS)
def test_sizes_are_those_of_the_cpu(form: str) -> None:
    """Every GPU chunk is sampled anew, a CPU chunk may go on with a window: only nearly the same."""
    x = values("normal", form, 64 * CHUNK)
    cpu, gpu = header_of(zipccl.encode(x.cpu())), header_of(encode(x)[0])
    assert gpu.low_bytes == cpu.low_bytes
    assert gpu.pool_bytes == pytest.approx(cpu.pool_bytes, rel=0.05)


# ---- What has not arrived, and what is damaged


@pytest.mark.parametrize("form", FORMS)
def test_a_message_waits_for_its_dynamic_part(form: str) -> None:
    x = values("any_bits", form, 24579)
    statics, pool, low = encode(x, 100)
    header = header_of(statics)
    needed, low_needed = header.pool_bytes - 100, header.low_bytes
    output = torch.empty_like(x)
    short = [(pool[: needed - 1], low), (pool[:0], low)]
    short += [(pool, low[: low_needed - 128]), (pool, low[:0])] if low_needed else []
    for other_pool, other_low in short:
        found = findings_of(_C.cuda_decode((statics, other_pool, other_low), output))
        assert found["deferred"] != 0 and found["fault"] == 0, found
        found = findings_of(_C.cuda_reduce([(statics, pool, low), (statics, other_pool, other_low)], output))
        assert found["deferred"] != 0 and found["fault"] == 0, found
    exact = (statics, pool[:needed].clone(), low[:low_needed].clone())
    assert_bits(decode(exact, x.numel(), x.dtype), x)


# offset of a byte, what it becomes, which fault that is
DAMAGE = {
    "magic": (0, 0, 1),
    "version": (4, 2, 1),
    "flags": (7, 4, 1),
    "reserved": (47, 1, 1),
    "dtype": (6, 0, 2),
    "elements": (12, 1, 3),
    "inline": (28, 1, 4),
    "pool_size": (23, 255, 5),
    "low_size": (32, 1, 5),
    "chunk_elements": (64 + 32, 255, 7),
    "chunk_mode": (64 + 32 + 3, 9, 7),
    "escape_count": (64 + 32 + 31, 255, 7),
    "pool_range": (64 + 32 + 15, 255, 8),
    "low_range": (64 + 32 + 6, 255, 9),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found(what: str) -> None:
    at, byte, fault = DAMAGE[what]
    form = "fp32_low" if what == "low_range" else "bf16"
    n = 24579
    x, y = values("normal", form, n), values("normal", form, n, seed=1)
    good, bad = encode(x), encode(y)
    if what == "low_range":  # the second chunk has no low halves, and then says that it has
        bad[0][64 + 32 + 4 : 64 + 32 + 8] = 0
    bad[0][at] = byte
    memory = Guarded(n * x.element_size(), x.device)
    output = memory.bytes.view(x.dtype)
    found = findings_of(_C.cuda_decode(bad, output))
    assert found["fault"] == fault and found["message"] == 0, found
    if fault >= 7:
        assert found["chunk"] == 1, found
    found = findings_of(_C.cuda_reduce([good, good, bad], output))
    assert found["fault"] == fault and found["message"] == 2, found
    memory.check()
    assert_bits(decode(good, n, x.dtype), x, "the device is as it was")


def test_codes_that_do_not_match_are_found() -> None:
    x = values("normal", "bf16", 3 * CHUNK)
    parts = encode(x)
    first_body = -(-(64 + 3 * 32) // 128) * 128
    planes = first_body + 11264 + CHUNK
    parts[0][planes : planes + 3072] = 0  # all of the second chunk's elements become escapes
    found = findings_of(_C.cuda_decode(parts, torch.empty_like(x)))
    assert (found["fault"], found["chunk"]) == (10, 1), found


# ---- Reductions


def reference(inputs: list[torch.Tensor], divisor: float) -> torch.Tensor:
    """In rank order, in fp32, each operation rounded by itself."""
    total = inputs[0].float()
    for x in inputs[1:]:
        total = total + x.float()
    # A tensor on the device: by a Python number, PyTorch multiplies with the reciprocal.
    return (total / torch.full((1,), divisor, device=total.device)).to(inputs[0].dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 40])
def test_reduce(ranks: int, form: str) -> None:
    for n in (0, 1, 1025, 8191, 24579, (1 << 20) + 3):
        for kinds in (["normal"], ["normal", "escapes", "relu", "zeros", "mixed"], ["any_bits", "nan", "normal"]):
            inputs = [values(kinds[r % len(kinds)], form, n, seed=r) for r in range(ranks)]
            messages = [encode(x) for x in inputs]
            for divisor in {1.0, float(ranks)}:
                for offset in (0, 1):
                    output = torch.empty(n + offset, dtype=inputs[0].dtype, device=inputs[0].device)[offset:]
                    assert findings_of(_C.cuda_reduce(messages, output, divisor)) == FINE
                    assert_number(output, reference(inputs, divisor), (n, kinds, divisor, offset))


@pytest.mark.parametrize("form", FORMS)
def test_reduce_of_large_messages(form: str) -> None:
    inputs = [values("normal", form, (16 << 20) + 5, seed=r) for r in range(3)]
    output = torch.empty_like(inputs[0])
    assert findings_of(_C.cuda_reduce([encode(x) for x in inputs], output, 3.0)) == FINE
    assert_bits(output, reference(inputs, 3.0))


# ---- Streams, graphs, devices


def test_two_streams_at_once() -> None:
    inputs = [values(kind, "bf16", (4 << 20) + 3, seed=7) for kind in ("normal", "escapes")]
    rooms = [room(x, x.numel() // 24) for x in inputs]
    outputs = [torch.empty_like(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    findings: list[torch.Tensor] = []
    torch.cuda.synchronize()
    for _ in range(20):
        for x, memory, output, stream in zip(inputs, rooms, outputs, streams, strict=True):
            with torch.cuda.stream(stream):
                _C.cuda_encode(x, parts_of(memory))
                findings.append(_C.cuda_decode(parts_of(memory), output))
    torch.cuda.synchronize()
    assert all(findings_of(one) == FINE for one in findings)
    for x, output in zip(inputs, outputs, strict=True):
        assert_bits(output, x)


@pytest.mark.parametrize("form", FORMS)
def test_graph(form: str) -> None:
    n = (1 << 20) + 3
    x, output = values("normal", form, n), torch.zeros(n, dtype=DTYPES[form], device="cuda")
    memory = room(x, n // 24)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are loaded before the capture
        _C.cuda_encode(x, parts_of(memory))
        _C.cuda_decode(parts_of(memory), output)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _C.cuda_encode(x, parts_of(memory))
        findings = _C.cuda_decode(parts_of(memory), output)
    # Of each size and kind of pool: what one replay leaves behind must not matter to the next.
    for seed, kind in enumerate(("escapes", "normal", "any_bits")):
        x.copy_(values(kind, form, n, seed))
        output.zero_()
        graph.replay()
        assert findings_of(findings) == FINE
        assert_bits(output, x, kind)
    for one in memory:
        one.check()


@contextlib.contextmanager
def side_stream(device: str, current: str) -> Iterator[torch.cuda.Stream]:
    """A side stream is the device's current one, while the current device is `current`."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.cuda.device(current):
        yield stream


# DFloat11 36
@pytest.mark.gpu(2)
@pytest.mark.parametrize("form", FORMS)
def test_another_device_is_current(form: str) -> None:
    n = (1 << 20) + 3
    inputs = [values(kind, form, n, device="cuda:1") for kind in ("normal", "escapes")]
    wanted = reference(inputs, 1.0)
    with side_stream("cuda:1", "cuda:0") as stream:
        messages = [encode(x) for x in inputs]
        for x, message in zip(inputs, messages, strict=True):
            assert_bits(decode(message, n, x.dtype), x)
        output = torch.empty_like(inputs[0])
        findings = _C.cuda_reduce(messages, output)
        assert torch.cuda.current_device() == 0
    stream.synchronize()
    assert findings.device == torch.device("cuda:1")
    assert findings_of(findings) == FINE
    assert_bits(output, wanted)
