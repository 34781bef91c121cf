"""Collectives of CUDA tensors: several ranks on one GPU over Gloo, and over NCCL with a GPU for each rank.

Over Gloo the bytes go through processor memory and the host waits for them; everything else is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from multirank import explain, group, init, launch, ranks, seconds
from oracle import (
    BF16,
    FP32,
    KINDS,
    REDUCTIONS,
    SPLIT_CASES,
    assert_bits,
    assert_number,
    bits,
    data,
    reduce_op,
    reduced,
    small_integers,
    splits,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zipccl

over_both = pytest.mark.parametrize("over", ["gloo", "nccl"])
SIZES = [0, 1, 257, 8193, 100_003]
N = 100_003
# A segment of the least size holds 64 Ki elements of bf16: N takes two of them, and as fp32 four.
OPTIONS: dict[str, dict[str, Any]] = {
    "zip": {},
    "raw": {"mode": "raw"},
    "segments": {"cuda_segment_bytes": 1},
    "no_inline": {"inline_fraction": 0.0},
    "checksum": {"checksum": True},
}


def place(over: str, rank: int) -> torch.device:
    """This rank's GPU, which becomes the current one."""
    device = torch.device("cuda", rank if over == "nccl" else 0)
    torch.cuda.set_device(device)
    return device


def zipped(over: str, options: str = "zip") -> dist.ProcessGroup:
    return group(**{"mode": "zip", "min_bytes": 0, "cuda_over": over, **OPTIONS[options]})


def stats_of(g: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """A call is counted when its worker is done with it, a little after its stream."""
    torch.cuda.synchronize()
    g._wait_for_pending_works()
    return zipccl.stats(g)


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


# ---- The three collectives, against what the inputs say


def gather_into_tensor(rank: int, inputs: list[torch.Tensor], g, device, async_op: bool) -> list[torch.Tensor]:
    w, x = len(inputs), inputs[rank].to(device)
    out = torch.ones(w * x.numel(), dtype=x.dtype, device=device)
    finish(dist.all_gather_into_tensor(out, x, group=g, async_op=async_op))
    return list(out.split(x.numel())) if x.numel() else [x] * w


def gather_in_place(rank: int, inputs: list[torch.Tensor], g, device, async_op: bool) -> list[torch.Tensor]:
    w, n = len(inputs), inputs[rank].numel()
    out = torch.ones(w * n, dtype=inputs[rank].dtype, device=device)
    mine = out[rank * n : (rank + 1) * n]
    mine.copy_(inputs[rank])
    finish(dist.all_gather_into_tensor(out, mine, group=g, async_op=async_op))
    return list(out.split(n)) if n else [mine] * w


def gather_list(rank: int, inputs: list[torch.Tensor], g, device, async_op: bool) -> list[torch.Tensor]:
    outputs = [torch.ones_like(x, device=device) for x in inputs]
    finish(dist.all_gather(outputs, inputs[rank].to(device), group=g, async_op=async_op))
    return outputs


def gather_strided(rank: int, inputs: list[torch.Tensor], g, device, async_op: bool) -> list[torch.Tensor]:
    tables = [torch.zeros(x.numel(), 2, dtype=x.dtype, device=device) for x in inputs]
    x = torch.zeros(inputs[rank].numel(), 3, dtype=inputs[rank].dtype, device=device)[:, 1]
    x.copy_(inputs[rank])
    finish(dist.all_gather([table[:, 1] for table in tables], x, group=g, async_op=async_op))
    for table in tables:
        assert not bits(table[:, 0]).any(), "wrote between the output's elements"
    return [table[:, 1] for table in tables]


def gather_unaligned(rank: int, inputs: list[torch.Tensor], g, device, async_op: bool) -> list[torch.Tensor]:
    w, n = len(inputs), inputs[rank].numel()
    x = torch.zeros(n + 1, dtype=inputs[rank].dtype, device=device)[1:]
    x.copy_(inputs[rank])
    out = torch.zeros(w * n + 2, dtype=x.dtype, device=device)
    finish(dist.all_gather_into_tensor(out[1:-1], x, group=g, async_op=async_op))
    assert out[0] == 0 and out[-1] == 0, "wrote beside the output"
    return list(out[1:-1].split(n)) if n else [x] * w


GATHERS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "into_tensor": gather_into_tensor,
    "in_place": gather_in_place,
    "list": gather_list,
    "strided": gather_strided,
    "unaligned": gather_unaligned,
}


