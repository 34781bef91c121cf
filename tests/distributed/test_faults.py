"""Nothing hangs: late, dead and mistaken peers become exceptions, and every way to the end comes to an end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from multirank import BACKEND, Ended, explain, fresh_group, init, launch, only_zipccl, pg_options, ranks, seconds
from oracle import BF16, FP32, assert_bits, data

ZIP = dict(mode="zip", min_bytes=0)
N = 100_003

pytestmark = only_zipccl


def gather(rank: int, world_size: int, case: object = "", g: dist.ProcessGroup | None = None, n: int = N) -> None:
    out = torch.zeros(world_size * n, dtype=BF16)
    dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank, case), group=g)
    assert_bits(out, torch.cat([data("bf16_gauss", n, r, case) for r in range(world_size)]), case)


def refused(call, *words: str) -> str:
    """The words of the exception that `call` raises, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        assert not isinstance(e, AssertionError), text
        for word in words:
            assert word.lower() in text.lower(), text
        assert time.monotonic() - started < 25, f"took {time.monotonic() - started:.1f} s"
        return text
    raise AssertionError("nothing was raised")


# ------------------------------------------------------------------------------------------- peers that are not there


CALLS = {
    "all_gather": lambda w: dist.all_gather_into_tensor(torch.empty(w * N, dtype=BF16), torch.ones(N, dtype=BF16)),
    "reduce_scatter": lambda w: dist.reduce_scatter_tensor(torch.empty(N), torch.ones(w * N)),
    "all_to_all": lambda w: dist.all_to_all_single(torch.empty(w * N), torch.ones(w * N)),
    "all_reduce": lambda w: dist.all_reduce(torch.ones(N)),
    "coalesced": lambda w: coalesced(w),
}


def coalesced(w: int) -> None:
    with dist._coalescing_manager():
        for _ in range(2):
            dist.all_gather_into_tensor(torch.empty(w * N, dtype=BF16), torch.ones(N, dtype=BF16))


# pytorch 132696, 192105
def never_joins(rank: int, world_size: int, store: dist.Store, call: str, mode: str) -> float:
    init(rank, world_size, store, timeout=3, mode=mode, min_bytes=0)
    dist.barrier()
    if rank == world_size - 1:
        store.wait(["done"], seconds(40))  # alive, and never joins the call
        return 0.0
    started = time.monotonic()
    refused(lambda: CALLS[call](world_size))
    waited = time.monotonic() - started
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 20
    if store.add("ended", 1) == world_size - 1:
        store.set("done", "")
    return waited


@pytest.mark.core
@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_peer_that_never_joins(call: str) -> None:
    ended = launch(2, never_joins, call=call, mode="zip")
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    assert 2 < ended[0].value < 10, explain(ended)


@pytest.mark.parametrize("call", CALLS)
def test_one_of_three_never_joins(call: str) -> None:
    ended = launch(3, never_joins, call=call, mode="zip" if call != "all_to_all" else "raw")
    assert [e.state for e in ended] == ["ok"] * 3, explain(ended)


def exception_leaves(rank: int, world_size: int, store: dist.Store) -> None:
    init(rank, world_size, store, timeout=3, **ZIP)
    if rank == 1:
        time.sleep(6)
        os._exit(0)
    gather(rank, world_size)


def test_an_exception_alone_decides_the_exit_code() -> None:
    ended = launch(2, exception_leaves)
    assert ended[0].state == "failed" and ended[0].exitcode == 1, explain(ended)
    assert ended[0].seconds < 25


# a real interpreter with a real end: threads that outlive it would crash or hang here
SCRIPT = """
import datetime, os, sys, time, torch, torch.distributed as dist, zipccl
rank = int(os.environ["RANK"])
options = zipccl.Options(mode="zip", min_bytes=0)
dist.init_process_group("zipccl", timeout=datetime.timedelta(seconds=4), pg_options=options)
x = torch.full((100000,), rank + 1.0, dtype=torch.bfloat16)
out = torch.empty(200000, dtype=torch.bfloat16)
dist.all_gather_into_tensor(out, x)
assert out[0] == 1 and out[-1] == 2
{body}
"""

