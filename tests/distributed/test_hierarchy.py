"""Hosts: the order of sums, and the way inside each host first and then between hosts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from multirank import explain, fresh_group, group, init, launch, only_zipccl, ranks
from oracle import (
    BF16,
    FP32,
    KINDS,
    REDUCTIONS,
    assert_bits,
    assert_number,
    data,
    reduce_op,
    reduced,
)

zipccl = pytest.importorskip("zipccl")
from zipccl.backend import backend_of  # noqa: E402

pytestmark = only_zipccl

LARGE = 3 * 8192 + 777
LAYOUTS = {  # ranks of each host
    "2+2": [[0, 1], [2, 3]],
    "interleaved": [[0, 2], [1, 3]],
    "3+1": [[0, 1, 2], [3]],
    "1+2+1": [[0], [1, 2], [3]],
}
SYMMETRIC = ["2+2", "interleaved"]
MODES = ["raw", "zip", "hierarchical"]


def on_hosts(rank: int, layout: str, **options) -> dist.ProcessGroup:
    (host,) = (i for i, host in enumerate(LAYOUTS[layout]) if rank in host)
    return group(host=f"{host} of {layout}", **dict(dict(min_bytes=0), **options))


def contributions(kind: str, n: int, receiver: int) -> list[torch.Tensor]:
    return [data(kind, n, sender, case=receiver) for sender in range(4)]


def scatter(kind: str, n: int, op: str, rank: int, g: dist.ProcessGroup) -> torch.Tensor:
    out = torch.full((n,), 7, dtype=KINDS[kind])
    x = torch.cat([data(kind, n, rank, case=j) for j in range(4)])
    dist.reduce_scatter_tensor(out, x, op=reduce_op(op, rank), group=g)
    return out


@pytest.mark.core
@ranks(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_are_accumulated_host_by_host(rank: int, world_size: int, layout: str, mode: str) -> None:
    g = on_hosts(rank, layout, mode=mode)
    assert backend_of(g).hosts == LAYOUTS[layout]
    for op in REDUCTIONS:
        for kind in KINDS:
            for n in (1, 257, LARGE):
                want = reduced(contributions(kind, n, rank), op, LAYOUTS[layout])
                assert_number(scatter(kind, n, op, rank, g), want, (op, kind, n))


def test_the_order_matters() -> None:
    """Or else the test above shows nothing."""
    inputs = contributions("fp32_full", LARGE, 0)
    flat, by_host = (reduced(inputs, "sum", hosts) for hosts in (None, LAYOUTS["2+2"]))
    assert not torch.equal(flat, by_host)
    assert not torch.equal(by_host, reduced(inputs, "sum", LAYOUTS["interleaved"]))


@ranks(4)
@pytest.mark.parametrize("layout", SYMMETRIC)
def test_all_ways_are_bit_identical(rank: int, world_size: int, layout: str) -> None:
    """Also in which NaN a sum keeps."""
    for op in REDUCTIONS:
        for kind in KINDS:
            results = [scatter(kind, LARGE, op, rank, on_hosts(rank, layout, mode=mode)) for mode in MODES]
            for mode, result in zip(MODES, results, strict=True):
                assert_bits(result, results[0], (op, kind, mode))
            x = data(kind, LARGE, rank)
            reductions = []
            for mode in MODES:
                y = x.clone()
                dist.all_reduce(y, op=reduce_op(op, rank), group=on_hosts(rank, layout, mode=mode))
                reductions.append(y)
                assert_bits(y, reductions[0], (op, kind, mode))
            want = reduced([data(kind, LARGE, r) for r in range(4)], op, LAYOUTS[layout])
            assert_number(reductions[0], want, (op, kind))


@pytest.mark.core
@ranks(4)
@pytest.mark.parametrize("layout", SYMMETRIC)
def test_all_gather(rank: int, world_size: int, layout: str) -> None:
    g = on_hosts(rank, layout, mode="hierarchical")
    for kind in KINDS:
        for n in (1, 257, LARGE):
            out = torch.zeros(4 * n, dtype=KINDS[kind])
            dist.all_gather_into_tensor(out, data(kind, n, rank), group=g)
            assert_bits(out, torch.cat([data(kind, n, r) for r in range(4)]), (kind, n))
            mine = out.chunk(4)[rank]  # FSDP2's input is a view into its output
            out.view(4, n)[:rank] = 0
            out.view(4, n)[rank + 1 :] = 0
            dist.all_gather_into_tensor(out, mine, group=g)
            assert_bits(out, torch.cat([data(kind, n, r) for r in range(4)]), (kind, n, "in place"))


@pytest.mark.core
@ranks(4)
def test_several_segments(rank: int, world_size: int) -> None:
    """More than are in flight, the last one short, and beside each other in one coalesced call."""
    for layout in SYMMETRIC:
        g = on_hosts(rank, layout, mode="hierarchical", segment_bytes=1)
        for kind in ("bf16_gauss", "bf16_escapes", "fp32_low_zero", "fp32_full"):
            n = 5 * (128 << 10) // KINDS[kind].itemsize + 333
            want = reduced(contributions(kind, n, rank), "sum", LAYOUTS[layout])
            assert_number(scatter(kind, n, "sum", rank, g), want, kind)
            out = torch.zeros(4 * n, dtype=KINDS[kind])
            dist.all_gather_into_tensor(out, data(kind, n, rank), group=g)
            assert_bits(out, torch.cat([data(kind, n, r) for r in range(4)]), kind)
            x = data(kind, n, rank)
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=g)
            assert_number(x, reduced([data(kind, n, r) for r in range(4)], "avg", LAYOUTS[layout]), kind)


@ranks(4)
def test_parts_of_different_sizes(rank: int, world_size: int) -> None:
    g = on_hosts(rank, "2+2", mode="hierarchical", segment_bytes=1)
    for sizes in ([0, 5, 100_000, 300_000], [300_000, 0, 0, 1], [0, 0, 0, 0], [70_000, 80_000, 90_000, 0]):
        gathered = [torch.zeros(n, dtype=BF16) for n in sizes]
        dist.all_gather(gathered, data("bf16_gauss", sizes[rank], rank), group=g)
        for r, n in enumerate(sizes):
            assert_bits(gathered[r], data("bf16_gauss", n, r), (sizes, r))
        out = torch.zeros(sizes[rank], dtype=BF16)
        parts = [data("bf16_gauss", n, rank, case=j) for j, n in enumerate(sizes)]
        dist.reduce_scatter(out, parts, group=g)
        assert_bits(out, reduced(contributions("bf16_gauss", sizes[rank], rank), "sum", LAYOUTS["2+2"]), sizes)


@ranks(4)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_partial_sums_in_bf16(rank: int, world_size: int, op: str) -> None:
    """One more rounding for each host; sums of fp32 values stay in fp32."""
    for layout in SYMMETRIC:
        g = on_hosts(rank, layout, mode="hierarchical", bf16_partial_sums=True, segment_bytes=1)
        for kind in KINDS:
            n = 100_001
            partial = BF16 if KINDS[kind] == BF16 else FP32
            want = reduced(contributions(kind, n, rank), op, LAYOUTS[layout], partial)
            assert_number(scatter(kind, n, op, rank, g), want, (layout, kind))


@pytest.mark.core
@ranks(4)
def test_each_part_crosses_the_network_once(rank: int, world_size: int) -> None:
    n = 200_000

    def crossing(call: str, kind: str, **options) -> float:
        """Bytes an element of a rank's part to other hosts."""
        g = on_hosts(rank, "2+2", **options)
        zipccl.reset_stats(g)
        if call == "reduce_scatter":
            scatter(kind, n, "sum", rank, g)
        else:
            out = torch.empty(4 * n, dtype=KINDS[kind])
            dist.all_gather_into_tensor(out, data(kind, n, rank), group=g)
        entry = zipccl.stats(g)[call]
        assert 0 < entry["local_bytes"] < entry["wire_bytes"]
        return (entry["wire_bytes"] - entry["local_bytes"]) / n

    assert 2.6 < crossing("all_gather", "bf16_gauss", mode="zip") < 2.9
    assert 1.3 < crossing("all_gather", "bf16_gauss", mode="hierarchical") < 1.45
    for kind in ("bf16_gauss", "fp32_low_zero"):
        assert 2.6 < crossing("reduce_scatter", kind, mode="zip") < 2.95
        assert 3.3 < crossing("reduce_scatter", kind, mode="hierarchical") < 3.5
    assert 1.3 < crossing("reduce_scatter", "bf16_gauss", mode="hierarchical", bf16_partial_sums=True) < 1.45


