"""Zipped all-reduce: fp32 accumulation in rank order, one rounding, and the same bits on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multirank import explain, group, init, launch, only_zipccl, ranks
from oracle import KINDS, REDUCTIONS, SIZES, assert_bits, assert_number, data, reduce_op, reduced
from test_all_gather import LARGE, MODES

import zipccl
from zipccl.backend import backend_of

pytestmark = only_zipccl

ZIPPED = ["zip", "raw", "segments", "no_inline", "checksum"]
BF16, FP32 = torch.bfloat16, torch.float32


def check(op: str, kind: str, n: int, rank: int, world_size: int, mode: str, async_op: bool) -> None:
    x = data(kind, n, rank)
    work = dist.all_reduce(x, op=reduce_op(op, rank), group=group(**MODES[mode]), async_op=async_op)
    if work is not None:
        work.wait()
        assert work.get_future().value()[0] is x
    assert_number(x, reduced([data(kind, n, r) for r in range(world_size)], op), (op, kind, n, mode))


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "segments"])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_kind_of_data(rank: int, world_size: int, op: str, mode: str) -> None:
    for i, kind in enumerate(KINDS):
        for n in (257, LARGE):
            check(op, kind, n, rank, world_size, mode, async_op=bool(i % 2))


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_every_size(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_low_zero", "fp32_full"):
        for i, n in enumerate(SIZES):
            check("sum", kind, n, rank, world_size, mode, async_op=bool(i % 2))


@ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["bf16_gauss", "fp32_full", "fp32_low_zero"])
@pytest.mark.parametrize("options", [{}, dict(two_phase=False), dict(min_bytes=1 << 20), dict(mode="raw")], ids=str)
def test_many_segments(rank: int, world_size: int, kind: str, options: dict) -> None:
    """Both phases are under way at once; the last share is shorter, and with min_bytes plain."""
    g = group(**dict(mode="zip", min_bytes=0, segment_bytes=1) | options)
    segment = (128 << 10) // data(kind, 1, 0).element_size()
    for n in (8 * segment * world_size + 1, 8 * segment * world_size - 5):
        x = data(kind, n, rank)
        dist.all_reduce(x, group=g)
        assert_number(x, reduced([data(kind, n, r) for r in range(world_size)], "sum"), (kind, n))


@ranks(2, 3, 4)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_paths_and_ranks_are_bit_identical(rank: int, world_size: int, op: str) -> None:
    """Also in which NaN a sum keeps; and equal to a reduce-scatter's parts, which have the same order."""
    for kind in KINDS:
        results = []
        for mode in ZIPPED:
            x = data(kind, LARGE, rank)
            dist.all_reduce(x, op=reduce_op(op, rank), group=group(**MODES[mode]))
            assert_bits(x, results[0] if results else x, (mode, kind))
            results.append(x)
        everyone = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(everyone, x, group=group(**MODES["raw"]))
        for other in everyone:
            assert_bits(other, x, (kind, "another rank has another result"))


@ranks(2, 3)
def test_forms(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])

    def values(dtype: torch.dtype, r: int) -> torch.Tensor:
        return data("bf16_gauss", 24_000, r).to(dtype).view(30, 40, 20)

    for dtype in (BF16, FP32):
        want = reduced([values(dtype, r) for r in range(world_size)], "sum")
        # dense in another order, on one rank only
        x = values(dtype, rank)
        if rank == 0:
            x = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        dist.all_reduce(x, group=g)
        assert torch.equal(x, want)
        # views, and several at once
        two = [values(dtype, rank)[:15], values(dtype, rank)[15:]]
        dist.all_reduce_coalesced(two, group=g)
        assert torch.equal(torch.cat(two), want)
        with dist._coalescing_manager(g, async_ops=True) as manager:
            parts = [values(dtype, rank)[:15].contiguous(), values(dtype, rank)[15:].contiguous()]
            for part in parts:
                dist.all_reduce(part, group=g)
        manager.wait()
        assert torch.equal(torch.cat(parts), want)