ENDS = {
    # name: (script, exit codes)
    "without_destroy": ("raise SystemExit(7)", (7, 7)),
    "pending_work": ("works = [dist.all_gather_into_tensor(out, x, async_op=True) for _ in range(50)]", (0, 0)),
    "peer_never_joins": (
        "if rank == 0: dist.all_gather_into_tensor(out, x)\ntime.sleep(6)",
        (1, 0),
    ),
    "work_pending_on_a_peer_that_never_joins": (
        "if rank == 0: work = dist.all_gather_into_tensor(out, x, async_op=True)\nelse: time.sleep(1)",
        (0, 0),
    ),
    # the abort drops the last reference to the group, while its worker waits for rank 1
    "abort_while_a_call_runs": (
        "if rank == 0:\n"
        "    work = dist.all_gather_into_tensor(out, x, async_op=True)\n"
        "    time.sleep(0.3)\n"
        "    dist.distributed_c10d._abort_process_group()\n"
        "else: time.sleep(1)",
        (0, 0),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_process_ends(end: str, tmp_path: Path) -> None:
    body, codes = ENDS[end]
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(body=body))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port), WORLD_SIZE="2")
    env.update(TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    running = [
        subprocess.Popen(
            [sys.executable, str(script)], env=dict(env, RANK=str(r)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for r in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=60)[0].decode() for p in running]
    finally:
        for p in running:
            p.kill()
            p.wait()
    assert tuple(p.returncode for p in running) == codes, "\n".join(outputs)
    for text in outputs:
        assert "terminate called" not in text and "Fatal" not in text, text


@pytest.mark.core
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(SCRIPT.format(body="dist.destroy_process_group()\nprint('rank', rank, 'is done')"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is done") == 2, done.stdout


def dies(rank: int, world_size: int, store: dist.Store, call: str, when: str) -> str:
    init(rank, world_size, store, timeout=8, **ZIP)
    gather(rank, world_size)
    if rank == world_size - 1:
        if when == "inside":  # posts its part of a long exchange, and dies while it is under way
            out = torch.empty(world_size << 26, dtype=BF16)
            dist.all_gather_into_tensor(out, torch.ones(1 << 26, dtype=BF16), async_op=True)
            time.sleep(0.05)
        os._exit(3)
    if when == "inside":
        out = torch.empty(world_size << 26, dtype=BF16)
        text = refused(lambda: dist.all_gather_into_tensor(out, torch.ones(1 << 26, dtype=BF16)))
    else:
        text = refused(lambda: CALLS[call](world_size))
    # the next call fails too, in time
    refused(lambda: CALLS[call](world_size))
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 20
    return text


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_peer_that_dies(world_size: int, when: str) -> None:
    for call in ("all_gather",) if when == "inside" else ("all_gather", "reduce_scatter", "all_to_all"):
        ended = launch(world_size, dies, call=call, when=when)
        assert [e.state for e in ended] == ["ok"] * (world_size - 1) + ["died"], explain(ended)
        assert ended[-1].exitcode == 3


def destroys_with_pending_work(rank: int, world_size: int, store: dist.Store, how: str) -> None:
    init(rank, world_size, store, timeout=6, **ZIP)
    x = data("bf16_gauss", 1 << 20, rank)
    outs = [torch.empty(world_size << 20, dtype=BF16) for _ in range(12)]
    if how == "all_ranks":
        works = [dist.all_gather_into_tensor(out, x, async_op=True) for out in outs]
    elif rank == 0:  # nobody answers
        works = [dist.all_gather_into_tensor(out, x, async_op=True) for out in outs]
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 20
    if rank == 0 or how == "all_ranks":
        for work in works:  # done or failed, not pending
            try:
                work.wait(seconds(10))
            except RuntimeError:
                continue
        del works


@pytest.mark.parametrize("how", ["all_ranks", "rank_0_alone"])
def test_destroy_with_pending_work(how: str) -> None:
    ended = launch(2, destroys_with_pending_work, how=how)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    assert all(e.exitcode == 0 for e in ended), explain(ended)


def aborts(rank: int, world_size: int, store: dist.Store) -> str:
    init(rank, world_size, store, timeout=30, **ZIP)
    gather(rank, world_size)
    if rank == 1:
        store.wait(["done"], seconds(40))
        return ""
    work = dist.all_gather_into_tensor(torch.empty(2 * N, dtype=BF16), torch.ones(N, dtype=BF16), async_op=True)
    started = time.monotonic()
    dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    text = refused(work.wait)
    assert time.monotonic() - started < 10, "abort does not wait for the timeout"
    store.set("done", "")
    return text


def test_abort_ends_pending_work() -> None:
    ended = launch(2, aborts)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)


def aborts_inside(rank: int, world_size: int, store: dist.Store, how: str) -> None:
    init(rank, world_size, store, timeout=30, **ZIP)
    gather(rank, world_size)
    if rank == 1:
        store.wait(["done"], seconds(40))
        return
    works = [
        dist.all_gather_into_tensor(torch.empty(2 * N, dtype=BF16), torch.ones(N, dtype=BF16), async_op=True)
        for _ in range(2)
    ]
    time.sleep(0.3)  # the worker waits for the peer inside the first call, the second is queued
    started = time.monotonic()
    if how == "abort_process_group":
        dist.distributed_c10d._abort_process_group()
    elif how == "group_abort":
        dist.group.WORLD.abort()
    else:
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
    assert time.monotonic() - started < 1, "the abort waits for something"
    for work in works:
        refused(work.wait, "abort")
    assert time.monotonic() - started < 2, f"the calls ended {time.monotonic() - started:.1f} s after the abort"
    store.set("done", "")


@pytest.mark.parametrize("how", ["abort_process_group", "group_abort", "backend_abort"])
def test_abort_ends_a_call_that_already_waits_for_a_peer(how: str) -> None:
    ended = launch(2, aborts_inside, timeout=20, how=how)
    assert [(e.state, e.exitcode) for e in ended] == [("ok", 0)] * 2, explain(ended)


def destroys_inside(rank: int, world_size: int, store: dist.Store) -> None:
    init(rank, world_size, store, timeout=20, **ZIP)
    gather(rank, world_size)
    if rank == 1:
        time.sleep(0.8)
    out = torch.zeros(2 * N, dtype=BF16)
    work = dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank, "late"), async_op=True)
    if rank == 0:
        time.sleep(0.3)
        assert not work.is_completed()
    dist.destroy_process_group()
    work.wait()
    assert_bits(out, torch.cat([data("bf16_gauss", N, r, "late") for r in range(2)]))


def test_destroy_finishes_a_call_that_already_waits_for_a_peer() -> None:
    ended = launch(2, destroys_inside, timeout=25)
    assert [(e.state, e.exitcode) for e in ended] == [("ok", 0)] * 2, explain(ended)


def again(rank: int, world_size: int, store: dist.Store) -> None:
    for i in range(4):
        init(rank, world_size, dist.PrefixStore(f"again{i}", store), **ZIP)
        gather(rank, world_size, i)
        dist.destroy_process_group()
    with pytest.raises((ValueError, RuntimeError)):
        gather(rank, world_size)


@pytest.mark.core
def test_init_and_destroy_again_and_again() -> None:
    ended = launch(2, again)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)


