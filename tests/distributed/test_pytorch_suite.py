"""PyTorch's own tests of a distributed backend: none fails over zipccl that passes over Gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from multirank import only_zipccl

pytestmark = only_zipccl

# PyTorch calls every registered backend "custom" there
EXCUSED = {"test_ddp_logging_data_cpu"}


def run(backend: str, shadow: bool, names: list[str], timeout: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="zipccl-suite-") as folder:
        result = Path(folder) / "result.json"
        env = dict(os.environ, BACKEND=backend, SHADOW=str(int(shadow)), RESULT=str(result), WORLD_SIZE="2")
        env.update(TEMP_DIR=folder, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        script = Path(__file__).with_name("pytorch_suite.py")
        done = subprocess.run(
            [sys.executable, str(script), *names], env=env, capture_output=True, text=True, timeout=timeout, cwd=folder
        )
        assert result.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(result.read_text())


def compare(shadow: bool, at_least: int, timeout: float) -> None:
    ours = run("gloo" if shadow else "zipccl", shadow, [], timeout)
    passed = set(ours["seconds"]) - set(ours["failed"]) - set(ours["skipped"])
    suspects = sorted(set(ours["failed"]) - EXCUSED)
    if suspects:
        over_gloo = run("gloo", False, suspects, timeout)
        suspects = [n for n in suspects if n not in over_gloo["failed"]]
    assert not suspects, "\n".join(f"{n}\n{ours['failed'][n]}" for n in suspects)
    assert len(passed) >= at_least, f"only {len(passed)} tests ran: {sorted(passed)}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "shadow", [pytest.param(False, marks=pytest.mark.slow, id="by_name"), pytest.param(True, id="shadow")]
)
def test_none_fails_that_passes_over_gloo(shadow: bool) -> None:
    compare(shadow, at_least=75 if shadow else 55, timeout=200)
