import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import library


def runs(coder: str) -> str:
    if coder not in library.coders():
        lacks = "there are no CUDA headers" if coder == "cuda" else f"the processor has no {coder}, nor an emulation"
        pytest.skip(lacks)
    return coder


@pytest.fixture(params=["portable", "avx2", "avx512", "cuda"])
def coder(request: pytest.FixtureRequest) -> str:
    return runs(request.param)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def cpu_coder(request: pytest.FixtureRequest) -> str:
    return runs(request.param)
