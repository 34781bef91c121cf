"""Tests that need a GPU. Where there is none they are skipped; with REQUIRE_GPU=1 that is an error."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from multirank import pool

_here = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(count=1): needs so many GPUs, and zipccl with its CUDA part")


@functools.cache
def _missing() -> str | None:
    from zipccl import _C

    if not torch.cuda.is_available():
        return "there is no GPU that this PyTorch can use"
    if not _C.built_with_cuda:
        return "zipccl is built without its CUDA part; a build with ZIPCCL_CUDA=1 tells why"
    return None


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _needed(item: pytest.Item) -> int:
    # NCCL wants a GPU for each rank.
    if _parameters(item).get("over") == "nccl":
        return _parameters(item)["world_size"]
    marker = item.get_closest_marker("gpu")
    return marker.args[0] if marker and marker.args else 1


# Neither by marks nor by a fixture, with which pytest would have a line for each test in its summary.
def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = _missing()
    if missing:
        pytest.skip(missing)
    needed, found = _needed(item), torch.cuda.device_count()
    if needed > found:
        pytest.skip(f"needs {needed} GPUs, and there is {found}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if item.path.is_relative_to(_here)]
    if own and os.environ.get("REQUIRE_GPU") == "1" and _missing():
        pytest.exit(f"REQUIRE_GPU=1, but {_missing()}", returncode=2)
    for item in own:
        if not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.gpu)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(120))
    # One world after another: a change of world costs every group, and NCCL's connections.
    modules = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    sizes = {id(item): _parameters(item).get("world_size", 0) for item in own}
    items.sort(key=lambda item: (modules[item.path], sizes.get(id(item), 0)))


def pytest_sessionfinish() -> None:
    pool().close(politely=True)
