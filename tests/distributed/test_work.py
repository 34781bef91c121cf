"""What a call returns: futures, waiting, exceptions, overlap, memory, names in a profile."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from multirank import fresh_group, group, only_zipccl, ranks, seconds
from oracle import BF16, FP32, assert_bits, data, reduced

ZIP = dict(mode="zip", min_bytes=0)
N = 50021


def gather(g: dist.ProcessGroup, rank: int, case: object = "") -> tuple[torch.Tensor, dist.Work]:
    out = torch.zeros(dist.get_world_size(g) * N, dtype=BF16)
    return out, dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank, case), group=g, async_op=True)


def gathered(world_size: int, case: object = "") -> torch.Tensor:
    return torch.cat([data("bf16_gauss", N, r, case) for r in range(world_size)])


# torchcomms 688
@pytest.mark.core
@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "native"])
def test_future_holds_the_outputs(rank: int, world_size: int, mode: str) -> None:
    g = group(**dict(ZIP, mode=mode))
    out, work = gather(g, rank)
    value = work.get_future().wait()
    assert_bits(out, gathered(world_size))
    assert isinstance(value, list) and value[0].data_ptr() == out.data_ptr()

    x = torch.cat([data("fp32_low_zero", N, rank, j) for j in range(world_size)])
    part = torch.zeros(N)
    value = dist.reduce_scatter_tensor(part, x, group=g, async_op=True).get_future().wait()
    want = reduced([data("fp32_low_zero", N, r, rank) for r in range(world_size)], "sum")
    if mode != "native" or world_size == 2:
        assert_bits(value[0], want)

    parts = [torch.zeros(N, dtype=BF16) for _ in range(world_size)]
    value = dist.all_gather(parts, data("bf16_gauss", N, rank), group=g, async_op=True).get_future().wait()
    assert_bits(torch.cat(parts), gathered(world_size))

    out = torch.zeros(world_size * N, dtype=BF16)
    x = torch.cat([data("bf16_gauss", N, rank, j) for j in range(world_size)])
    value = dist.all_to_all_single(out, x, group=g, async_op=True).get_future().wait()
    assert_bits(value[0], torch.cat([data("bf16_gauss", N, r, rank) for r in range(world_size)]))


@only_zipccl
@ranks(2)
def test_future_callbacks(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    x = data("fp32_low_zero", 2 * N, rank)
    part = torch.zeros(N)
    work = dist.reduce_scatter_tensor(part, x, group=g, async_op=True)
    halved = work.get_future().then(lambda f: f.value()[0] / 2).wait()
    assert torch.equal(halved, part / 2)
    summed = torch.full((N,), 1.0)
    tripled = dist.all_reduce(summed, group=g, async_op=True).get_future().then(lambda f: f.value()[0] * 3).wait()
    assert torch.equal(tripled, torch.full((N,), 6.0))


# PowerSGD's hook: each step of it is a callback of the future of the step before
@only_zipccl
@ranks(2, 3)
def test_callbacks_may_wait_for_collectives_of_the_same_group(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    dist.barrier(group=g)
    if rank == world_size - 1:
        time.sleep(0.3)  # the others' callbacks run when the call completes, not at once

    def next_gather(_: torch.futures.Future) -> torch.Tensor:
        out, work = gather(g, rank, "inner")
        work.wait()
        return out

    def next_sum(f: torch.futures.Future) -> tuple[torch.Tensor, torch.Tensor]:
        mean = torch.arange(4, dtype=torch.int64) * 3 + rank  # of integers: made by the worker
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=g)
        return f.value(), mean

    outer, work = gather(g, rank, "outer")
    inner, mean = work.get_future().then(next_gather).then(next_sum).wait()
    work.wait()
    assert_bits(outer, gathered(world_size, "outer"))
    assert_bits(inner, gathered(world_size, "inner"))
    assert mean.tolist() == [(3 * i * world_size + sum(range(world_size))) // world_size for i in range(4)]


@ranks(2)
def test_work_after_completion(rank: int, world_size: int) -> None:
    out, work = gather(group(**ZIP), rank)
    assert work.wait() is True
    assert work.wait() is True, "a second wait returns too"
    assert work.wait(seconds(1)) is True
    assert work.is_completed() and work.is_success()
    assert work.exception() is None
    assert_bits(work.result()[0], out)
    assert_bits(out, gathered(world_size))


@ranks(2)
def test_works_waited_for_in_another_order_or_not_at_all(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    pending = [gather(g, rank, i) for i in range(12)]
    for i in (11, 3, 0):
        pending[i][1].wait()
        assert_bits(pending[i][0], gathered(world_size, i))
    del pending  # the rest is dropped
    out, work = gather(g, rank, "last")
    work.wait()
    assert_bits(out, gathered(world_size, "last"))


@ranks(2, 3)
def test_many_in_flight(rank: int, world_size: int) -> None:
    g, h = group(**ZIP), group(mode="raw", min_bytes=0)
    pending = [(gather(g if i % 2 else h, rank, i), i) for i in range(60)]
    for (out, work), i in reversed(pending):
        work.wait()
        assert_bits(out, gathered(world_size, i), i)


@ranks(2)
def test_the_input_may_be_dropped_at_once(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    pending = []
    for i in range(10):
        out = torch.zeros(2 * N, dtype=BF16)
        pending.append((out, dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank, i), group=g, async_op=True)))
        torch.full((N,), 99.0, dtype=BF16)  # takes the memory of an input that was freed too early
    for i, (out, work) in enumerate(pending):
        work.wait()
        assert_bits(out, gathered(2, i), i)


@only_zipccl
@ranks(2)
def test_wait_with_a_timeout_raises_while_a_peer_is_late(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        if rank == 1:
            time.sleep(2.0)
        work = gather(g, rank)[1]
        if rank == 0:
            started = time.monotonic()
            assert not work.is_completed(), "returned before the peer came"
            with pytest.raises(RuntimeError, match="(?i)300 ms|time"):
                work.wait(seconds(0.3))
            assert time.monotonic() - started < 1.5
    # the group of this test is gone; another is not touched
    check, work = gather(group(**ZIP), rank)
    work.wait()
    assert_bits(check, gathered(2))


@only_zipccl
@ranks(2)
def test_asynchronous_calls_return_at_once(rank: int, world_size: int) -> None:
    """Rank 1 comes two seconds late: rank 0's calls of every kind return long before."""
    g = group(**ZIP)
    if rank == 1:
        time.sleep(1.5)
    started = time.monotonic()
    out, work = gather(g, rank)
    part = torch.zeros(N)
    x = data("fp32_low_zero", 2 * N, rank)
    second = dist.reduce_scatter_tensor(part, x, group=g, async_op=True)
    swapped = torch.zeros(2 * N)
    third = dist.all_to_all_single(swapped, x, group=g, async_op=True)
    if rank == 0:
        assert time.monotonic() - started < 1.0
        assert not work.is_completed()
    for w in (third, second, work):
        w.wait()
    assert_bits(out, gathered(2))


