"""The demo as a user runs it, shortened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
STEPS = 3


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    figures = folder / "figures.json"
    # In an empty folder: it must not depend on where it is started.
    process = subprocess.run(
        [sys.executable, str(DEMO), "--steps", str(STEPS), "--json", str(figures)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout, json.loads(figures.read_text())


@pytest.mark.core
def test_same_bits(demo):
    output, runs = demo
    assert len(runs["zipccl"]["losses"]) == STEPS
    assert runs["zipccl"]["losses"] == runs["gloo"]["losses"]
    assert runs["zipccl"]["weights"] == runs["gloo"]["weights"]
    assert "DIFFERENT" not in output


@pytest.mark.core
@pytest.mark.parametrize("collective, target", [("all_gather", 0.72), ("reduce_scatter", 0.38)])
def test_ratio(demo, collective, target):
    entry = demo[1]["zipccl"]["stats"][collective]
    assert entry["calls"] == entry["zipped"] > 0
    assert entry["wire_bytes"] / entry["raw_bytes"] <= target


@pytest.mark.core
def test_shows_progress_and_what_was_sent(demo):
    output, _ = demo
    for backend in ("gloo", "zipccl"):
        assert f"{backend}: step {STEPS}/{STEPS}" in output
    assert "all_gather" in output and "reduce_scatter" in output and "missed" not in output