def set_timeout(rank: int, world_size: int, store: dist.Store) -> float:
    init(rank, world_size, store, timeout=300, **ZIP)
    gather(rank, world_size)
    g = dist.group.WORLD
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(seconds(3), g)
    else:
        g._get_backend(torch.device("cpu"))._set_default_timeout(seconds(3))
    if rank == 1:
        store.wait(["done"], seconds(40))
        return 0.0
    started = time.monotonic()
    refused(lambda: CALLS["all_gather"](2))
    store.set("done", "")
    return time.monotonic() - started


def test_timeout_that_was_set_later() -> None:
    ended = launch(2, set_timeout)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    assert 2 < ended[0].value < 8


def late_but_in_time(rank: int, world_size: int, store: dist.Store) -> None:
    init(rank, world_size, store, timeout=8, **ZIP)
    for i in range(2):
        if rank == i:
            time.sleep(3)
        gather(rank, world_size, i)
    dist.destroy_process_group()


def test_a_peer_that_is_late_but_in_time() -> None:
    ended = launch(2, late_but_in_time)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)


# -------------------------------------------------------------------------------------------- peers that are mistaken


def mistaken(rank: int, world_size: int, store: dist.Store, case: str) -> str:
    init(rank, world_size, store, timeout=4, **ZIP)
    gather(rank, world_size)
    odd = rank == world_size - 1
    w = world_size

    def all_gather() -> None:
        if case == "dtype":  # as many bytes on every rank
            dtype, n = (FP32, N) if odd else (BF16, 2 * N)
        elif case == "numel":
            dtype, n = BF16, N + 9000 * odd
        elif case == "numel_within_a_chunk":
            dtype, n = BF16, N + odd
        elif case == "dtype_fp16":
            dtype, n = (torch.float16 if odd else BF16), N
        dist.all_gather_into_tensor(torch.empty(w * n, dtype=dtype), torch.ones(n, dtype=dtype))

    def reduce_scatter() -> None:
        if case == "reduce_dtype":
            dtype, n, op = (FP32 if odd else BF16), N, dist.ReduceOp.SUM
        elif case == "reduce_numel":
            dtype, n, op = FP32, N + 9000 * odd, dist.ReduceOp.SUM
        elif case == "reduce_op":
            dtype, n, op = FP32, N, dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        dist.reduce_scatter_tensor(torch.empty(n, dtype=dtype), torch.ones(w * n, dtype=dtype), op=op)

    def other_collective() -> None:
        if odd:
            dist.reduce_scatter_tensor(torch.empty(N, dtype=BF16), torch.ones(w * N, dtype=BF16))
        else:
            dist.all_gather_into_tensor(torch.empty(w * N, dtype=BF16), torch.ones(N, dtype=BF16))

    call = all_gather
    if case.startswith("reduce"):
        call = reduce_scatter
    if case == "collective":
        call = other_collective
    text = refused(call)
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 20
    return text


