"""Chunk functions of every coder against the format's definition: 65,536 patterns, 256 windows, both modes."""

import platform
import re
import subprocess

import library
import numpy as np
import pytest
import reference


@pytest.mark.parametrize("streaming", [False, True])
def test_every_pattern_under_every_window(cpu_coder, streaming):
    assert library.library().sweep(cpu_coder.encode(), streaming) == 0


def a_chunk_for_each_top(mode: int, escapes: int) -> np.ndarray:
    """In each, `escapes` values of all patterns in turn; the others have codes in this mode with this top."""
    rng = np.random.default_rng(mode)
    any_pattern = np.resize(rng.permutation(np.arange(65536, dtype=np.uint16)), 256 * escapes)
    chunks = []
    for top in range(256):
        exponents = reference.exponents_of(rng.integers(1, 8, library.CHUNK).astype(np.uint8), top, mode)
        values = exponents.astype(np.uint16) << 7 | rng.integers(0, 65536, library.CHUNK).astype(np.uint16) & 0x807F
        values[rng.permutation(library.CHUNK)[:escapes]] = any_pattern[top * escapes :][:escapes]
        chunks.append(values)
    return np.concatenate(chunks)


@pytest.mark.parametrize("mode", [reference.WINDOW, reference.WINDOW_AND_ZERO])
def test_every_top_of_a_message(mode, coder):
    values = a_chunk_for_each_top(mode, reference.raw_pool_bytes(library.CHUNK))
    static, dynamic = reference.encode(values, library.BF16, [(top, mode) for top in range(256)])
    assert (library.decode(static, dynamic, len(values), library.BF16, coder=coder) == values).all()

    values = a_chunk_for_each_top(mode, 1000)
    tops = range(256) if mode == reference.WINDOW else None
    static, dynamic = library.encode(values, library.BF16, tops=tops, inline_bytes=0, coder=coder)
    windows = [(c.top, c.mode) for c in reference.read_chunk_headers(static, reference.read_header(static))]
    # A sample gives no lower ones, and no zeros beside 1 to 6.
    first = 0 if mode == reference.WINDOW else 7
    assert windows[first:] == [(top, mode) for top in range(first, 256)]
    assert reference.in_chunk_order(static, dynamic) == reference.encode(values, library.BF16, windows)


@pytest.mark.parametrize("source", library.SOURCES, ids=lambda source: source.stem)
def test_compiled_code(source):
    """Needs no compiler flags, has no fused multiply-add, and exports nothing that is compiled for one processor only:
    the linker might keep such a copy of an inline function for all of the program."""
    if platform.machine() != "x86_64":
        pytest.skip("about x86")
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-S", "-o", "-", str(source)]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\tvf[n]?m(add|sub)", code)
    if source.stem != "codec":
        exported = re.findall(r"\t\.(?:globl|weak)\t(\S+)", code)
        assert len(exported) == 1 and exported[0].endswith("CoderE")
