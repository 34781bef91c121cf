"""Registration with torch.distributed, and how a group is made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from zipccl import _C
from zipccl.options import Options

BACKEND = "zipccl"

# The world's options: groups that are made without any, as DeviceMesh and frameworks do, have the same.
_world_options: Options | None = None


def _wrapped(name: str, distributed_options: Any) -> ProcessGroupGloo:
    rank, size = distributed_options.group_rank, distributed_options.group_size
    gloo = ProcessGroupGloo(PrefixStore(name, distributed_options.store), rank, size, distributed_options.timeout)
    gloo.options.group_name = f"{distributed_options.group_id}/{name}"  # type: ignore[assignment]
    # Gloo's split() reads them, and crashes where there are none.
    gloo.options.global_ranks_in_group = list(distributed_options.global_ranks_in_group) or list(range(size))
    return gloo


def _check_agreement(store: Store, rank: int, size: int, group: str, options: Options) -> None:
    """Raises on every rank if any rank has another version or other options."""

    def describe(version: int, options: Options) -> str:
        return f"wire format {version} and {options!r}"

    mine = describe(_C.FORMAT_VERSION, options)
    store.set(f"options/{rank}", mine)
    for other in range(size):
        theirs = store.get(f"options/{other}").decode()
        if theirs != mine:
            raise RuntimeError(
                f"zipccl: the ranks of group {group!r} do not agree: rank {rank} has {mine}, rank {other} has "
                f"{theirs}. Install one version everywhere and give all ranks the same options and ZIPCCL_* variables."
            )


def create(distributed_options: Any, backend_options: Options | None = None) -> _C.ProcessGroupZipCCL:
    """Makes the backend of a group; called by torch.distributed on all its ranks."""
    global _world_options
    if backend_options is not None and not isinstance(backend_options, Options):
        raise ValueError(f"zipccl: pg_options must be a zipccl.Options, got {type(backend_options).__name__}")
    is_world = not dist.is_initialized()
    chosen = backend_options or (None if is_world else _world_options) or Options()
    if is_world:
        _world_options = chosen
    options = Options(**chosen.values())  # the group's own: its timeout may change later
    options._timeout = distributed_options.timeout
    rank, size = distributed_options.group_rank, distributed_options.group_size
    _check_agreement(distributed_options.store, rank, size, distributed_options.group_id, options)
    # Two: one serves what is handed on, on the caller's thread, the other the worker. In one, their orders would race.
    # Gloo's meshes need every rank, so that both are made now: later, some ranks might be alone in a send.
    return _C.ProcessGroupZipCCL(
        _wrapped("plain", distributed_options), _wrapped("exchange", distributed_options), options
    )


def register() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def backend_of(group: dist.ProcessGroup | None = None) -> _C.ProcessGroupZipCCL:
    """The zipccl backend of a group (the default group if None)."""
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    for device in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            continue
        backend = getattr(backend, "wrapped_pg", backend)  # of TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _C.ProcessGroupZipCCL):
            return backend
    raise ValueError("zipccl: the group has no zipccl backend")