def check_gather(form: str, kind: str, n: int, rank: int, w: int, g, device, async_op: bool = False) -> None:
    inputs = [data(kind, n, r) for r in range(w)]
    got = GATHERS[form](rank, inputs, g, device, async_op)
    for r in range(w):
        assert_bits(got[r].cpu(), inputs[r], (form, kind, n, "from", r))


def check_scatter(op: str, kind: str, n: int, rank: int, w: int, g, device, form: str, async_op: bool = False) -> None:
    parts = [data(kind, n, rank, case=j).to(device) for j in range(w)]
    out = torch.full_like(parts[0], 7)
    operation = reduce_op(op, rank)
    if form == "list":
        work = dist.reduce_scatter(out, parts, op=operation, group=g, async_op=async_op)
    else:
        work = dist.reduce_scatter_tensor(out, torch.cat(parts), op=operation, group=g, async_op=async_op)
    finish(work)
    want = reduced([data(kind, n, r, case=rank) for r in range(w)], op)
    assert_number(out.cpu(), want, (op, kind, n, form))


def check_exchange(kind: str, table: list[list[int]], rank: int, g, device, form: str, async_op: bool = False) -> None:
    """table[i][j] rows of 3 go from rank i to rank j."""
    w = len(table)

    def piece(sender: int, receiver: int) -> torch.Tensor:
        rows = table[sender][receiver]
        return data(kind, rows * 3, sender, case=receiver).reshape(rows, 3)

    sent = [piece(rank, j).to(device) for j in range(w)]
    want = [piece(i, rank) for i in range(w)]
    got = [torch.ones_like(x, device=device) for x in want]
    if form == "list":
        finish(dist.all_to_all(got, sent, group=g, async_op=async_op))
    else:
        rows_out, rows_in = [len(x) for x in want], [len(x) for x in sent]
        out = torch.cat(got)
        finish(dist.all_to_all_single(out, torch.cat(sent), rows_out, rows_in, group=g, async_op=async_op))
        got = list(out.split(rows_out))
    for i in range(w):
        assert_bits(got[i].cpu(), want[i], (kind, form, "from", i))


@ranks(1, 2, 4)
@over_both
@pytest.mark.parametrize("form", GATHERS)
def test_all_gather(rank: int, world_size: int, over: str, form: str) -> None:
    device = place(over, rank)
    for i, kind in enumerate(KINDS):
        for j, n in enumerate(SIZES):
            check_gather(form, kind, n, rank, world_size, zipped(over), device, async_op=bool((i + j) % 2))


@ranks(2, 4)
@over_both
def test_all_gather_of_different_sizes(rank: int, world_size: int, over: str) -> None:
    device = place(over, rank)
    for kind in KINDS:
        inputs = [data(kind, [N, 0, 8193, 7][(r + 1) % 4], r) for r in range(world_size)]
        got = gather_list(rank, inputs, zipped(over), device, async_op=False)
        for r in range(world_size):
            assert_bits(got[r].cpu(), inputs[r], (kind, r))


