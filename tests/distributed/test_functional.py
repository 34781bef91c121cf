"""Functional collectives and DTensor over zipccl: values, gradients, layouts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from multirank import group, ranks
from oracle import BF16, FP32, assert_bits, data, reduced, small_integers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

ZIP = dict(mode="zip", min_bytes=0)
N = 20004


def done(t: torch.Tensor) -> torch.Tensor:
    """Functional collectives return a tensor that waits when it is used, or a plain one."""
    return t.wait() if isinstance(t, funcol.AsyncCollectiveTensor) else t


@pytest.mark.core
@ranks(2, 3, 4)
def test_all_gather_tensor(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    shards = [data("bf16_gauss", N, r).reshape(4, N // 4) for r in range(world_size)]
    for dim in (0, 1):
        assert_bits(done(funcol.all_gather_tensor(shards[rank], dim, g)), torch.cat(shards, dim), dim)


@ranks(2, 3)
def test_reduce_scatter_tensor(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    for op in ("sum", "avg"):
        x = torch.cat([data("fp32_low_zero", N, rank, j) for j in range(world_size)]).reshape(world_size * 4, -1)
        got = done(funcol.reduce_scatter_tensor(x, op, 0, g))
        want = reduced([data("fp32_low_zero", N, r, rank) for r in range(world_size)], op)
        assert_bits(got.flatten(), want)
        # along the second dimension: rank r gets the columns of chunk r
        whole = small_integers(FP32, 4 * world_size * 5000, rank).reshape(4, -1)
        got = done(funcol.reduce_scatter_tensor(whole, op, 1, g))
        total = sum(small_integers(FP32, 4 * world_size * 5000, r).reshape(4, -1) for r in range(world_size))
        total = total / world_size if op == "avg" else total
        assert_bits(got, total.chunk(world_size, 1)[rank].contiguous())


@ranks(2, 3)
def test_all_reduce_and_broadcast(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    total = done(funcol.all_reduce(small_integers(FP32, N, rank), "sum", g))
    assert torch.equal(total, sum(small_integers(FP32, N, r) for r in range(world_size)))
    assert_bits(done(funcol.broadcast(data("bf16_bits", N, rank), 1, g)), data("bf16_bits", N, 1))


@ranks(2, 3)
def test_coalesced(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    got = funcol.all_gather_into_tensor_coalesced([data("bf16_gauss", n, rank) for n in (N, 8, 9000)], g)
    for out, n in zip(got, (N, 8, 9000), strict=True):
        assert_bits(done(out), torch.cat([data("bf16_gauss", n, r) for r in range(world_size)]))
    inputs = [small_integers(FP32, n * world_size, rank) for n in (N, 8)]
    got = funcol.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], g)
    for out, n in zip(got, (N, 8), strict=True):
        total = sum(small_integers(FP32, n * world_size, r) for r in range(world_size))
        assert torch.equal(done(out), total.chunk(world_size)[rank])


@pytest.mark.core
@ranks(2, 3)
def test_all_to_all_single_autograd(rank: int, world_size: int) -> None:
    """Backward is the same exchange with the splits swapped."""
    g = group(**ZIP)
    rows = [[2000 * (i + 1) + 1000 * j * (i != j) for j in range(world_size)] for i in range(world_size)]
    rows[0][world_size - 1] = 0
    n_in, n_out = rows[rank], [rows[i][rank] for i in range(world_size)]
    x = torch.cat([data("fp32_full", 4 * n, rank, j) for j, n in enumerate(n_in)]).reshape(-1, 4).requires_grad_()
    got = funcol.all_to_all_single_autograd(x, n_out, n_in, g)
    want = torch.cat([data("fp32_full", 4 * n, i, rank) for i, n in enumerate(n_out)]).reshape(-1, 4)
    assert_bits(done(got), want)
    upstream = torch.cat([data("fp32_full", 4 * n, rank, (i, "up")) for i, n in enumerate(n_out)]).reshape(-1, 4)
    got.backward(upstream)
    back = torch.cat([data("fp32_full", 4 * n, j, (rank, "up")) for j, n in enumerate(n_in)]).reshape(-1, 4)
    assert_bits(x.grad, back)


@ranks(2, 3)
def test_all_gather_and_reduce_scatter_with_autograd(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    x = small_integers(FP32, 9000, rank).requires_grad_()
    out = funcol.all_gather_tensor_autograd(x, 0, g)
    (out * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((9000,), float(sum(range(1, world_size + 1)))))
    y = small_integers(FP32, 9000 * world_size, rank).requires_grad_()
    part = funcol.reduce_scatter_tensor_autograd(y, "sum", 0, g)
    (part * (rank + 1)).sum().backward()
    want = torch.cat([torch.full((9000,), r + 1.0) for r in range(world_size)])
    assert torch.equal(y.grad, want)


@pytest.mark.core
@ranks(2, 3, 4, **ZIP)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_dtensor_redistribute(rank: int, world_size: int, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = data("bf16_gauss", 12 * 5000, 0).reshape(12, 5000).to(dtype)

    def assert_value(got: DTensor, want: torch.Tensor) -> None:
        assert_bits(got.to_local().contiguous(), want.contiguous(), got.placements)

    replicated = distribute_tensor(whole, mesh, [Replicate()])
    for dim in (0, 1):
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        assert_value(sharded, distribute_tensor(whole, mesh, [Shard(dim)]).to_local())
        assert_value(sharded.redistribute(mesh, [Replicate()]), whole)
        assert_bits(sharded.full_tensor(), whole)
        assert_value(replicated.redistribute(mesh, [Shard(dim)]), sharded.to_local())
        other = torch.chunk(whole, world_size, 1 - dim)[rank]
        assert_value(sharded.redistribute(mesh, [Shard(1 - dim)]), other)
    for op in ("sum", "avg", "max"):
        mine = small_integers(dtype, 12 * 5000, rank).reshape(12, 5000)
        partial = DTensor.from_local(mine, mesh, [Partial(op)])
        want = reduced([small_integers(dtype, 12 * 5000, r) for r in range(world_size)], op).reshape(12, 5000)
        for dim in (0, 1):
            got = partial.redistribute(mesh, [Shard(dim)])
            assert_value(got, torch.chunk(want, world_size, dim)[rank])
        assert_value(partial.redistribute(mesh, [Replicate()]), want)


@ranks(3, **ZIP)
def test_dtensor_with_uneven_and_empty_shards(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for rows in (1, 2, 7):
        whole = data("bf16_gauss", rows * 9000, 0).reshape(rows, 9000)
        assert_bits(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor(), whole, rows)


@ranks(4, **ZIP)
def test_dtensor_on_a_two_dimensional_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = data("bf16_gauss", 80 * 600, 0).reshape(80, 600)
    for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        assert_bits(distribute_tensor(whole, mesh, placements).full_tensor(), whole, placements)


@ranks(2, **ZIP)
def test_sharded_matmul_equals_the_whole_one(rank: int, world_size: int) -> None:
    """pytorch 108780's function, in eager mode: gather a shard, multiply."""
    mesh = init_device_mesh("cpu", (world_size,))
    a, b = small_integers(FP32, 64 * 128, 0).reshape(64, 128), small_integers(FP32, 128 * 32, 1).reshape(128, 32)
    product = distribute_tensor(a, mesh, [Shard(0)]) @ distribute_tensor(b, mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), a @ b)
    gathered = funcol.all_gather_tensor(a.chunk(2)[rank].contiguous(), 0, dist.group.WORLD)
    assert torch.equal(gathered @ b, a @ b)
