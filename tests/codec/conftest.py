import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import library


@pytest.fixture(params=["portable", "avx2", "avx512"])
def coder(request: pytest.FixtureRequest) -> str:
    if request.param not in library.coders():
        pytest.skip(f"the processor has no {request.param}, and nothing emulates it")
    return request.param
