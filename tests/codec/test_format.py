"""The C++ codec, the reference codec and docs/format.md against each other, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import library
import numpy as np
import pytest
import reference as ref
from reference import BFLOAT16, BYTES, FLOAT32, RAW, WINDOW, WINDOW_AND_ZERO

SIZES = [0, 1, 2, 7, 384, 385, 1023, 1024, 1025, 4097, 8191, 8192, 8193, 16384, 3 * 8192 + 5000, 100_003]
DTYPES = [BFLOAT16, FLOAT32]
KINDS = ["gaussian", "sparse", "bits", "mixed", "patterns"]


def high_halves(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """bf16 patterns: Gaussian, half zeros, random bits, chunks of all of these, every pattern in turn."""
    if kind == "mixed":
        pieces = [high_halves(KINDS[k % 3], m, rng) for k, m in enumerate(ref.counts(n))]
        return np.concatenate([np.zeros(0, np.uint16), *pieces])
    if kind == "bits":
        return rng.integers(0, 1 << 16, n, dtype=np.uint16)
    if kind == "patterns":
        return np.arange(n, dtype=np.uint32).astype(np.uint16)
    values = rng.standard_normal(n, dtype=np.float32) * np.float32(0.02)
    if kind == "sparse":
        values[rng.random(n) < 0.5] = 0
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def make(kind: str, n: int, dtype: int, low: bool = True) -> np.ndarray:
    rng = np.random.default_rng(n)
    high = high_halves(kind, n, rng)
    if dtype == BFLOAT16:
        return high
    values = high.astype(np.uint32) << 16
    if low:  # every second chunk has low halves; the last has a single one, in its last element
        for k in range(0, len(ref.counts(n)), 2):
            part = slice(k * ref.CHUNK, (k + 1) * ref.CHUNK)
            values[part] |= rng.integers(0, 1 << 16, len(values[part]), dtype=np.uint32)
        values[-1:] |= 1
    return values


def windows_of(static: bytes) -> list[tuple[int, int]]:
    return [(c.top, c.mode) for c in ref.read_chunk_headers(static, ref.read_header(static))]


def used(static: bytes) -> bytes:
    """The static part without the unused bytes of its inline pool, which are unspecified."""
    header = ref.read_header(static)
    return static[: len(static) - max(0, header.inline_bytes - header.pool_bytes)]


def allowed_windows(values: np.ndarray, dtype: int, top: int, mode: int) -> list[tuple[int, int]]:
    """The same window for all chunks, raw where it would leave too many escapes."""
    high = values if dtype == BFLOAT16 else (values >> 16).astype(np.uint16)
    chosen = []
    for k, m in enumerate(ref.counts(len(values))):
        exponents = (high[k * ref.CHUNK :][:m] >> 7 & 255).astype(np.uint8)
        escapes = np.count_nonzero(ref.codes_of(exponents, top, mode) == 0) if mode != RAW else 0
        chosen.append((top, mode) if escapes <= ref.raw_pool_bytes(m) else (0, RAW))
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_bytes_of_the_encoder(n: int, kind: str, dtype: int) -> None:
    values = make(kind, n, dtype)
    for inline_bytes, checksum, scale in [(0, False, 1.0), (n // 24, True, 0.125), (n + 77, True, -3.0)]:
        options = {"inline_bytes": inline_bytes, "checksum": checksum, "scale": scale}
        expected = {}
        for coder in library.coders():
            static, dynamic = library.encode(values, dtype, **options, coder=coder)
            windows = tuple(windows_of(static))
            if windows not in expected:
                expected[windows] = ref.encode(values, dtype, windows, **options)
            parts = ref.in_chunk_order(static, dynamic) if coder == "cuda" else (static, dynamic)
            assert (used(parts[0]), parts[1]) == (used(expected[windows][0]), expected[windows][1]), coder
            if coder in ("portable", "cuda"):
                decoded, header = ref.decode(static, dynamic)
                assert np.array_equal(decoded, values)
                assert (header.scale, header.inline_bytes) == (scale, inline_bytes)
            # Each coder of the CPU has its windows from the same samples; the GPU's has more samples.
            assert len(expected) == 1 or (coder == "cuda" and n > ref.CHUNK), coder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_bytes_for_the_decoder(n: int, kind: str, dtype: int) -> None:
    values = make(kind, n, dtype)
    tops = [0, 3, 6, 122, 123, 255]  # the windows of 0 and 3 wrap around
    for top, mode in [(top, mode) for top in tops for mode in (WINDOW, WINDOW_AND_ZERO)] + [(0, RAW)]:
        windows = allowed_windows(values, dtype, top, mode)
        for inline_bytes in (0, n // 24 + 1):
            static, dynamic = ref.encode(values, dtype, windows, inline_bytes, checksum=bool(inline_bytes))
            assert np.array_equal(ref.decode(static, dynamic)[0], values)
            for coder in library.coders():
                assert np.array_equal(library.decode(static, dynamic, n, dtype, coder=coder), values), coder


@pytest.mark.parametrize("n", SIZES)
def test_given_tops(n: int, coder: str) -> None:
    values = make("gaussian", n, BFLOAT16)
    tops = [122 + k % 3 for k in range(len(ref.counts(n)))]
    static, dynamic = library.encode(values, BFLOAT16, tops=tops, inline_bytes=0, coder=coder)
    for m, window, given in zip(ref.counts(n), windows_of(static), tops, strict=True):
        assert window == (given, WINDOW) or m < 1000  # an encoder may have reason to do otherwise in a short chunk
    expected = ref.encode(values, BFLOAT16, windows_of(static))
    assert ref.in_chunk_order(static, dynamic) == expected
    assert (static, dynamic) == expected or coder == "cuda"


@pytest.mark.parametrize("dtype", [BYTES, BFLOAT16, FLOAT32])
@pytest.mark.parametrize("n", SIZES)
def test_plain(n: int, dtype: int, coder: str) -> None:
    values = make("bits", n, dtype) if dtype != BYTES else make("bits", n, BFLOAT16).astype(np.uint8)
    if (dtype, coder) == (BYTES, "cuda"):
        with pytest.raises(RuntimeError, match="bf16 and fp32 only"):
            library.encode(values, dtype, coder=coder)
        return
    for checksum in (False, True):
        options = {"plain": True, "checksum": checksum, "scale": 2.0, "coder": coder}
        static, dynamic = library.encode(values, dtype, **options)
        assert library.encode_contiguous(values, dtype, **options) == static
        assert (static, dynamic) == ref.encode(values, dtype, None, checksum=checksum, scale=2.0)
        assert np.array_equal(ref.decode(static)[0], values)
        assert np.array_equal(library.decode(static, b"", n, dtype, coder=coder), values)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_contiguous(n: int, dtype: int, low: bool, coder: str) -> None:
    values = make("mixed", n, dtype, low)
    message = library.encode_contiguous(values, dtype, checksum=True, coder=coder)
    static, dynamic = ref.separate(message)
    decoded, header = ref.decode(static, dynamic)
    assert np.array_equal(decoded, values)
    assert header.inline_bytes == header.pool_bytes
    expected = ref.encode(values, dtype, windows_of(static), header.pool_bytes, checksum=True)
    assert ref.contiguous(*ref.in_chunk_order(static, dynamic)) == ref.contiguous(*expected)
    assert message == ref.contiguous(*expected) or coder == "cuda"
    assert np.array_equal(library.decode_contiguous(message, n, dtype, coder=coder), values)


def test_any_order_in_the_pool(coder: str) -> None:
    values = make("sparse", 2 * ref.CHUNK, BFLOAT16)
    static, pool = ref.encode(values, BFLOAT16, [(122, WINDOW_AND_ZERO), (121, WINDOW_AND_ZERO)])
    first, second = ref.read_chunk_headers(static, ref.read_header(static))
    swapped = bytearray(static)
    for chunk, header, at in [(0, first, second.escape_end[7]), (1, second, 0)]:
        fields = (*header._replace(pool_offset=at)[:5], *header.escape_end)
        ref.CHUNK_HEADER.pack_into(swapped, 64 + 32 * chunk, *fields)
    pool = pool[second.pool_offset :] + pool[: second.pool_offset]
    assert np.array_equal(ref.decode(bytes(swapped), pool)[0], values)
    assert np.array_equal(library.decode(bytes(swapped), pool, len(values), BFLOAT16, coder=coder), values)


# Offset, bytes: one wrong field each, in a message of two chunks, the second short, both with low halves.
BODY = 128
DAMAGE = {
    "magic": (0, b"X"),
    "version": (4, b"\2"),
    "dtype": (6, b"\3"),
    "dtype bytes": (6, b"\0"),
    "dtype bf16 with low halves": (6, b"\1"),
    "flags": (7, b"\4"),
    "plain with a pool": (7, b"\1"),
    "elements": (8, b"\xff" * 8),
    "pool bytes": (16, b"\xff" * 8),
    "inline bytes": (24, b"\xff" * 8),
    "low bytes": (32, b"\x80" + b"\xff" * 7),
    "low bytes not aligned": (32, b"\1"),
    "reserved0": (44, b"\1"),
    "checksum without flag": (48, b"\1"),
    "reserved1": (63, b"\1"),
    "chunk elements": (64, b"\xff\x1f"),
    "mode": (67, b"\3"),
    "mode raw": (67, b"\2"),
    "low": (68, b"\0\0\0\1"),
    "low by one": (68, b"\x13"),
    "pool offset": (72, b"\xff" * 8),
    "pool offset far": (76, b"\1"),
    "escape end descends": (80, b"\xff\x03"),
    "escape end too large": (94, b"\xff\xff"),
    "escape end of the first sub-block": (80, b"\0\0"),
    "a code becomes an escape": (BODY + 8192, bytes(3072)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(name: str, coder: str) -> None:
    n = ref.CHUNK + 1100
    values = make("gaussian", n, FLOAT32) | 1
    static, dynamic = ref.encode(values, FLOAT32, [(122, WINDOW), (121, WINDOW)], inline_bytes=100)
    assert np.array_equal(library.decode(static, dynamic, n, FLOAT32, coder=coder), values)
    at, wrong = DAMAGE[name]
    damaged = static[:at] + wrong + static[at + len(wrong) :]
    assert damaged != static
    with pytest.raises(ValueError):
        ref.decode(damaged, dynamic)
    with pytest.raises(library.FormatError):
        library.decode(damaged, dynamic, n, FLOAT32, coder=coder)


def outcome(decode: Callable[[], np.ndarray]) -> bytes | None:
    try:
        return decode().tobytes()
    except (ValueError, library.FormatError):
        return None


@pytest.mark.parametrize("windows", [[(122, WINDOW), (121, WINDOW_AND_ZERO)], [(0, RAW), (0, RAW)]])
def test_both_decoders_accept_the_same(windows: list[tuple[int, int]]) -> None:
    """Every bit of the headers flipped, and some of the bodies: the same values or two errors."""
    n = ref.CHUNK + 1100
    values = make("sparse", n, FLOAT32)
    values[ref.CHUNK :] &= 0xFFFF0000
    static, dynamic = ref.encode(values, FLOAT32, windows, inline_bytes=100)
    rng = np.random.default_rng(0)
    accepted = 0
    for bit in [*range(8 * BODY), *rng.integers(8 * BODY, 8 * len(static), 500).tolist()]:
        damaged = bytearray(static)
        damaged[bit // 8] ^= 1 << bit % 8
        expected = outcome(lambda m=bytes(damaged): ref.decode(m, dynamic)[0])
        if expected is not None and len(expected) != values.nbytes:
            continue  # a reader of the header alone would be satisfied; ours expects `n` elements
        for coder in library.coders():
            found = outcome(lambda m=bytes(damaged), c=coder: library.decode(m, dynamic, n, FLOAT32, coder=c))
            assert found == expected, (bit // 8, bit % 8, coder)
        accepted += expected is not None
    assert 100 < accepted < 1000


@pytest.mark.parametrize("at", [66, 80, 94, 98, 112, 126])
def test_header_of_a_raw_chunk(at: int, coder: str) -> None:
    n = ref.CHUNK + 1100
    values = make("bits", n, BFLOAT16)
    static, dynamic = ref.encode(values, BFLOAT16, [(0, RAW), (0, RAW)])
    damaged = static[:at] + bytes([static[at] ^ 1]) + static[at + 1 :]
    with pytest.raises(ValueError):
        ref.decode(damaged, dynamic)
    with pytest.raises(library.FormatError):
        library.decode(damaged, dynamic, n, BFLOAT16, coder=coder)


def test_checksum_finds_any_byte(coder: str) -> None:
    n = 1100
    values = make("gaussian", n, FLOAT32)
    parts = ref.encode(values, FLOAT32, [(122, WINDOW)], inline_bytes=8, checksum=True)
    assert ref.read_header(parts[0]).pool_bytes > 8
    gap = range(ref.read_header(parts[0]).pool_bytes - 8, len(parts[1]) - ref.read_header(parts[0]).low_bytes)
    for part, at in [(0, at) for at in range(0, len(parts[0]), 61)] + [(1, at) for at in range(0, len(parts[1]), 61)]:
        if part == 1 and at in gap:
            continue
        damaged = [bytearray(p) for p in parts]
        damaged[part][at] ^= 0x10
        with pytest.raises(ValueError):
            ref.decode(*map(bytes, damaged))
        with pytest.raises(library.FormatError):
            library.decode(*map(bytes, damaged), n, FLOAT32, coder=coder)


def test_worked_example(coder: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    rows = re.findall(r"^\| (\d) \| +(\S+) +\| ([0-9a-f]{4}) \| (\d+) \| (\d) \| ([0-9a-f]{2})", text, re.M)
    first = np.array([int(row[2], 16) for row in rows], np.uint16)
    values = np.concatenate([first, np.full(400 - len(first), 0x3F80, np.uint16)])

    static = b""
    (dump,) = re.findall(r"```hex\n(.*?)```", text, re.S)
    line = b""
    for row in dump.splitlines():
        if row != "*":
            offset, line = int(row[:4], 16), bytes.fromhex(row[4:]) or line
            static = static + static[-16:] * ((offset - len(static)) // 16) + bytes.fromhex(row[4:])
    assert len(static) == 1540 and len(rows) == 10

    assert ref.encode(values, BFLOAT16, [(127, WINDOW)], inline_bytes=4, checksum=True) == (static, b"")
    assert np.array_equal(ref.decode(static)[0], values)
    encoded = library.encode(values, BFLOAT16, tops=[127], inline_bytes=4, checksum=True, coder=coder)
    assert (used(encoded[0]), encoded[1]) == (used(static), b"")
    assert np.array_equal(library.decode(static, b"", 400, BFLOAT16, coder=coder), values)

    sign_mantissas, exponents = ref.split(values)
    codes = ref.codes_of(exponents, 127, WINDOW)
    for k, (_, value, _, exponent, code, sign_mantissa) in enumerate(rows):
        assert float(value) == pytest.approx(float((values[k : k + 1].astype("<u4") << 16).view("<f4")[0]), rel=1e-4)
        assert (int(exponent), int(code), int(sign_mantissa, 16)) == (exponents[k], codes[k], sign_mantissas[k])
