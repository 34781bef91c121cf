"""What all groups of a process did over zipccl, for the end of a training run."""

from __future__ import annotations

import torch.distributed as dist

import zipccl
from zipccl.backend import backend_of


def totals() -> dict[str, dict[str, int]]:
    """What :func:`zipccl.stats` counts, per collective, of all groups of this process that are over zipccl together."""
    total: dict[str, dict[str, int]] = {}
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            backend_of(group)
        except ValueError:
            continue  # over another backend
        for collective, counted in zipccl.stats(group).items():
            sums = total.setdefault(collective, {})
            for name, value in counted.items():
                if isinstance(value, int):
                    sums[name] = sums.get(name, 0) + value
    return total


def summary() -> str:
    """`totals` in a line: of each collective its calls, how many were zipped, and the bytes that they sent."""
    parts = []
    for collective, counted in totals().items():
        if counted["calls"]:
            part = f"{collective} {counted['calls']} calls, {counted['zipped']} zipped"
            if counted["raw_bytes"]:
                ratio = counted["wire_bytes"] / counted["raw_bytes"]
                part += f" ({counted['raw_bytes'] / 1e6:.1f} MB sent as {ratio:.3f} of that)"
            parts.append(part)
    return "; ".join(parts) or "no calls"