@ranks(2, 3, 4)
def test_without_a_hierarchy_the_way_is_direct(rank: int, world_size: int) -> None:
    """All on one host, each on its own, or not as many on each."""
    for name in ("same", f"own {rank}", f"uneven {rank // 3}"):
        g = group(mode="hierarchical", host=name, min_bytes=0)
        zipccl.reset_stats(g)
        out = torch.zeros(world_size * 1000, dtype=BF16)
        dist.all_gather_into_tensor(out, data("bf16_gauss", 1000, rank), group=g)
        assert_bits(out, torch.cat([data("bf16_gauss", 1000, r) for r in range(world_size)]), name)
        (decision,) = zipccl.stats(g)["all_gather"]["decisions"]
        assert (decision["route"], decision["calls"]) == ("zip", 1)
        assert "no hierarchy" in decision["reason"]


@ranks(2)
def test_ranks_on_one_machine_share_a_host(rank: int, world_size: int) -> None:
    with fresh_group() as g:
        assert backend_of(g).hosts == [[0, 1]]


def host_by_variable(rank: int, world_size: int, store: dist.Store) -> list[list[int]]:
    os.environ["ZIPCCL_HOST"] = f"machine {rank % 2}"
    init(rank, world_size, store)
    hosts = backend_of().hosts
    with fresh_group([0, 2]) as g:  # groups that are made later are on the same hosts
        if rank % 2 == 0:
            assert backend_of(g).hosts == [[0, 1]]
    dist.destroy_process_group()
    return hosts


