"""Chunk functions of every coder against the format's definition: 65,536 patterns, 256 windows, both modes."""

import library
import pytest


@pytest.mark.parametrize("streaming", [False, True])
def test_every_pattern_under_every_window(coder, streaming):
    assert library.library().sweep(coder.encode(), streaming) == 0
