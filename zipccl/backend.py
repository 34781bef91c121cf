"""Registration with torch.distributed, and how a group is made."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo

if dist.is_nccl_available():
    from torch.distributed import ProcessGroupNCCL

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


def _cuda_factory(options: Options) -> Callable[..., Any] | None:
    """What makes a wrapped backend for CUDA tensors with the ranks of `like`, when one is first needed."""
    if not _C.built_with_cuda or not torch.cuda.is_available():
        return None
    if options.cuda_over == "gloo":
        return lambda store, like, options, name: like
    if not dist.is_nccl_available():
        return None
    given = options.nccl

    def make(store: dist.Store, like: ProcessGroupGloo, options: _C.Options, name: str) -> Any:
        nccl = ProcessGroupNCCL.Options()
        if given is not None:
            nccl.config, nccl.is_high_priority_stream = given.config, given.is_high_priority_stream
        nccl._timeout = options._timeout
        nccl.group_name = f"{like.options.group_name.rpartition('/')[0]}/cuda_{name}"  # type: ignore[assignment]
        nccl.global_ranks_in_group = list(like.options.global_ranks_in_group)
        return ProcessGroupNCCL(PrefixStore(f"cuda_{name}", store), like.rank(), like.size(), nccl)

    return make


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
    if dist.is_nccl_available() and isinstance(backend_options, ProcessGroupNCCL.Options):
        nccl, backend_options = backend_options, _world_options() or Options()  # for the wrapped NCCL, as frameworks do
        backend_options.nccl = nccl
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
        _cuda_factory(options),
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
