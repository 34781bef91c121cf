"""What CUDA tensors get from a group on a machine without a GPU: one clear sentence, and never a hang."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from multirank import group, ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import zipccl
from zipccl import _C

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/gpu has the real cases")

SENTENCE = "CUDA or NCCL is not available" if _C.built_with_cuda else "this build serves CPU tensors only"


def fake(elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that is on cuda:0 as far as anyone can see."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(elements, dtype=dtype, device="cuda:0")


@ranks(2)
def test_every_call_is_refused_in_one_sentence(rank: int, world_size: int) -> None:
    backend = zipccl.backend.backend_of(group())
    big, small = fake(2 << 20), fake(1 << 20)
    calls = {
        "all_gather": lambda: backend.allgather([[small, small]], [small]),
        "all_gather into a tensor": lambda: backend._allgather_base(big, small),
        "all_gather coalesced": lambda: backend.allgather_coalesced([[small], [small]], [small]),
        "reduce_scatter": lambda: backend._reduce_scatter_base(small, big),
        "all_to_all": lambda: backend.alltoall_base(small, small, [], []),
        "all_to_all of lists": lambda: backend.alltoall([small, small], [small, small]),
        "all_reduce": lambda: backend.allreduce([small]),
        "broadcast": lambda: backend.broadcast([small]),
        "reduce": lambda: backend.reduce([small]),
        "gather": lambda: backend.gather([[small, small]] if rank == 0 else [], [small]),
        "scatter": lambda: backend.scatter([small], [[small, small]] if rank == 0 else []),
        "send": lambda: backend.send([small], 1 - rank, 0),
        "recv": lambda: backend.recv([small], 1 - rank, 0),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=SENTENCE) as caught:
            call()
        assert "cuda:0" in str(caught.value) and "zipccl" in str(caught.value), name
    # Nothing is left behind: the group goes on.
    total = torch.ones(3)
    dist.all_reduce(total, group=group())
    assert total.tolist() == [2.0, 2.0, 2.0]


@ranks(2)
def test_mixed_devices_are_refused(rank: int, world_size: int) -> None:
    backend = zipccl.backend.backend_of(group())
    with pytest.raises(ValueError, match="one device|CPU tensors only"):
        backend._allgather_base(torch.empty(2 << 20, dtype=torch.bfloat16), fake(1 << 20))


@ranks(1)
def test_methods_of_nccl_are_no_attributes_here(rank: int, world_size: int) -> None:
    backend = zipccl.backend.backend_of(group())
    for name in ("register_mem_pool", "_comm_ptr", "no_such_method"):
        assert not hasattr(backend, name)
        with pytest.raises(AttributeError, match=name):
            getattr(backend, name)
    backend.perform_nocolor_split(torch.device("cuda:0"))  # c10d calls it on ranks that a new group leaves out


def test_codec_refuses_cuda_tensors() -> None:
    with pytest.raises(ValueError, match="CPU tensor"):
        zipccl.encode(fake(100))


@pytest.mark.skipif(not _C.built_with_cuda, reason="this build has no CUDA part")
def test_a_cuda_build_needs_no_driver() -> None:
    """The library loads where no driver is, as wheels must, and the raw kernels say what they expect."""
    code = "import torch, zipccl; from zipccl import _C; assert _C.built_with_cuda; zipccl.encode(torch.ones(9))"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ValueError, match="CUDA tensor"):
        _C.cuda_encode(torch.ones(5), (torch.empty(0, dtype=torch.uint8),) * 3)


def test_options() -> None:
    options = zipccl.Options(cuda_over="gloo", cuda_segment_bytes=1 << 20)
    assert (options.cuda_over, options.cuda_segment_bytes) == ("gloo", 1 << 20)
    for wrong in ({"cuda_over": "mpi"}, {"cuda_segment_bytes": 0}):
        with pytest.raises(ValueError, match="not allowed"):
            zipccl.Options(**wrong)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this PyTorch has no NCCL")
def test_options_of_nccl_are_taken() -> None:
    nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert zipccl.Options(nccl=nccl).nccl is nccl
    assert zipccl.Options.of(zipccl.Options(nccl=nccl)).nccl is nccl