@ranks(1, 2, 4)
@over_both
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reduce_scatter(rank: int, world_size: int, over: str, op: str) -> None:
    device = place(over, rank)
    for i, kind in enumerate(KINDS):
        for j, n in enumerate(SIZES):
            form = ["tensor", "list"][(i + j // 2) % 2]
            check_scatter(op, kind, n, rank, world_size, zipped(over), device, form, async_op=bool((i + j) % 2))


@ranks(1, 2, 4)
@over_both
@pytest.mark.parametrize("form", ["single", "list"])
def test_all_to_all(rank: int, world_size: int, over: str, form: str) -> None:
    device = place(over, rank)
    for i, case in enumerate(SPLIT_CASES):
        for j, kind in enumerate(KINDS):
            check_exchange(kind, splits(world_size, case), rank, zipped(over), device, form, async_op=bool((i + j) % 2))


@ranks(2, 4)
@over_both
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "zip"])
def test_options(rank: int, world_size: int, over: str, options: str) -> None:
    device, g = place(over, rank), zipped(over, options)
    even = [[N // 3] * world_size] * world_size
    ragged = splits(world_size, "ragged", N // 3)
    for i, kind in enumerate(KINDS):
        async_op = bool(i % 2)
        check_gather("into_tensor", kind, N, rank, world_size, g, device, async_op)
        check_scatter("sum", kind, N, rank, world_size, g, device, "tensor", async_op)
        check_scatter("max", kind, N, rank, world_size, g, device, "list", async_op)
        check_exchange(kind, even, rank, g, device, "single", async_op)
        check_exchange(kind, ragged, rank, g, device, "list", async_op)


# ---- Escapes beyond the inline pool, and what was sent


@ranks(2, 4)
@over_both
def test_one_rank_overflows(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    for culprit in range(world_size):
        dist.barrier(group=g)
        zipccl.reset_stats(g)
        kinds = ["bf16_escapes" if r == culprit else "bf16_gauss" for r in range(world_size)]
        inputs = [data(kinds[r], N, r) for r in range(world_size)]
        got = gather_into_tensor(rank, inputs, g, device, async_op=bool(culprit % 2))
        for r in range(world_size):
            assert_bits(got[r].cpu(), inputs[r], (culprit, r))
        parts = [[data(kinds[r], N, r, case=j) for j in range(world_size)] for r in range(world_size)]
        out = torch.empty(N, dtype=BF16, device=device)
        dist.reduce_scatter_tensor(out, torch.cat(parts[rank]).to(device), group=g)
        assert_number(out.cpu(), reduced([parts[r][rank] for r in range(world_size)], "sum"), culprit)
        received = torch.empty(world_size * N, dtype=BF16, device=device)
        dist.all_to_all_single(received, torch.cat(parts[rank]).to(device), group=g)
        assert_bits(received.cpu(), torch.cat([parts[r][rank] for r in range(world_size)]), culprit)
        for name, stats in stats_of(g).items():
            if name != "barrier":
                assert (stats["dynamic_bytes"] > 0) == (rank == culprit), (name, stats)


@ranks(2)
@over_both
def test_statistics(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    n = 40 * 8192
    for kind, ratio in (("bf16_gauss", 0.72), ("fp32_low_zero", 0.36), ("fp32_full", 0.86)):
        x = data(kind, world_size * n, rank).to(device)
        dist.barrier(group=g)
        zipccl.reset_stats(g)
        out, piece = torch.empty(world_size * x.numel(), dtype=x.dtype, device=device), torch.empty_like(x[:n])
        dist.all_gather_into_tensor(out, x, group=g)
        dist.reduce_scatter_tensor(piece, x, group=g)
        dist.all_to_all_single(torch.empty_like(x), x, group=g)
        stats = stats_of(g)
        for name, elements in (("all_gather", 2 * n), ("reduce_scatter", n), ("all_to_all", n)):
            own = stats[name]
            assert (own["calls"], own["zipped"], own["raw"], own["native"]) == (1, 1, 0, 0), (name, own)
            assert own["raw_bytes"] == elements * x.element_size() and own["elements"] == elements, (name, own)
            assert own["wire_bytes"] < ratio * own["raw_bytes"], (name, kind, own)
            assert 0.02 < own["escapes"] / own["elements"] < 0.035, (name, kind, own)
            assert (own["dynamic_bytes"] > 0) == (kind == "fp32_full"), (name, kind, own)
            assert 0 < own["seconds"]["total"] < 10, (name, own)


@ranks(2)
@over_both
def test_cpu_tensors_give_the_same(rank: int, world_size: int, over: str) -> None:
    """Through the same group, in turn with CUDA tensors."""
    device, g = place(over, rank), zipped(over)
    for kind in KINDS:
        x = data(kind, 2 * N, rank)
        for op in ("sum", "avg"):
            on_cpu, on_gpu = torch.empty(N, dtype=x.dtype), torch.empty(N, dtype=x.dtype, device=device)
            dist.reduce_scatter_tensor(on_cpu, x, op=reduce_op(op), group=g)
            dist.reduce_scatter_tensor(on_gpu, x.to(device), op=reduce_op(op), group=g)
            assert_number(on_gpu.cpu(), on_cpu, (kind, op))


@ranks(2)
@over_both
def test_what_is_handed_on(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    x = small_integers(torch.int64, N, rank).to(device)
    out = torch.empty(2 * N, dtype=torch.int64, device=device)
    before = stats_of(g)
    dist.all_gather_into_tensor(out, x, group=g)
    assert torch.equal(out.cpu(), torch.cat([small_integers(torch.int64, N, r) for r in range(2)]))
    summed = x.float()
    dist.all_reduce(summed, group=g)
    assert torch.equal(summed.cpu(), sum(small_integers(FP32, N, r) for r in range(2)))
    word = torch.full((3,), float(rank), device=device)
    dist.broadcast(word, src=1, group=g)
    assert word.tolist() == [1.0] * 3
    after = stats_of(g)
    for name in ("all_gather", "all_reduce", "broadcast"):
        assert after[name]["native"] == before.get(name, {"native": 0})["native"] + 1, name


# ---- Streams and memory


@ranks(2, 4)
@over_both
@pytest.mark.parametrize("async_op", [False, True])
def test_side_streams(rank: int, world_size: int, over: str, async_op: bool) -> None:
    """What a side stream has queued before is the input, what it queues afterwards sees the output."""
    device, g = place(over, rank), zipped(over)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(9):
        kind = ("bf16_gauss", "bf16_escapes", "fp32_full")[turn % 3]
        inputs = [data(kind, N, r, case=turn) for r in range(world_size)]
        source = inputs[rank].to(device)
        stream = streams[turn % 2 if turn < 6 else 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            x = torch.empty_like(source)
            bits(x).copy_(bits(source).bitwise_not())
            out = torch.empty(world_size * N, dtype=x.dtype, device=device)
            work = dist.all_gather_into_tensor(out, x, group=g, async_op=async_op)
            finish(work)
            result = bits(out).bitwise_not().view(x.dtype)
            x.zero_()
            out.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        assert_bits(result.cpu(), torch.cat(inputs), (turn, kind))


@ranks(2, 4)
@over_both
@pytest.mark.parametrize("kind", ["bf16_gauss", "bf16_escapes", "fp32_mixed"])
def test_back_to_back(rank: int, world_size: int, over: str, kind: str) -> None:
    """Every call's input is made of the output of the call before, and the host looks at nothing until the end."""
    device, g = place(over, rank), zipped(over)
    calls = 60 if over == "nccl" else 20
    x = data(kind, N, rank).to(device)
    for _ in range(calls):
        out = torch.empty(world_size * N, dtype=x.dtype, device=device)
        dist.all_gather_into_tensor(out, x, group=g)
        x = bits(out.split(N)[(rank + 1) % world_size]).bitwise_not().view(x.dtype)
        del out
    want = data(kind, N, (rank + calls) % world_size)
    assert_bits(x.cpu(), bits(want).bitwise_not().view(want.dtype) if calls % 2 else want)


@ranks(2, 4)
@over_both
def test_asynchronous_calls_keep_their_tensors(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    kinds = ["bf16_gauss", "bf16_escapes", "fp32_full", "fp32_low_zero"]
    for turn in range(3):
        works, outputs = [], []
        for kind in kinds:
            x = data(kind, N, rank, case=turn).to(device)
            outputs.append(torch.empty(world_size * N, dtype=x.dtype, device=device))
            works.append(dist.all_gather_into_tensor(outputs[-1], x, group=g, async_op=True))
            del x
            # What the allocator would give back here is the input, if the call did not keep it.
            rubbish = [torch.full((N,), 3.0, dtype=outputs[-1].dtype, device=device) for _ in range(4)]
        for work in reversed(works):
            work.wait()
        del rubbish
        for kind, out in zip(kinds, outputs, strict=True):
            want = torch.cat([data(kind, N, r, case=turn) for r in range(world_size)])
            assert_bits(out.cpu(), want, (turn, kind))


@ranks(2)
@over_both
def test_works_and_futures(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    for kind in ("bf16_gauss", "fp32_full"):
        x = data(kind, N, rank).to(device)
        out = torch.empty(2 * N, dtype=x.dtype, device=device)
        work = dist.all_gather_into_tensor(out, x, group=g, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        want = torch.cat([data(kind, N, r) for r in range(2)])
        assert_bits(doubled.wait().cpu(), want * 2, kind)
        work.wait()
        torch.cuda.synchronize()
        g._wait_for_pending_works()
        assert work.is_completed() and work.is_success()
        assert_bits(out.cpu(), want, kind)


@ranks(2)
@over_both
def test_coalesced_calls(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    kinds = ["bf16_gauss", "bf16_escapes", "bf16_zeros"]
    inputs = [data(kind, N, rank).to(device) for kind in kinds]
    outputs = [torch.empty(2 * N, dtype=BF16, device=device) for _ in kinds]
    with _coalescing_manager(group=g, async_ops=True) as works:
        for x, out in zip(inputs, outputs, strict=True):
            dist.all_gather_into_tensor(out, x, group=g)
    works.wait()
    for kind, out in zip(kinds, outputs, strict=True):
        assert_bits(out.cpu(), torch.cat([data(kind, N, r) for r in range(2)]), kind)


@ranks(2)
@over_both
def test_functional_collectives(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    for kind in ("bf16_gauss", "fp32_full"):
        x = data(kind, 2 * N, rank).to(device)
        gathered = functional.all_gather_tensor(x, 0, g)
        assert_bits((gathered + 0).cpu(), torch.cat([data(kind, 2 * N, r) for r in range(2)]) + 0, kind)
        scattered = functional.reduce_scatter_tensor(x, "sum", 0, g)
        parts = [data(kind, 2 * N, r)[rank * N : (rank + 1) * N] for r in range(2)]
        assert_bits((scattered + 0).cpu(), reduced(parts, "sum") + 0, kind)


# DFloat11 36
@ranks(2, 4)
@pytest.mark.parametrize("over", ["nccl"])
def test_another_device_is_current(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    stream = torch.cuda.Stream(device)
    for kind in ("bf16_gauss", "bf16_escapes", "fp32_full"):
        x = data(kind, N, rank).to(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream), torch.cuda.device((rank + 1) % world_size):
            out = torch.empty(world_size * N, dtype=x.dtype, device=device)
            dist.all_gather_into_tensor(out, x, group=g)
            result = out.cpu()
            assert torch.cuda.current_device() == (rank + 1) % world_size
        assert_bits(result, torch.cat([data(kind, N, r) for r in range(world_size)]), kind)


# pytorch 102542, 104487
@ranks(1, 2, 4)
@pytest.mark.parametrize("over", ["nccl"])
def test_a_graph_holds_a_native_call(rank: int, world_size: int, over: str) -> None:
    device, g = place(over, rank), zipped(over)
    x = torch.zeros(N, dtype=BF16, device=device)
    out = torch.zeros(world_size * N, dtype=BF16, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what connects the ranks cannot be captured
        dist.all_reduce(torch.ones(1, device=device), group=g)
        dist.all_gather_into_tensor(out, x, group=g)
    torch.cuda.current_stream().wait_stream(side)
    before = stats_of(g)["all_gather"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(out, x, group=g)
    after = stats_of(g)["all_gather"]
    assert (after["native"], after["zipped"]) == (before["native"] + 1, before["zipped"])
    for replay in range(3):
        x.copy_(data("bf16_gauss", N, rank, case=replay))
        out.zero_()
        graph.replay()
        # Between replays, calls go on as ever.
        check_gather("into_tensor", "bf16_escapes", N, rank, world_size, g, device)
        assert_bits(out.cpu(), torch.cat([data("bf16_gauss", N, r, case=replay) for r in range(world_size)]), replay)
    torch.cuda.synchronize()
    graph.reset()  # before the communicator that it uses ends


# ---- Training


class Layer(nn.Module):
    """Nothing whose gradient depends on an order of atomic additions."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def trained(g: dist.ProcessGroup, rank: int, world_size: int, device: torch.device) -> list[torch.Tensor]:
    """Losses of two steps, and this rank's shards of all parameters afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(3)]).to(device)
    mesh = DeviceMesh.from_group(g, "cuda", mesh=torch.arange(world_size))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(2):
        x = data("fp32_full", 64 * 256, rank, case=step).reshape(64, 256).to(device)
        loss = (model(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return results + [parameter.to_local().detach().clone() for parameter in model.parameters()]


@ranks(2)
@over_both
def test_fsdp2_is_the_same_with_compression_on_and_off(rank: int, world_size: int, over: str) -> None:
    device = place(over, rank)
    raw = trained(zipped(over, "raw"), rank, world_size, device)
    again = trained(zipped(over, "raw"), rank, world_size, device)
    stats_of(zipped(over))
    zipccl.reset_stats(zipped(over))
    coded = trained(zipped(over), rank, world_size, device)
    for a, b in zip(raw, again, strict=True):
        assert_bits(b.cpu(), a.cpu(), "the model itself is not deterministic")
    for a, b in zip(raw, coded, strict=True):
        assert_bits(b.cpu(), a.cpu())
    stats = stats_of(zipped(over))
    for name, ratio in (("all_gather", 0.73), ("reduce_scatter", 0.5)):
        assert stats[name]["zipped"] > 0 and stats[name]["wire_bytes"] < ratio * stats[name]["raw_bytes"], stats[name]


# ---- Groups and their end: in processes of their own


def gather_once(rank: int, world_size: int, device: torch.device, kind: str, case: object = "") -> tuple:
    out = torch.empty(world_size * N, dtype=KINDS[kind], device=device)
    work = dist.all_gather_into_tensor(out, data(kind, N, rank, case).to(device), async_op=True)
    return work, out, torch.cat([data(kind, N, r, case) for r in range(world_size)])


def bound_to_a_device(rank: int, world_size: int, store: dist.Store, over: str) -> None:
    device = place(over, rank)
    options = zipccl.Options(mode="zip", min_bytes=0, cuda_over=over)
    dist.init_process_group(
        "zipccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=seconds(30),
        pg_options=options,
        device_id=device,
    )
    dist.barrier()
    work, out, want = gather_once(rank, world_size, device, "bf16_gauss")
    work.wait()
    assert_bits(out.cpu(), want)
    other = dist.new_group()
    check_gather("list", "fp32_full", N, rank, world_size, other, device)
    dist.barrier()
    dist.destroy_process_group()


def destroys_with_pending_work(rank: int, world_size: int, store: dist.Store, over: str) -> None:
    device = place(over, rank)
    init(rank, world_size, store, mode="zip", min_bytes=0, cuda_over=over)
    pending = [gather_once(rank, world_size, device, kind, i) for i in range(3) for kind in ("bf16_gauss", "fp32_full")]
    dist.destroy_process_group()
    torch.cuda.synchronize()
    for _, out, want in pending:
        assert_bits(out.cpu(), want)


def until_completed(work: dist.Work, limit: float) -> None:
    started = time.monotonic()
    while not work.is_completed():
        assert time.monotonic() - started < limit, "the call does not end"
        time.sleep(0.01)


def aborts(rank: int, world_size: int, store: dist.Store, over: str) -> None:
    """Only over NCCL, where the host does not wait: rank 1 never makes the second call."""
    device = place(over, rank)
    init(rank, world_size, store, mode="zip", min_bytes=0, cuda_over=over)
    work, out, want = gather_once(rank, world_size, device, "bf16_gauss")
    work.wait()
    assert_bits(out.cpu(), want)
    if rank == 1:
        store.wait(["done"], seconds(40))
        return
    work, _, _ = gather_once(rank, world_size, device, "bf16_gauss", "alone")
    time.sleep(0.5)
    assert not work.is_completed()
    started = time.monotonic()
    dist.group.WORLD._get_backend(device).abort()
    assert time.monotonic() - started < 10, "the abort waits for something"
    until_completed(work, 10)
    with pytest.raises(RuntimeError, match="abort"):
        work.wait()
    with pytest.raises(RuntimeError, match="abort"):
        gather_once(rank, world_size, device, "bf16_gauss")
    torch.cuda.synchronize()  # the streams go on
    store.set("done", "")


def disagrees(rank: int, world_size: int, store: dist.Store, over: str) -> str:
    """As many elements, of other dtypes, and nothing but static parts."""
    device = place(over, rank)
    init(rank, world_size, store, mode="zip", min_bytes=0, cuda_over=over)
    kind = ["bf16_gauss", "fp32_low_zero"][rank]
    out = torch.empty(2 * 40_000, dtype=KINDS[kind], device=device)
    work = dist.all_gather_into_tensor(out, data(kind, 40_000, rank).to(device), async_op=True)
    until_completed(work, 20)
    assert not work.is_success()
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    with pytest.raises(dist.DistBackendError, match="an earlier call of the group failed"):
        gather_once(rank, world_size, device, "bf16_gauss")
    torch.cuda.synchronize()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2], ids=lambda w: f"W{w}")
@over_both
@pytest.mark.parametrize("body", [bound_to_a_device, destroys_with_pending_work], ids=lambda body: body.__name__)
def test_groups_of_their_own(body: Callable, over: str, world_size: int) -> None:
    ended = launch(world_size, body, timeout=60, over=over)
    assert [(e.state, e.exitcode) for e in ended] == [("ok", 0)] * world_size, explain(ended)


@pytest.mark.parametrize("world_size", [2], ids=lambda w: f"W{w}")
@pytest.mark.parametrize("over", ["nccl"])
def test_abort_ends_a_call_that_waits_for_a_peer(over: str, world_size: int) -> None:
    ended = launch(world_size, aborts, timeout=60, over=over)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)


# NCCL itself hangs where ranks do not send what others expect.
def test_another_dtype_is_an_error_that_names_the_peer() -> None:
    ended = launch(2, disagrees, timeout=60, over="gloo")
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    for rank, e in enumerate(ended):
        assert f"rank {1 - rank} sent a corrupted message" in e.value and "dtype" in e.value, e.value
