"""Work memory is bounded by the size of a segment, whatever the size of the message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from multirank import group, only_zipccl, ranks

pytestmark = only_zipccl

SEGMENT = 4 << 20


def resident(name: str) -> int:
    """Bytes that this process has in memory: VmRSS now, VmHWM at most since `forget_peak`."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@ranks(2, 4)
@pytest.mark.parametrize("mebibytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("mode", ["zip", "hierarchical"])
def test_work_memory(rank: int, world_size: int, collective: str, mebibytes: int, mode: str) -> None:
    """What a call adds to its tensors at its peak: three coded segments in each direction, and sums in fp32.

    An all-reduce has the segments of two phases. A hierarchical call has them twice, inside the host and between hosts,
    and in between sums of three segments.
    """
    if mode == "hierarchical" and (world_size < 4 or collective == "all_to_all"):
        pytest.skip("no hierarchy")
    elements = mebibytes << 19
    whole = torch.empty(elements, dtype=torch.bfloat16)
    for piece in whole.split(1 << 22):
        piece.normal_(std=0.02)
    part = whole[: elements // world_size].clone()
    zipped = group(mode=mode, segment_bytes=SEGMENT, host=f"host {rank // 2}")
    other = torch.ones_like(whole) if collective == "all_to_all" else None
    before = resident("VmRSS")
    forget_peak()
    if collective == "all_gather":
        dist.all_gather_into_tensor(whole, part, group=zipped)
    elif collective == "all_to_all":
        dist.all_to_all_single(other, whole, group=zipped)
    elif collective == "reduce_scatter":
        dist.reduce_scatter_tensor(part, whole, group=zipped)
    else:
        dist.all_reduce(whole, group=zipped)
    added = resident("VmHWM") - before
    bound = 20 if mode == "hierarchical" else 12 if collective == "all_reduce" else 8
    assert added <= bound * SEGMENT, f"{added / SEGMENT:.2f} segments"