@only_zipccl
@ranks(2)
def test_the_interpreter_runs_while_a_call_is_under_way(rank: int, world_size: int) -> None:
    """Blocking calls and waits release the GIL."""
    g = group(**ZIP)
    dist.barrier(group=g)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.02):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 1:
        time.sleep(1.0)
    before = len(ticks)
    out = torch.zeros(2 * N, dtype=BF16)
    dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank), group=g)
    during = len(ticks) - before
    stop.set()
    thread.join()
    assert rank == 1 or during > 10


@ranks(2)
def test_calls_from_several_threads_on_groups_of_their_own(rank: int, world_size: int) -> None:
    groups = [group(segment_bytes=65536 + 4096 * i, **ZIP) for i in range(4)]
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            for k in range(10):
                out, work = gather(groups[i], rank, (i, k))
                work.wait()
                assert_bits(out, gathered(2, (i, k)))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


# pytorch 147168
@ranks(2, timeout=110)
def test_memory_stays_flat_over_200_gathers_of_16_mib(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    x = torch.randn(1 << 23).mul_(0.02).bfloat16()
    out = torch.empty(2 << 23, dtype=BF16)

    def gather_once() -> None:
        dist.all_gather_into_tensor(out, x, group=g, async_op=True).wait()

    for _ in range(3):
        gather_once()
    before, highest = resident(), 0
    for _ in range(197):
        gather_once()
        highest = max(highest, resident())
    assert highest - before < 24 << 20, f"grew by {(highest - before) >> 20} MiB"
    assert_bits(out[rank << 23 : (rank + 1) << 23], x)


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@only_zipccl
@ranks(2)
def test_work_memory_is_bounded_by_the_segment(rank: int, world_size: int) -> None:
    """128 MiB in segments of 1 MiB: the peak above inputs and outputs is a few segments."""
    with fresh_group(segment_bytes=1 << 20, **ZIP) as g:
        x = torch.zeros(1 << 26, dtype=BF16).normal_(0, 0.02)
        out = torch.zeros(2 << 26, dtype=BF16)
        before, peak, stop = resident(), [0], threading.Event()

        def watch() -> None:
            while not stop.wait(0.005):
                peak[0] = max(peak[0], resident())

        thread = threading.Thread(target=watch)
        thread.start()
        dist.all_gather_into_tensor(out, x, group=g)
        stop.set()
        thread.join()
        assert_bits(out[rank << 26 : (rank + 1) << 26], x)
    assert peak[0] - before < 48 << 20, f"{(peak[0] - before) >> 20} MiB of work memory"


@only_zipccl
@ranks(2)
def test_profiler_shows_the_calls(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    x = torch.ones(2 * N, dtype=BF16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_gather_into_tensor(torch.zeros(2 * N, dtype=BF16), x[:N], group=g)
        dist.all_gather([torch.zeros(N, dtype=BF16) for _ in range(2)], x[:N], group=g)
        dist.reduce_scatter_tensor(torch.zeros(N, dtype=BF16), x, group=g)
        dist.all_to_all_single(torch.zeros(2 * N, dtype=BF16), x, group=g)
    names = {e.name for e in profile.events()}
    ours = {n for n in names if n.startswith("zipccl:")}
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert any(op in n for n in ours), (op, sorted(names))


@only_zipccl
@ranks(2)
def test_sequence_numbers_rise(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        before = g._get_sequence_number_for_group()
        for i in range(3):
            gather(g, rank, i)[1].wait()
        assert g._get_sequence_number_for_group() > before


@ranks(2)
def test_blocking_calls_under_inference_mode_and_no_grad(rank: int, world_size: int) -> None:
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            x = data("bf16_gauss", N, rank)
            out = torch.zeros(2 * N, dtype=BF16)
            dist.all_gather_into_tensor(out, x, group=group(**ZIP))
            assert_bits(out, gathered(2))
            part = torch.zeros(N)
            dist.reduce_scatter_tensor(part, torch.ones(2 * N, dtype=FP32), group=group(**ZIP))
            assert part.sum() == 2 * N