@ranks(2, 4)
def test_statistics_and_routes(rank: int, world_size: int) -> None:
    n = 1 << 20
    g = group(mode="zip")
    # Sums of bf16 values in fp32 are no bf16 values: the second half costs .85.
    for kind, most in (("bf16_gauss", 0.72), ("fp32_low_zero", (0.36 + 0.86) / 2)):
        zipccl.reset_stats(g)
        dist.all_reduce(data(kind, n, rank), group=g)
        dist.barrier(group=g)
        stats = zipccl.stats(g)["all_reduce"]
        assert (stats["calls"], stats["zipped"], stats["native"]) == (1, 1, 0)
        share = n * KINDS[kind].itemsize / world_size
        assert stats["raw_bytes"] == pytest.approx(2 * (world_size - 1) * share, rel=0.01)
        assert stats["wire_bytes"] < most * stats["raw_bytes"]
    zipccl.reset_stats(g)
    for x in (torch.ones(1000), torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.float16)):
        dist.all_reduce(x, group=g)  # small, or of a dtype that is not coded
        assert (x == world_size).all()
    dist.all_reduce(torch.ones(n, dtype=torch.int32), op=dist.ReduceOp.BAND, group=g)
    assert zipccl.stats(g)["all_reduce"]["native"] == 4


def disagrees(rank: int, world_size: int, store: dist.Store) -> str:
    """The last rank calls with more elements: all fail, as every result would lack a share; the next call is right."""
    init(rank, world_size, store, timeout=20, mode="zip", min_bytes=0)
    n = 50_000 + (rank == world_size - 1) * 9000
    try:
        dist.all_reduce(data("bf16_gauss", n, rank))
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was raised")
    x = data("bf16_gauss", 50_000, rank)
    dist.all_reduce(x)
    assert_number(x, reduced([data("bf16_gauss", 50_000, r) for r in range(world_size)], "sum"))
    dist.destroy_process_group()
    return text


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_mismatch_fails_on_all_ranks(world_size: int) -> None:
    ended = launch(world_size, disagrees)
    assert [e.state for e in ended] == ["ok"] * world_size, explain(ended)
    for e in ended:
        assert "all_reduce" in e.value and "but rank" in e.value, e.value


def damaged(rank: int, world_size: int, store: dist.Store) -> str:
    """Rank 2 sends the others their own messages back, but the second segment of its summands for rank 0 damaged."""
    init(rank, world_size, store, timeout=10, mode="zip", min_bytes=0, segment_bytes=1, checksum=True)
    segment = 65536  # the least: 8 chunks
    text = "sent"
    if rank == 2:
        wire = backend_of().exchange_backend
        summands, results, greeting = 1, 5, 0  # tags
        for place, tag in enumerate((greeting, summands, summands, results, results, greeting)):
            for peer in (0, 1):
                message = torch.zeros(56 if tag == greeting else 384 + 8 * 11264 + 2816, dtype=torch.uint8)
                wire.recv([message], peer, tag).wait()
                message[len(message) // 2] ^= 0x55 * (place == 2 and peer == 0)
                wire.send([message], peer, tag).wait()
    else:
        try:
            dist.all_reduce(data("bf16_gauss", 2 * segment * world_size, rank))
        except RuntimeError as error:
            text = str(error)
    dist.barrier()
    return text


def test_a_sum_that_lacks_a_summand_is_no_result() -> None:
    """The rank that finds out tells the others behind what it has sent by then."""
    ended = launch(3, damaged, timeout=30)
    values = [str(e.value) for e in ended]
    assert "rank 2 sent a corrupted message" in values[0] and "checksum" in values[0], explain(ended)
    assert "rank 0 calls all_reduce" in values[1] and "as it failed" in values[1], explain(ended)
    assert values[2] == "sent", explain(ended)