# pytorch 174844, nccl 1417
@pytest.mark.core
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "case",
    ["dtype", "numel", "numel_within_a_chunk", "reduce_dtype", "reduce_numel", "reduce_op", "collective", "dtype_fp16"],
)
def test_ranks_disagree_about_a_call(case: str, world_size: int) -> None:
    ended = launch(world_size, mistaken, case=case)
    assert [e.state for e in ended] == ["ok"] * world_size, explain(ended)
    if case != "dtype_fp16":  # there one rank waits in our exchange, the other in the wrapped backend's
        assert any(names_the_cause(e) for e in ended), explain(ended)
    assert all(e.seconds < 30 for e in ended)


def names_the_cause(e: Ended) -> bool:
    """The collective and the peer."""
    text = str(e.value).lower()
    return "zipccl" in text and "rank" in text and any(op in text for op in ("gather", "reduce", "all_to_all"))


@ranks(2, 3)
def test_an_all_to_all_pair_that_disagrees_leaves_the_group_usable(rank: int, world_size: int) -> None:
    """The last rank expects a row more from rank 0 than it sends. Both are told, or the receiver is; then all go on."""
    with fresh_group(**ZIP) as g:
        rows = [[9000 + 10 * i + j for j in range(world_size)] for i in range(world_size)]
        n_in, n_out = rows[rank], [rows[i][rank] for i in range(world_size)]
        odd = rank == world_size - 1
        if odd:
            n_out[0] += 1
        x = torch.cat([data("bf16_gauss", n, rank, j) for j, n in enumerate(n_in)])
        out = torch.zeros(sum(n_out), dtype=BF16)

        def call() -> None:
            dist.all_to_all_single(out, x, n_out, n_in, group=g)

        if odd:
            text = refused(call, "zipccl", "rank 0")
            assert str(n_out[0]) in text and str(n_out[0] - 1) in text, text
        else:
            try:
                call()
            except RuntimeError as e:
                assert "zipccl" in str(e)
        for i in range(3):
            gather(rank, world_size, i, g)


