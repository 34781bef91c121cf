"""Chunk functions of every coder against the format's definition: 65,536 patterns, 256 windows, both modes."""

import platform
import re
import subprocess

import library
import pytest


@pytest.mark.parametrize("streaming", [False, True])
def test_every_pattern_under_every_window(coder, streaming):
    assert library.library().sweep(coder.encode(), streaming) == 0


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
