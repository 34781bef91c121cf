"""Registration with torch.distributed, and how a group is made."""

from __future__ import annotations

import atexit
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo

from zipccl import _C
from zipccl.options import Options

BACKEND = "zipccl"


def _wrapped(name: str, distributed_options: Any) -> ProcessGroupGloo:
    rank, size = distributed_options.group_rank, distributed_options.group_size
    gloo = ProcessGroupGloo(PrefixStore(name, distributed_options.store), rank, size, distributed_options.timeout)
    gloo.options.group_name = f"{distributed_options.group_id}/{name}"  # type: ignore[assignment]
    # Gloo's split() reads them, and crashes where there are none.
    gloo.options.global_ranks_in_group = list(distributed_options.global_ranks_in_group) or list(range(size))
    return gloo


def _world_options() -> Options | None:
    """The default group's options: groups that are made without any, as DeviceMesh and frameworks do, have the same."""
    if not dist.is_initialized():
        return None
    try:
        return Options.of(backend_of().options)
    except ValueError:
        return None


def create(distributed_options: Any, backend_options: Options | None = None) -> _C.ProcessGroupZipCCL:
    """Makes the backend of a group; called by torch.distributed on all its ranks."""
    if backend_options is not None and not isinstance(backend_options, _C.Options):
        raise ValueError(f"zipccl: pg_options must be a zipccl.Options, got {type(backend_options).__name__}")
    # The group's own copy: its timeout may change later.
    options = Options.of(backend_options) if backend_options is not None else _world_options() or Options()
    options._timeout = distributed_options.timeout
    # Two: one serves what is handed on, on the caller's thread, the other the worker. In one, their orders would race.
    # Gloo's meshes need every rank, so that both are made now: later, some ranks might be alone in a send.
    return _C.ProcessGroupZipCCL(
        distributed_options.store,
        _wrapped("plain", distributed_options),
        _wrapped("exchange", distributed_options),
        options,
    )


def register() -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
        # A worker that needs the GIL of an interpreter that is gone would end the process with an error.
        atexit.register(_C.ProcessGroupZipCCL.abort_all)


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
