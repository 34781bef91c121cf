"""What is not compressed works as on the wrapped backend; where Gloo lacks something, it works all the same."""

from __future__ import annotations

import functools
import time

import pytest
import torch
import torch.distributed as dist
from multirank import BACKEND, explain, group, init, launch, only_zipccl, pg_options, ranks, seconds
from oracle import BF16, FP32, NATIVE, assert_bits, assert_number, data, reduce_op, reduced, small_integers

MODES = {"zip": dict(mode="zip", min_bytes=0), "auto": dict(mode="auto"), "native": dict(mode="native")}
N = 20011


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float16, torch.int64])
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_all_reduce(rank: int, world_size: int, op: str, dtype: torch.dtype, mode: str) -> None:
    for n in (0, 1, 257, N):
        for async_op in (False, True):
            inputs = [small_integers(dtype, n, r) for r in range(world_size)]
            if op == "product":
                inputs = [t % 4 for t in inputs]
            x = inputs[rank].clone()
            work = dist.all_reduce(x, op=reduce_op(op), group=group(**MODES[mode]), async_op=async_op)
            if async_op:
                work.wait()
            combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}[op]
            assert torch.equal(x, functools.reduce(combine, inputs)), (op, dtype, n)


# Gloo has no PREMUL_SUM, and rounds bf16 sums at every step or refuses them
@pytest.mark.core
@only_zipccl
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["avg", "premul_sum"])
def test_all_reduce_avg_and_premul_sum(rank: int, world_size: int, op: str, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_full", "fp32_low_zero"):
        for n in (1, 257, N):
            inputs = [data(kind, n, r) for r in range(world_size)]
            x = inputs[rank].clone()
            dist.all_reduce(x, op=reduce_op(op, rank), group=group(**MODES[mode]))
            assert_close_to_exact(x, inputs, op)


@only_zipccl
@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_all_reduce_sums_bf16(rank: int, world_size: int, mode: str) -> None:
    for n in (1, 257, N):
        inputs = [data("bf16_gauss", n, r) for r in range(world_size)]
        x = inputs[rank].clone()
        dist.all_reduce(x, group=group(**MODES[mode]))
        assert_close_to_exact(x, inputs, "sum")
        same = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(same, x, group=group(**MODES[mode]))
        for t in same:
            assert_bits(t, x, "the ranks hold different sums")


def assert_close_to_exact(got: torch.Tensor, inputs: list[torch.Tensor], op: str) -> None:
    """Within what the roundings of one sum in this dtype, in whatever order, may cost."""
    want = reduced([t.double().float() for t in inputs], op)
    scale = torch.stack([t.float().abs() for t in inputs]).sum(0)
    eps = torch.finfo(inputs[0].dtype).eps
    assert got.dtype == inputs[0].dtype
    assert bool(((got.float() - want).abs() <= scale * eps * len(inputs)).all()), op


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_reduce(rank: int, world_size: int, mode: str) -> None:
    for dtype in (BF16, FP32, torch.int32):
        for dst in range(world_size):
            x = small_integers(dtype, N, rank)
            dist.reduce(x, dst=dst, group=group(**MODES[mode]))
            if rank == dst:
                assert torch.equal(x, sum(small_integers(dtype, N, r) for r in range(world_size))), (dtype, dst)


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("op", ["avg", "premul_sum"])
def test_reduce_avg_and_premul_sum(rank: int, world_size: int, op: str) -> None:
    for kind in ("bf16_gauss", "fp32_full"):
        for mode in MODES:
            inputs = [data(kind, N, r) for r in range(world_size)]
            x = inputs[rank].clone()
            dist.reduce(x, dst=world_size - 1, op=reduce_op(op, rank), group=group(**MODES[mode]))
            if rank == world_size - 1:
                assert_close_to_exact(x, inputs, op)


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_broadcast(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_bits", "fp32_bits", torch.int64, torch.bool, torch.float16):
        for n in (0, 1, N):
            for src in range(world_size):
                x = data(kind, n, rank)
                work = dist.broadcast(x, src=src, group=group(**MODES[mode]), async_op=True)
                work.wait()
                assert_bits(x, data(kind, n, src), (kind, n, src))


COLUMN_CALLS = ["broadcast", "all_reduce", "reduce", "gather", "scatter", "send_recv", "all_reduce_coalesced"]


# pytorch 192920, 74809: t[:, 0] through every op
@only_zipccl  # Gloo fills a column view with what belongs between its elements
@ranks(2, 3)
@pytest.mark.parametrize("call", COLUMN_CALLS)
def test_column_views_are_right_or_refused(rank: int, world_size: int, call: str) -> None:
    def column(values: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(N, 2, dtype=values.dtype)
        table[:, 0] = values
        return table[:, 0]

    g, last = group(**MODES["zip"]), world_size - 1
    everyone = [small_integers(FP32, N, r) for r in range(world_size)]
    x, outputs = column(everyone[rank]), [column(torch.zeros(N)) for _ in range(world_size)]
    try:
        if call == "broadcast":
            dist.broadcast(x, src=last, group=g)
            got, want = [x], [everyone[last]]
        elif call == "all_reduce":
            dist.all_reduce(x, group=g)
            got, want = [x], [sum(everyone)]
        elif call == "all_reduce_coalesced":
            dist.all_reduce_coalesced([x], group=g)
            got, want = [x], [sum(everyone)]
        elif call == "reduce":
            dist.reduce(x, dst=last, group=g)
            got, want = ([x], [sum(everyone)]) if rank == last else ([], [])
        elif call == "gather":
            dist.gather(x, outputs if rank == last else None, dst=last, group=g)
            got, want = (outputs, everyone) if rank == last else ([], [])
        elif call == "scatter":
            dist.scatter(x, [column(t) for t in everyone] if rank == last else None, src=last, group=g)
            got, want = [x], [everyone[rank]]
        else:
            work = dist.isend(x, dst=(rank + 1) % world_size, group=g)
            dist.recv(outputs[0], src=(rank - 1) % world_size, group=g)
            work.wait()
            got, want = outputs[:1], [everyone[rank - 1]]
    except (ValueError, RuntimeError) as e:
        assert "contiguous" in str(e)
        return
    for a, b in zip(got, want, strict=True):
        assert_bits(a, b, call)
        assert a._base[:, 1].abs().sum() == 0, "wrote between the view's elements"


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_gather_and_scatter(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    for kind in ("bf16_bits", "fp32_full", torch.int64):
        for root in range(world_size):
            parts = [torch.empty_like(data(kind, N, 0)) for _ in range(world_size)] if rank == root else None
            dist.gather(data(kind, N, rank), parts, dst=root, group=g)
            for r, part in enumerate(parts or []):
                assert_bits(part, data(kind, N, r), ("gather", kind, r))
            out = torch.empty_like(data(kind, N, 0))
            lists = [data(kind, N, root, case=j) for j in range(world_size)] if rank == root else None
            dist.scatter(out, lists, src=root, group=g)
            assert_bits(out, data(kind, N, root, case=rank), ("scatter", kind))


@pytest.mark.core
@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_send_and_receive(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    nxt, prv = (rank + 1) % world_size, (rank - 1) % world_size
    for kind in ("bf16_bits", "fp32_full", torch.int64):
        got = torch.empty_like(data(kind, N, 0))
        work = dist.isend(data(kind, N, rank), dst=nxt, group=g, tag=5)
        dist.recv(got, src=prv, group=g, tag=5)
        work.wait()
        assert_bits(got, data(kind, N, prv), kind)


@ranks(2, 3, 4)
def test_receive_from_anyone(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])
    if rank == 0:
        seen = set()
        for _ in range(world_size - 1):
            got = torch.empty(N, dtype=BF16)
            source = dist.recv(got, group=g)
            assert_bits(got, data("bf16_gauss", N, source), source)
            seen.add(source)
        assert seen == set(range(1, world_size))
    else:
        dist.send(data("bf16_gauss", N, rank), dst=0, group=g)
    dist.barrier(group=g)


# torchcomms 2551, pytorch 135338
@pytest.mark.core
@ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_ring_of_batched_sends_and_receives(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    n = 1 << 19  # 1 MiB
    nxt, prv = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.zeros(n, dtype=BF16)
    back = torch.zeros(n, dtype=BF16)
    ops = [
        dist.P2POp(dist.isend, data("bf16_gauss", n, rank), nxt, g),
        dist.P2POp(dist.irecv, got, prv, g),
        dist.P2POp(dist.isend, data("bf16_gauss", n, rank, "back"), prv, g, tag=1),
        dist.P2POp(dist.irecv, back, nxt, g, tag=1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_bits(got, data("bf16_gauss", n, prv))
    assert_bits(back, data("bf16_gauss", n, nxt, "back"))


@pytest.mark.core
@ranks(1, 2, 3, 4)
def test_objects(rank: int, world_size: int) -> None:
    for mode in MODES:
        g = group(**MODES[mode])
        mine = {"rank": rank, "text": "x" * (100 * rank), "list": [rank] * 3}
        everyone = [{"rank": r, "text": "x" * (100 * r), "list": [r] * 3} for r in range(world_size)]
        got = [None] * world_size
        dist.all_gather_object(got, mine, group=g)
        assert got == everyone
        box = [mine if rank == 0 else None, 5 if rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=g)
        assert box == [everyone[0], 5]
        collected = [None] * world_size if rank == 0 else None
        dist.gather_object(mine, collected, dst=0, group=g)
        assert rank or collected == everyone
        out = [None]
        dist.scatter_object_list(out, everyone if rank == 0 else None, src=0, group=g)
        assert out == [mine]


@pytest.mark.core
@ranks(1, 2, 4)
def test_barriers(rank: int, world_size: int) -> None:
    for mode in MODES:
        dist.barrier(group=group(**MODES[mode]))
        dist.barrier(group=group(**MODES[mode]), async_op=True).wait()


@ranks(2, 4)
def test_monitored_barrier(rank: int, world_size: int) -> None:
    """PyTorch refuses it by the backend's name before 2.14; then the refusal must be in words."""
    try:
        dist.monitored_barrier(timeout=seconds(10))
    except (ValueError, RuntimeError, NotImplementedError) as e:
        assert "monitored_barrier" in str(e) or "monitoredBarrier" in str(e)
    dist.barrier()


def barrier_with_pending_call(rank: int, world_size: int, store: dist.Store) -> float:
    init(rank, world_size, store, timeout=20, **MODES["zip"])
    dist.barrier()
    if rank == 1:
        store.wait(["refused"], seconds(20))
    out = torch.zeros(2 * N, dtype=BF16)
    work = dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank), async_op=True)
    spent = 0.0
    if rank == 0:
        started = time.monotonic()
        with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="monitored_?[bB]arrier"):
            dist.monitored_barrier(timeout=seconds(0.5))
        spent = time.monotonic() - started
        assert not work.is_completed()
        store.set("refused", "")
    work.wait()
    assert_bits(out, torch.cat([data("bf16_gauss", N, r) for r in range(2)]))
    return spent


@only_zipccl
def test_monitored_barrier_keeps_its_timeout_while_a_call_is_pending() -> None:
    """It is to find the rank that holds everyone up, so it must not wait for a call that waits for that rank."""
    ended = launch(2, barrier_with_pending_call, timeout=25)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    assert ended[0].value < 2, explain(ended)


@ranks(2, 3)
def test_coalesced_all_reduce(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])
    tensors = [small_integers(FP32, n, rank) for n in (9000, 7, 100)]
    dist.all_reduce_coalesced(tensors, group=g)
    for t, n in zip(tensors, (9000, 7, 100), strict=True):
        assert torch.equal(t, sum(small_integers(FP32, n, r) for r in range(world_size)))
    tensors = [small_integers(FP32, n, rank) for n in (9000, 7)]
    with dist._coalescing_manager(group=g):
        for t in tensors:
            dist.all_reduce(t, group=g)
    for t, n in zip(tensors, (9000, 7), strict=True):
        assert torch.equal(t, sum(small_integers(FP32, n, r) for r in range(world_size)))


@ranks(2, 3)
def test_sparse_all_reduce(rank: int, world_size: int) -> None:
    x = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (8,))
    dist.all_reduce(x, group=group(**MODES["zip"]))
    want = sum(torch.sparse_coo_tensor([[r, r + 1]], [1.0, 2.0], (8,)).to_dense() for r in range(world_size))
    assert torch.equal(x.to_dense(), want)


@ranks(2)
def test_complex_and_other_dtypes(rank: int, world_size: int) -> None:
    x = torch.complex(small_integers(FP32, 100, rank), small_integers(FP32, 100, rank + 1))
    dist.all_reduce(x, group=group(**MODES["zip"]))
    assert torch.equal(x.real, small_integers(FP32, 100, 0) + small_integers(FP32, 100, 1))
    for dtype in NATIVE:
        y = data(dtype, 257, rank)
        try:
            dist.broadcast(y, src=0, group=group(**MODES["zip"]))
        except (RuntimeError, ValueError, TypeError) as e:
            # what the wrapped backend refuses is refused in its words
            assert "Invalid scalar type" in str(e), dtype
        else:
            assert_bits(y, data(dtype, 257, 0), dtype)


@ranks(3)
def test_handed_on_calls_between_zipped_ones(rank: int, world_size: int) -> None:
    """Zipped and handed-on calls, asynchronous, in one order on every rank: neither takes the other's messages."""
    g = group(**MODES["zip"])
    works, checks = [], []
    for i in range(20):
        out = torch.zeros(world_size * 9000, dtype=BF16)
        works.append(dist.all_gather_into_tensor(out, data("bf16_gauss", 9000, rank, i), group=g, async_op=True))
        summed = small_integers(FP32, 100, rank + i)
        works.append(dist.all_reduce(summed, group=g, async_op=True))
        sent = data("bf16_gauss", 257, i % 3, i) if rank == i % 3 else torch.zeros(257, dtype=BF16)
        works.append(dist.broadcast(sent, src=i % 3, group=g, async_op=True))
        checks.append((i, out, summed, sent))
    for work in reversed(works):
        work.wait()
    for i, out, summed, sent in checks:
        assert_bits(out, torch.cat([data("bf16_gauss", 9000, r, i) for r in range(world_size)]), i)
        assert torch.equal(summed, sum(small_integers(FP32, 100, r + i) for r in range(world_size)))
        assert_number(sent, data("bf16_gauss", 257, i % 3, i))


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["integers", "floats"])
def test_average_of_mixed_dtypes(rank: int, world_size: int, first: str, mode: str) -> None:
    """Coalesced, the dtype of one tensor does not decide about the others: floats keep fractions, integers lose them
    towards zero."""

    def whole(r: int) -> torch.Tensor:
        return torch.arange(-7, 8, dtype=torch.int32) + r * r

    def real(r: int) -> torch.Tensor:
        return torch.arange(-7, 8) * 0.25 + 1.5 * r

    order = (whole, real) if first == "integers" else (real, whole)
    tensors = [make(rank) for make in order]
    with dist._coalescing_manager(group=group(**MODES[mode])):
        for t in tensors:
            dist.all_reduce(t, op=dist.ReduceOp.AVG, group=group(**MODES[mode]))
    for t, make in zip(tensors, order, strict=True):
        total = sum(make(r) for r in range(world_size))
        want = total / world_size if make is real else total.div(world_size, rounding_mode="trunc")
        assert bool((total.remainder(world_size) != 0).any()), "every mean is whole: shows nothing"
        assert_bits(t, want, (mode, make.__name__))


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, BF16])
def test_results_are_the_callers_tensors(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Also where the wrapped backend was given their bytes."""
    g, last = group(**MODES["zip"]), world_size - 1

    def check(work: dist.Work, mine: list[torch.Tensor], want: list[torch.Tensor], what: str) -> None:
        work.wait()
        for results in (work.result(), work.get_future().wait()):
            assert isinstance(results, list) and len(results) == len(mine), what
            for result, tensor, values in zip(results, mine, want, strict=True):
                assert result.data_ptr() == tensor.data_ptr(), what
                assert_bits(result, values, what)

    x = data(dtype if dtype != BF16 else "bf16_gauss", 257, rank)
    everyone = [data(dtype if dtype != BF16 else "bf16_gauss", 257, r) for r in range(world_size)]
    y = x.clone()
    check(dist.broadcast(y, src=last, group=g, async_op=True), [y], [everyone[last]], "broadcast")
    parts = [torch.zeros_like(x) for _ in range(world_size)] if rank == last else None
    work = dist.gather(x, parts, dst=last, group=g, async_op=True)
    if rank == last:
        check(work, parts, everyone, "gather")
    work.wait()
    out = torch.zeros_like(x)
    work = dist.scatter(out, everyone if rank == last else None, src=last, group=g, async_op=True)
    check(work, [out], [everyone[rank]], "scatter")


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["native", "auto"])
def test_future_of_a_reduce_scatter_holds_the_output(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    for dtype in (FP32, torch.int32):
        parts = [small_integers(dtype, 257, rank + j) for j in range(world_size)]
        want = sum(small_integers(dtype, 257, r + rank) for r in range(world_size))
        for form in ("list", "tensor"):
            out = torch.zeros(257, dtype=dtype)
            if form == "list":
                work = dist.reduce_scatter(out, parts, group=g, async_op=True)
            else:
                work = dist.reduce_scatter_tensor(out, torch.cat(parts), group=g, async_op=True)
            value = work.get_future().wait()
            assert isinstance(value, list) and [t.data_ptr() for t in value] == [out.data_ptr()], (form, dtype)
            assert_bits(value[0], want, (form, dtype))
            assert_bits(work.result()[0], want, (form, dtype))


PENDING = {
    "all_reduce": lambda g: dist.all_reduce(torch.ones(100), group=g, async_op=True),
    "reduce_scatter": lambda g: dist.reduce_scatter_tensor(torch.empty(100), torch.ones(200), group=g, async_op=True),
    "zipped": lambda g: dist.all_gather_into_tensor(torch.empty(200), torch.ones(100), group=g, async_op=True),
}


def drops_the_group_with_a_callback_pending(rank: int, world_size: int, store: dist.Store, call: str) -> None:
    init(rank, world_size, store, timeout=20)
    options = pg_options(dict(mode="zip", min_bytes=0) if call == "zipped" else dict(mode="native"))
    g = dist.new_group(backend=BACKEND, timeout=seconds(20), pg_options=options)
    backend = g._get_backend(torch.device("cpu"))
    dist.barrier()
    if rank == 1:
        time.sleep(0.7)
    future = PENDING[call](g).get_future()
    called = future.then(lambda f: f.value()[0].sum().item())
    dist.destroy_process_group(g)
    del g, future, backend  # waits for the group's threads, one of which is to run the callback
    assert called.wait() == 200
    dist.destroy_process_group()


@only_zipccl
@pytest.mark.parametrize("call", PENDING)
def test_last_reference_is_dropped_while_a_callback_is_pending(call: str) -> None:
    """Whoever drops it holds the GIL, which the callback needs."""
    ended = launch(2, drops_the_group_with_a_callback_pending, timeout=20, call=call)
    assert [(e.state, e.exitcode) for e in ended] == [("ok", 0)] * 2, explain(ended)
