"""What a user meets before anything runs: the build's errors and the package's metadata."""

import os
import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SETUP = Path(__file__).resolve().parents[1] / "setup.py"

pytestmark = pytest.mark.core


def run_setup(tmp_path: Path, torch_stub: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`setup.py --version` where `import torch` runs the given module instead, if any."""
    if torch_stub is not None:
        (tmp_path / "torch.py").write_text(torch_stub)
        environment["PYTHONPATH"] = str(tmp_path)
    return subprocess.run(
        [sys.executable, str(SETUP), "--version"],
        cwd=SETUP.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def assert_one_sentence(process: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert process.returncode == 1
    assert "Traceback" not in process.stderr
    (sentence,) = process.stderr.strip().splitlines()
    assert sentence.startswith("zipccl: ")
    for part in parts:
        assert part in sentence


def test_without_torch(tmp_path):
    process = run_setup(tmp_path, "raise ModuleNotFoundError(\"No module named 'torch'\")")
    assert_one_sentence(process, "install torch>=2.11 first", "--no-build-isolation")


def test_with_an_old_torch(tmp_path):
    process = run_setup(tmp_path, "__version__ = '2.9.1+cpu'")
    assert_one_sentence(process, "torch 2.9.1+cpu is too old", "install torch>=2.11 first")


def test_without_a_compiler(tmp_path):
    process = run_setup(tmp_path, "__version__ = '2.11.0'", CXX="/nonexistent/c++ -pthread")
    assert_one_sentence(process, "no C++ compiler", "/nonexistent/c++", "CXX")


def test_needs_torch_alone():
    requirements = [Requirement(text) for text in distribution("zipccl").requires or []]
    assert [str(requirement) for requirement in requirements if requirement.marker is None] == ["torch>=2.11"]
    extras = [requirement for requirement in requirements if requirement.marker is not None]
    assert extras and all(str(requirement.specifier).startswith("==") for requirement in extras)


def test_says_that_it_is_typed():
    assert files("zipccl").joinpath("py.typed").is_file()


def test_torch_finds_the_backend_without_an_import():
    (entry,) = distribution("zipccl").entry_points.select(group="torch.distributed.backends")
    assert entry.name == "zipccl" and callable(entry.load())