def test_hosts_from_the_environment() -> None:
    ended = launch(3, host_by_variable)
    assert [e.value for e in ended] == [[[0, 2], [1]]] * 3, explain(ended)


# ------------------------------------------------------------------------------------------------------------- faults


def disagree(rank: int, world_size: int, store: dist.Store, odd: int, case: str) -> list[str]:
    """One rank calls something else; all are told, and the group goes on."""
    init(rank, world_size, store, timeout=6, mode="hierarchical", min_bytes=0, host=f"host {rank // 2}")
    n = 300_000
    dtype = FP32 if case == "dtype" and rank == odd else BF16
    mine = n + 9000 if case == "numel" and rank == odd else n
    op = dist.ReduceOp.MAX if case == "op" and rank == odd else dist.ReduceOp.SUM
    texts = []
    for call in (
        lambda: dist.all_gather_into_tensor(torch.empty(4 * mine, dtype=dtype), torch.ones(mine, dtype=dtype)),
        lambda: dist.reduce_scatter_tensor(torch.empty(mine, dtype=dtype), torch.ones(4 * mine, dtype=dtype), op=op),
        lambda: dist.all_reduce(torch.ones(4 * mine, dtype=dtype), op=op),
    ):
        try:
            call()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
        for i in range(2):
            x = data("bf16_gauss", n, rank, i)
            dist.all_reduce(x)
            assert_bits(x, reduced([data("bf16_gauss", n, r, i) for r in range(4)], "sum", LAYOUTS["2+2"]))
    dist.destroy_process_group()
    return texts


@pytest.mark.core
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("case", ["numel", "dtype", "op"])
def test_ranks_disagree_about_a_call(case: str, odd: int) -> None:
    ended = launch(4, disagree, odd=odd, case=case)
    assert [e.state for e in ended] == ["ok"] * 4, explain(ended)
    for rank, e in enumerate(ended):
        for call, text in enumerate(e.value):
            if case == "op" and call == 0:
                assert text == ""  # a gather has no operation
            else:
                assert "zipccl" in text and f"rank {0 if rank == odd == 3 else odd}" in text, (rank, call, text)


def dies(rank: int, world_size: int, store: dist.Store, victim: int) -> str:
    init(rank, world_size, store, timeout=6, mode="hierarchical", min_bytes=0, host=f"host {rank // 2}")
    x = torch.ones(4 * 300_000, dtype=BF16)
    dist.all_reduce(x)
    if rank == victim:
        os._exit(3)
    with pytest.raises(RuntimeError) as failure:
        for _ in range(3):
            dist.all_reduce(x)
    return str(failure.value)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_peer_that_dies(victim: int) -> None:
    ended = launch(4, dies, victim=victim, timeout=30)
    for rank, e in enumerate(ended):
        assert e.state == ("died" if rank == victim else "ok"), explain(ended)
        assert rank == victim or "zipccl all_reduce" in e.value, e.value
        assert e.seconds < 25


def damaged_between_hosts(rank: int, world_size: int, store: dist.Store) -> str:
    """Rank 2 sends rank 0 a message whose checksum is wrong; rank 1 gets it from rank 0, and must not take it."""
    init(rank, world_size, store, timeout=6, mode="hierarchical", min_bytes=0, checksum=True, host=f"host {rank // 2}")
    n = 8192
    out = torch.empty(4 * n, dtype=BF16)
    if rank != 2:
        try:
            dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank))
        except (RuntimeError, ValueError) as error:
            text = str(error)
        else:
            text = "no error"  # on rank 3, whose mate answers with its own messages
    else:
        wire = backend_of().exchange_backend

        def answer(peer: int, tag: int, size: int, damage: int = 0) -> None:
            message = torch.zeros(size, dtype=torch.uint8)
            wire.recv([message], peer, tag).wait()
            message[size // 2] ^= damage
            wire.send([message], peer, tag).wait()

        for peer in (0, 1, 3, 0, 1, 3):  # two rounds of agreement
            answer(peer, 0, 56)
        answer(0, 1, 128 + 11264 + 384, damage=0x55)
        for _ in range(2):  # what each host has, inside this one
            answer(3, 0, 56)
            answer(3, 1, 128 + 2 * n)
        text = "sent"
    dist.barrier()
    return text


def test_what_is_damaged_between_hosts_is_not_passed_on() -> None:
    ended = launch(4, damaged_between_hosts, timeout=30)
    values = [str(e.value) for e in ended]
    assert "rank 2" in values[0] and "checksum" in values[0], explain(ended)
    assert "rank 0" in values[1] and "failed" in values[1], explain(ended)
