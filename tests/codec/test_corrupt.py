"""Broken messages: exact, or FormatError; never a crash or an access out of bounds."""

import os
import re
import subprocess

import library
import numpy as np
import pytest
import reference
from library import BF16, FP32, FormatError

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def test_broken_messages_under_sanitizers():
    program = library.build(
        "corrupt", [*library.SOURCES, library.HERE / "corrupt.cpp"], ["-O1", "-g1", *SANITIZERS], SANITIZERS
    )
    result = subprocess.run(
        [program, *library.cpu_coders()], capture_output=True, text=True, env={**os.environ, "LD_PRELOAD": ""}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    decoded, refused = map(int, re.findall(r"\d+", result.stdout))
    assert decoded > 10_000 and refused > 10_000


@pytest.fixture(scope="module")
def message():
    values = library.bf16(np.random.default_rng(1).standard_normal(20_000) * 0.02)
    return values, *library.encode(values, BF16, inline_bytes=100)


def broken(part: bytes, at: int, data: bytes) -> bytes:
    return part[:at] + data + part[at + len(data) :]


@pytest.mark.parametrize(
    "at, data, text, gpu_text",
    [
        (0, b"X", "does not begin", "no message"),
        (4, b"\x02\x00", "version 2", "no message"),
        (6, b"\x09", "unknown dtype 9", "dtype"),
        (6, b"\x02", "dtype 2, expected 1", "dtype"),
        (7, b"\x04", "unknown flags 4", "no message"),
        (7, b"\x02", "checksum", "checksum"),
        (8, (19_999).to_bytes(8, "little"), "elements", "element count"),
        (16, (1 << 40).to_bytes(8, "little"), "impossible pool", "impossible sizes"),
        (24, (99).to_bytes(8, "little"), "static part", "inline pool"),
        (32, (128).to_bytes(8, "little"), "low halves", "impossible sizes"),
        (44, b"\x01", "not zero", "no message"),
        (48, b"\x01", "not zero", "no message"),
        (56, b"\x01", "not zero", "no message"),
        (64, b"\x01\x00", "chunk 0: has 1 elements, not 8192", "chunk 0: .* header"),
        (99, b"\x03", "chunk 1: unknown mode 3", "chunk 1: .* header"),
        (100, bytes(4), "chunk 1: low halves", "chunk 1: .* low halves"),
        (104, b"\xff" * 8, "chunk 1: .* leave the pool", "chunk 1: .* leave the pool"),
        (112, b"\xff\xff", "chunk 1: its codes do not match", "chunk 1: .* header"),
        (126, b"\xff\xff", "chunk 1: too many escapes", "chunk 1: .* header"),
        (154, b"\x00\x00", "chunk 2: escapes beyond its elements", "chunk 2: .* header"),
    ],
)
def test_errors_say_what_is_wrong(message, at, data, text, gpu_text, coder):
    values, static, dynamic = message
    with pytest.raises(FormatError, match=gpu_text if coder == "cuda" else text):
        library.decode(broken(static, at, data), dynamic, len(values), BF16, coder=coder)


def test_wrong_lengths(message, coder):
    values, static, dynamic = message
    for lying in (static[:-1], static + b"\0", static[:64], static[:63], b""):
        with pytest.raises(FormatError):
            library.decode(lying, dynamic, len(values), BF16, coder=coder)
    with pytest.raises(FormatError, match="dynamic part"):
        library.decode(static, dynamic[:-1], len(values), BF16, coder=coder)
    with pytest.raises(FormatError, match="20000 elements, expected 20001|element count"):
        library.decode(static, dynamic, len(values) + 1, BF16, coder=coder)
    assert (library.decode(static, dynamic + b"more", len(values), BF16, coder=coder) == values).all()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_flipped_byte_of_a_checked_contiguous_message(dtype, coder):
    values = np.random.default_rng(2).standard_normal(200).astype(np.float32) * 0.02
    values = library.bf16(values) if dtype == BF16 else values.view(np.uint32)
    message = bytearray(library.encode_contiguous(values, dtype, checksum=True))
    refused = 0
    for i in range(len(message)):
        message[i] ^= 0x10
        try:
            assert (library.decode_contiguous(bytes(message), len(values), dtype, coder=coder) == values).all()
        except FormatError:
            refused += 1
        message[i] ^= 0x10
    assert refused > 0.7 * len(message)


def test_counts_that_fall_are_refused(coder):
    """A short chunk's last count, repeated for absent sub-blocks, is its pool size: none before it may be larger."""
    values = np.full(1000, 127 << 7, np.uint16)
    values[10:15] = np.array([1, 250, 90, 160, 200]) << 7  # exponents that have no code
    static, dynamic = reference.encode(values, BF16, [(127, 0)], inline_bytes=3)
    assert len(dynamic) == 2
    assert (library.decode(static, dynamic, 1000, BF16, coder=coder) == values).all()
    ends = np.array([5, *[3] * 7], "<u2").tobytes()
    lying = broken(broken(static, 16, (3).to_bytes(8, "little")), 80, ends)
    with pytest.raises(FormatError, match="chunk 0"):
        library.decode(lying, b"", 1000, BF16, coder=coder)
    with pytest.raises(FormatError, match="chunk 0"):
        library.accumulate(lying, b"", BF16, library.SUM, np.zeros(1000, np.float32), coder=coder)
