"""All-to-alls go on pair by pair, in two phases: who waits for whom, and what is seen of it."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from multirank import fresh_group, group, only_zipccl, ranks
from oracle import BF16, FP32, KINDS, assert_bits, data
from torch.profiler import ProfilerActivity, profile

import zipccl

pytestmark = only_zipccl
ZIP = dict(mode="zip", min_bytes=0)
ONE_PHASE = dict(ZIP, two_phase=False)


def exchange(
    rows: list[list[int]], rank: int, g: dist.ProcessGroup, dtype: torch.dtype = BF16, asynchronous: bool = False
) -> tuple[torch.Tensor, torch.Tensor, dist.Work | None]:
    """rows[i][j] values go from i to j. Returns what arrives, what should, and the work."""
    n_in, n_out = rows[rank], [row[rank] for row in rows]
    kind = "bf16_gauss" if dtype == BF16 else "fp32_full"
    out = torch.full((sum(n_out),), 7.0, dtype=dtype)
    source = torch.cat([data(kind, n, rank, j) for j, n in enumerate(n_in)])
    want = torch.cat([data(kind, n, i, rank) for i, n in enumerate(n_out)])
    return out, want, dist.all_to_all_single(out, source, n_out, n_in, group=g, async_op=asynchronous)


LATE = 1.0


@ranks(3)
def test_nobody_waits_for_a_rank_with_which_it_exchanges_nothing(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    rows = [[10_000, 300_000, 0], [200_000, 10_000, 0], [0, 0, 5_000]]
    exchange([[1000] * 3] * 3, rank, g)
    dist.barrier()
    if rank == 2:
        time.sleep(LATE)
    begin = time.perf_counter()
    out, want, _ = exchange(rows, rank, g)
    seconds = time.perf_counter() - begin
    assert_bits(out, want)
    assert rank == 2 or seconds < LATE / 2, f"took {seconds:.2f} s"
    for _ in range(2):  # what was left open does no harm
        out, want, _ = exchange([[3000 + i] * 3 for i in range(3)], rank, g)
        assert_bits(out, want)


@ranks(3)
def test_what_is_there_moves_before_a_late_rank_comes(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    n = 300_000
    exchange([[1000] * 3] * 3, rank, g)
    dist.barrier()
    if rank == 2:
        time.sleep(LATE)
    out, want, work = exchange([[n] * 3] * 3, rank, g, asynchronous=True)
    if rank < 2:
        time.sleep(LATE / 2)
        assert not work.is_completed()
        assert_bits(out[: 2 * n], want[: 2 * n])
        assert not torch.equal(out[2 * n :], want[2 * n :])
    work.wait()
    assert_bits(out, want)


@ranks(3)
@pytest.mark.parametrize("calls", [1, 3, 70])
def test_nothing_to_exchange_again_and_again(rank: int, world_size: int, calls: int) -> None:
    """More of them than greetings may be open."""
    with fresh_group(**ZIP) as g:
        for _ in range(calls):
            out, want, _ = exchange([[10, 20, 0], [30, 0, 0], [0, 0, 0]], rank, g)
            assert_bits(out, want)
        out, want, _ = exchange([[5000, 6000, 7000]] * 3, rank, g)
        assert_bits(out, want)


@ranks(2)
def test_a_peer_that_expects_something_where_nothing_is_sent(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        out, source = torch.empty(5 * rank, dtype=BF16), torch.empty(0, dtype=BF16)
        told = "all_to_all.* with .* to receive, coded|all_to_all.* to receive, plain"
        if rank == 1:  # expects 5 elements of rank 0, which has none for it
            with pytest.raises(RuntimeError, match=r"rank 0 calls all_to_all .* with 0 bfloat16 to send"):
                dist.all_to_all_single(out, source, [5, 0], [0, 0], group=g)
        else:
            dist.all_to_all_single(out, source, [0, 0], [0, 0], group=g)  # has nothing to do with rank 1
        # In its next call with rank 1, rank 0 hears what that thought.
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"rank 1 calls all_to_all .* and 5 to receive"):
                exchange([[9000] * 2] * 2, rank, g)
        else:
            exchange([[9000] * 2] * 2, rank, g)
        out, want, _ = exchange([[8000] * 2] * 2, rank, g)
        assert_bits(out, want, told)


@ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_one_phase_gives_the_same(rank: int, world_size: int, kind: str) -> None:
    """Of every collective and kind of data: sizes first, then everything at once."""
    g = group(**ONE_PHASE, segment_bytes=200_000)
    n = 70_000
    mine = data(kind, n, rank)
    gathered = torch.empty(world_size * n, dtype=mine.dtype)
    dist.all_gather_into_tensor(gathered, mine, group=g)
    assert_bits(gathered, torch.cat([data(kind, n, r) for r in range(world_size)]))
    rows = [[(i + 1) * 30_000 * (i != j) for j in range(world_size)] for i in range(world_size)]
    out, want, _ = exchange(rows, rank, g, mine.dtype)
    assert_bits(out, want)
    summed = torch.empty(n // world_size * 1, dtype=mine.dtype)
    parts = mine[: summed.numel() * world_size]
    dist.reduce_scatter_tensor(summed, parts, group=g)
    again = torch.empty_like(summed)
    dist.reduce_scatter_tensor(again, parts, group=group(**ZIP, segment_bytes=200_000))
    assert_bits(summed, again)
    long, again = mine.repeat(5), mine.repeat(5)
    dist.all_reduce(long, group=g)
    dist.all_reduce(again, group=group(**ZIP, segment_bytes=200_000))
    assert_bits(long, again)


@ranks(2)
def test_groups_must_agree_on_phases(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match="two_phase=False.*two_phase=True|two_phase=True.*two_phase=False"):
        dist.new_group(backend="zipccl", pg_options=zipccl.Options(mode="zip", two_phase=bool(rank)))


@ranks(3)
def test_both_phases_are_timed(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        exchange([[200_000] * 3] * 3, rank, g, BF16)
        seconds = zipccl.stats(g)["all_to_all"]["seconds"]
        assert seconds["static"] > 0 and seconds["dynamic"] == 0, seconds
        exchange([[200_000] * 3] * 3, rank, g, FP32)  # its low halves travel in the dynamic part
        stats = zipccl.stats(g)["all_to_all"]
        seconds = stats["seconds"]
        assert stats["dynamic_bytes"] >= 2 * 2 * 200_000
        assert seconds["dynamic"] > 0
        assert seconds["exchange"] == pytest.approx(seconds["static"] + seconds["dynamic"])
        assert seconds["encode"] + seconds["exchange"] + seconds["decode"] <= seconds["total"]


@ranks(2, 3)
def test_both_phases_are_in_a_profile(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        exchange([[200_000] * world_size] * world_size, rank, g, FP32)
    spans = {event.key: event.count for event in found.key_averages()}
    for stage in ("zipccl:encode", "zipccl:static", "zipccl:dynamic", "zipccl:decode"):
        assert spans.get(stage, 0) >= world_size - 1, (stage, spans)