@ranks(2, 3)
def test_an_all_to_all_pair_of_other_dtypes(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        odd = rank == world_size - 1
        dtype, n = (FP32, 9000) if odd else (BF16, 18000)  # as many bytes
        x = torch.ones(world_size * n, dtype=dtype)
        refused(lambda: dist.all_to_all_single(torch.empty_like(x), x, group=g), "zipccl")
        for i in range(3):
            gather(rank, world_size, i, g)


@ranks(2)
def test_small_and_large_beside_each_other(rank: int, world_size: int) -> None:
    """All-to-all with one pair below min_bytes and one above: each side decides alone, from sizes both know."""
    with fresh_group(mode="zip", min_bytes=20000) as g:
        rows = [[10, 30000], [9999, 10000]]
        n_in, n_out = rows[rank], [rows[i][rank] for i in range(2)]
        x = torch.cat([data("bf16_gauss", n, rank, j) for j, n in enumerate(n_in)])
        out = torch.zeros(sum(n_out), dtype=BF16)
        dist.all_to_all_single(out, x, n_out, n_in, group=g)
        assert_bits(out, torch.cat([data("bf16_gauss", n, i, rank) for i, n in enumerate(n_out)]))


@ranks(2)
def test_wrong_use_of_points_to_point(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        refused(lambda: dist.send(torch.ones(4), dst=rank, group=g))
        refused(lambda: dist.P2POp(dist.all_reduce, torch.ones(4), 0, g))
        gather(rank, world_size, "", g)


@ranks(2)
def test_lists_of_more_than_one_tensor_per_rank_are_refused(rank: int, world_size: int) -> None:
    """What only several GPUs per process once needed."""
    with fresh_group(**ZIP) as g:
        backend = g._get_backend(torch.device("cpu"))
        x = torch.ones(9000, dtype=BF16)
        outs = [[torch.empty_like(x) for _ in range(2)] for _ in range(2)]
        refused(lambda: backend.allgather(outs, [x, x], dist.AllgatherOptions()).wait())
        refused(lambda: backend.reduce_scatter([x, x], outs, dist.ReduceScatterOptions()).wait())
        gather(rank, world_size, "", g)


def one_rank_leaves_a_group(rank: int, world_size: int, store: dist.Store) -> None:
    init(rank, world_size, store, timeout=8, **ZIP)
    sub = dist.new_group([0, 1], backend=BACKEND, timeout=seconds(4), pg_options=pg_options(ZIP))
    gather(rank, world_size, "world")
    if rank < 2:
        gather(rank, 2, "sub", sub)
    if rank == 1:
        dist.destroy_process_group(sub)  # rank 0 goes on for a while
    if rank == 0:
        refused(lambda: gather(rank, 2, "sub", sub))
        dist.destroy_process_group(sub)
    gather(rank, world_size, "world goes on")
    dist.destroy_process_group()


def test_a_group_that_one_rank_has_left() -> None:
    ended = launch(3, one_rank_leaves_a_group)
    assert [e.state for e in ended] == ["ok"] * 3, explain(ended)


# -------------------------------------------------------------------------------------- messages that are damaged

ELEMENTS = 8192  # one chunk
HELLO, HEADER, BODY = 56, 64, 128  # sizes of hello and message header, and where the only body begins
STATIC = BODY + 11264 + 384  # ... and the inline pool: 8192 / 24 bytes, rounded up to a multiple of 128

DAMAGE = {
    # name: (part, offset, new byte or None for other bits, checksum, words of the error)
    "chunk_mode": ("static", HEADER + 3, 3, False, ["chunk 0", "mode 3"]),
    "chunk_elements": ("static", HEADER + 1, 0, False, ["chunk 0", "elements"]),
    "escape_end": ("static", HEADER + 31, 0xFF, False, ["chunk 0", "escapes"]),
    "body": ("static", BODY + 5000, None, True, ["checksum"]),
    "hello": ("hello", 0, None, False, ["version"]),
    "message_header": ("static", 0, None, False, ["begin"]),
}
EXCHANGED = {
    "all_gather": lambda g, x: dist.all_gather_into_tensor(torch.empty(2 * ELEMENTS, dtype=BF16), x, group=g),
    "reduce_scatter": lambda g, x: dist.reduce_scatter_tensor(torch.empty_like(x), torch.cat([x, x]), group=g),
    "all_to_all": lambda g, x: dist.all_to_all_single(torch.empty(2 * ELEMENTS, dtype=BF16), x.repeat(2), group=g),
}


def answer_with_damage(g: dist.ProcessGroup, peer: int, damaged: str, offset: int, byte: int | None) -> None:
    """Takes part in a call of equal sizes by sending the peer's own messages back, one of them damaged."""
    from zipccl.backend import backend_of

    wire = backend_of(g).exchange_backend
    for tag, (part, size) in enumerate([("hello", HELLO), ("static", STATIC)]):
        message = torch.zeros(size, dtype=torch.uint8)
        wire.recv([message], peer, tag).wait()
        if part == damaged:
            message[offset] = message[offset] ^ 0x55 if byte is None else byte
        wire.send([message], peer, tag).wait()
        if part == damaged == "hello":
            return  # the peer sends no more


@ranks(2)
@pytest.mark.parametrize("collective", EXCHANGED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_message_is_an_error_that_names_its_place(
    rank: int, world_size: int, damage: str, collective: str
) -> None:
    part, offset, byte, checksum, words = DAMAGE[damage]
    usable = damage != "message_header"  # without it, nobody knows what follows
    with fresh_group(checksum=checksum, **ZIP) as g:
        x = data("bf16_gauss", ELEMENTS, rank)
        for victim in range(2 if usable else 1):  # both have made one call then
            if rank == victim:
                refused(lambda: EXCHANGED[collective](g, x), collective, f"rank {1 - rank}", *words)
            else:
                answer_with_damage(g, victim, part, offset, byte)
        if usable:
            gather(rank, world_size, "afterwards", g)
        elif rank == 0:
            started = time.monotonic()
            refused(lambda: EXCHANGED[collective](g, x), "earlier call", "rank 1", *words)
            assert time.monotonic() - started < 1
