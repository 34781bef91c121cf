"""Groups of every kind: sub-groups, meshes, splits, other backends beside, backend strings, coalescing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multirank import BACKEND, explain, fresh_group, group, init, launch, only_zipccl, pg_options, ranks, seconds
from oracle import BF16, assert_bits, data
from torch.distributed.device_mesh import init_device_mesh

ZIP = dict(mode="zip", min_bytes=0)
N = 30011


def check(g: dist.ProcessGroup, members: list[int], rank: int, case: object = "") -> None:
    """All-gather and reduce-scatter among the members."""
    me = members.index(rank)
    out = torch.zeros(len(members) * N, dtype=BF16)
    dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank, case), group=g)
    assert_bits(out, torch.cat([data("bf16_gauss", N, r, case) for r in members]), members)
    x = torch.cat([data("fp32_low_zero", N, rank, (case, j)) for j in range(len(members))])
    part = torch.empty(N)
    dist.reduce_scatter_tensor(part, x, group=g)
    terms = [data("fp32_low_zero", N, r, (case, me)) for r in members]
    want = terms[0]
    for t in terms[1:]:
        want = want + t
    assert_bits(part, want, members)


@pytest.mark.core
@ranks(4)
def test_overlapping_sub_groups(rank: int, world_size: int) -> None:
    sets = [[0, 1], [1, 2, 3], [0, 3], [2], [3, 0, 2]]
    made = [(s, group(s, **ZIP)) for s in sets]
    for s, g in made:
        if rank in s:
            check(g, sorted(s), rank)
        else:
            assert g == dist.GroupMember.NON_GROUP_MEMBER
    for s, g in reversed(made):  # and in the other order
        if rank in s:
            check(g, sorted(s), rank, "again")


@ranks(4)
def test_non_members_are_left_out(rank: int, world_size: int) -> None:
    g = group([1, 3], **ZIP)
    x, out = torch.ones(8, dtype=BF16), torch.zeros(16, dtype=BF16)
    dist.all_gather_into_tensor(out, x, group=g)  # a warning, nothing else, where this rank is no member
    assert out.sum() == (16 if rank in (1, 3) else 0)


@ranks(3, 4)
def test_new_subgroups_and_enumeration(rank: int, world_size: int) -> None:
    mine, _ = dist.new_subgroups_by_enumeration([[0, 1], list(range(2, world_size))], pg_options=pg_options(ZIP))
    check(mine, [0, 1] if rank < 2 else list(range(2, world_size)), rank)


@ranks(2)
def test_many_groups(rank: int, world_size: int) -> None:
    """Frameworks make 40."""
    made = [dist.new_group(backend=BACKEND, pg_options=pg_options(ZIP)) for _ in range(20)]
    for i, g in enumerate(made):
        check(g, [0, 1], rank, i)
    for g in made:
        dist.destroy_process_group(g)
    check(dist.group.WORLD, [0, 1], rank)


@only_zipccl
@ranks(2, mode="raw", min_bytes=50000)
def test_groups_without_options_have_the_worlds(rank: int, world_size: int) -> None:
    """DeviceMesh and frameworks make theirs without any."""
    import zipccl

    with fresh_group() as g:
        check(g, [0, 1], rank)  # 60 KB
        assert zipccl.stats(g)["all_gather"]["raw"] == 1
        dist.all_gather_into_tensor(torch.empty(40000, dtype=BF16), torch.ones(20000, dtype=BF16), group=g)
        assert zipccl.stats(g)["all_gather"]["native"] == 1
    mesh = init_device_mesh("cpu", (2,))
    check(mesh.get_group(), [0, 1], rank)
    with fresh_group(mode="zip") as g:
        check(g, [0, 1], rank)
        assert zipccl.stats(g)["all_gather"]["native"] == 1, "options that are given are not mixed with the world's"


@pytest.mark.core
@ranks(4, **ZIP)
def test_two_dimensional_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    check(mesh.get_group("tp"), rows[rank // 2], rank)
    check(mesh.get_group("dp"), columns[rank % 2], rank)
    flat = mesh._flatten("all")
    check(flat.get_group(), [0, 1, 2, 3], rank)
    check(mesh["tp"].get_group(), rows[rank // 2], rank, "slice")


@ranks(4, **ZIP)
def test_three_dimensional_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "cp", "tp"))
    check(mesh.get_group("pp"), [rank % 2, rank % 2 + 2], rank)
    check(mesh.get_group("cp"), [rank], rank)
    check(mesh["cp", "tp"]._flatten("cptp").get_group(), [rank // 2 * 2, rank // 2 * 2 + 1], rank)


# Megatron 746, 5001
@pytest.mark.core
@ranks(2, 4)
def test_gloo_group_beside(rank: int, world_size: int) -> None:
    g = group(backend="gloo")
    dist.barrier(group=g)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x, group=g)
    assert x.item() == sum(range(world_size + 1))
    check(group(**ZIP), list(range(world_size)), rank)
    dist.barrier()
    dist.all_reduce(x)
    assert x.item() == world_size * sum(range(world_size + 1))


@ranks(2, 3, 4)
def test_coalescing_manager_with_points_to_point(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    nxt, prv = (rank + 1) % world_size, (rank - 1) % world_size
    got = torch.zeros(N, dtype=BF16)
    ops = [dist.P2POp(dist.isend, data("bf16_gauss", N, rank), nxt, g), dist.P2POp(dist.irecv, got, prv, g)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_bits(got, data("bf16_gauss", N, prv))
    check(g, list(range(world_size)), rank)


@only_zipccl
@ranks(2, 3)
def test_works_of_a_coalescing_manager_may_be_waited_for_twice(rank: int, world_size: int) -> None:
    """By who has the works and by who has the manager; Gloo's own sends and receives end one wait only."""
    g, cpu = group(**ZIP), torch.device("cpu")
    nxt, prv = (rank + 1) % world_size, (rank - 1) % world_size
    for first in ("works", "manager"):
        got = torch.zeros(N, dtype=BF16)
        with dist._coalescing_manager(group=g, device=cpu, async_ops=True) as manager:
            works = [
                dist.isend(data("bf16_gauss", N, rank, first), nxt, group=g),
                dist.irecv(got, prv, group=g),
            ]
        if first == "manager":
            manager.wait()
        for work in works:
            if work is not None:
                work.wait(seconds(10))
        manager.wait()
        assert_bits(got, data("bf16_gauss", N, prv, first))
    check(g, list(range(world_size)), rank)


@only_zipccl
@ranks(2)
def test_exception_inside_a_coalescing_manager(rank: int, world_size: int) -> None:
    """The next use starts anew, without the works that were left."""
    with fresh_group(**ZIP) as g:
        cpu, peer = torch.device("cpu"), 1 - rank
        late, got = torch.zeros(N, dtype=BF16), torch.zeros(N, dtype=BF16)
        with pytest.raises(ValueError, match="gaps"):
            with dist._coalescing_manager(group=g, device=cpu, async_ops=True):
                left = dist.irecv(late, peer, group=g, tag=7)  # nobody sends until the end of the test
                dist.broadcast(torch.ones(4, 2)[:, 0], 0, group=g)
        with dist._coalescing_manager(group=g, device=cpu, async_ops=True) as manager:
            dist.isend(data("bf16_gauss", N, rank), peer, group=g)
            dist.irecv(got, peer, group=g)
        manager.wait()
        assert_bits(got, data("bf16_gauss", N, peer))
        check(g, [0, 1], rank)
        dist.send(data("bf16_gauss", N, rank, "late"), peer, group=g, tag=7)
        left.wait()
        assert_bits(late, data("bf16_gauss", N, peer, "late"))


@only_zipccl
@ranks(2)
def test_names(rank: int, world_size: int) -> None:
    assert dist.get_backend() == "zipccl"
    assert dist.is_backend_available("zipccl")
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.name() == "zipccl"
    assert backend is dist.group.WORLD._get_backend(torch.device("cuda"))
    assert (backend.rank(), backend.size()) == (rank, world_size)


# ------------------------------------------------------------------------------------- worlds made in another way


def world(rank: int, world_size: int, store: dist.Store, backend: str | None, device_id: bool, mesh: tuple) -> str:
    import zipccl  # noqa: F401

    extra = {"device_id": torch.device("cpu")} if device_id else {}
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds(20), **extra)
    except (ValueError, RuntimeError) as e:
        return f"refused: {e}"
    assert dist.get_rank() == rank
    check(dist.group.WORLD, list(range(world_size)), rank)
    cpu_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b"))
    dims = [[r for r in range(world_size) if r // mesh[1] == rank // mesh[1]]]
    check(cpu_mesh.get_group("b"), dims[0], rank)
    cpu_mesh._flatten("ab")
    dist.destroy_process_group()
    return "works"


# pytorch 159200, 189193
@only_zipccl
@pytest.mark.parametrize("backend", ["zipccl", "cpu:zipccl", "cpu:gloo,cuda:zipccl", "cpu:zipccl,cuda:zipccl"])
def test_backend_strings(backend: str) -> None:
    ended = launch(2, world, backend=backend, device_id=False, mesh=(1, 2))
    assert [e.value for e in ended] == ["works"] * 2, explain(ended)


@only_zipccl
def test_backend_string_for_cuda_alone() -> None:
    """A world without a backend for CPU tensors: groups are made, and a CPU collective is refused in words."""
    ended = launch(2, cuda_only)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)


def cuda_only(rank: int, world_size: int, store: dist.Store) -> None:
    init_backend(rank, world_size, store, "cuda:zipccl")
    assert dist.get_rank() == rank
    try:
        check(dist.group.WORLD, [0, 1], rank)
    except RuntimeError as e:
        assert "cpu" in str(e).lower()
    dist.destroy_process_group()


def init_backend(rank: int, world_size: int, store: dist.Store, backend: str) -> None:
    import zipccl  # noqa: F401

    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=seconds(20))


# pytorch 186548, 187891
@only_zipccl
@pytest.mark.parametrize("device_id", [False, True])
def test_mesh_with_and_without_device_id(device_id: bool) -> None:
    ended = launch(4, world, backend="zipccl", device_id=device_id, mesh=(2, 2))
    values = {e.value for e in ended}
    works = values == {"works"}
    refused = device_id and all(str(v).startswith("refused") and "device_id" in str(v) for v in values)
    assert works or refused, explain(ended)


def split(rank: int, world_size: int, store: dist.Store) -> None:
    init(rank, world_size, store, **ZIP)
    # PyTorch asks for an accelerator, and binds one; splitting itself needs none, so a CPU plays it
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    halves = [[0, 1], [2, 3]]
    first = dist.split_group(split_ranks=halves)
    check(first, halves[rank // 2], rank)
    second = dist.split_group(split_ranks=[[0, 2], [1, 3]], timeout=seconds(15), group_desc="crosswise")
    check(second, [rank % 2, rank % 2 + 2], rank)
    part = dist.split_group(split_ranks=[[1, 2, 3]])
    if rank:
        check(part, [1, 2, 3], rank)
        third = dist.split_group(part, split_ranks=[[0, 1], [2]])  # ranks of the parent
        check(third, [1, 2] if rank < 3 else [3], rank)
    check(world, [0, 1, 2, 3], rank)
    dist.destroy_process_group()


@only_zipccl
def test_split_group() -> None:
    ended = launch(4, split)
    assert [e.state for e in ended] == ["ok"] * 4, explain(ended)


def split_disagree(rank: int, world_size: int, store: dist.Store) -> str:
    import zipccl

    init(rank, world_size, store, timeout=10, **ZIP)
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cpu", 0)
    options = zipccl.Options(mode="zip" if rank == 0 else "native")
    with pytest.raises(RuntimeError) as refusal:
        dist.split_group(split_ranks=[[0, 1]], pg_options=options, timeout=seconds(8))
    check(world, [0, 1], rank)
    dist.destroy_process_group()
    return str(refusal.value)


@only_zipccl
def test_split_with_different_options_is_refused() -> None:
    """As when a group is made: else one rank codes what the other takes as it is."""
    ended = launch(2, split_disagree)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    for e in ended:
        for words in ("do not agree", "rank 0", "rank 1", "zip", "native"):
            assert words in e.value, e.value


# pytorch 92344
@only_zipccl
@ranks(2)
def test_cpu_then_cuda_in_one_group(rank: int, world_size: int) -> None:
    check(group(**ZIP), [0, 1], rank)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    out = torch.zeros(2 * N, dtype=BF16, device="cuda")
    dist.all_gather_into_tensor(out, data("bf16_gauss", N, rank).cuda(), group=group(**ZIP))


@only_zipccl
@ranks(2)
def test_tensors_of_another_device_are_refused(rank: int, world_size: int) -> None:
    """No CUDA here; a meta tensor stands for a device that this build cannot serve."""
    backend = group(**ZIP)._get_backend(torch.device("cpu"))
    x, out = torch.empty(9000, dtype=BF16), torch.empty(18000, dtype=BF16)
    calls = [
        lambda: backend._allgather_base(out.to("meta"), x.to("meta")),
        lambda: backend._allgather_base(out, x.to("meta")),
        lambda: backend.allgather([[x.clone(), x.to("meta")]], [x]),
        lambda: backend._reduce_scatter_base(x.to("meta"), out, dist.ReduceScatterOptions()),
        lambda: backend.alltoall_base(out, out.to("meta"), [], []),
        lambda: backend.alltoall([x.clone(), x.clone()], [x.to("meta"), x]),
        lambda: backend.allreduce([x.to("meta")]),
        lambda: backend.broadcast([x.to("meta")], dist.BroadcastOptions()),
    ]
    for i, call in enumerate(calls):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="(?i)meta|device|cuda"):
            call()
            raise AssertionError(f"call {i} was accepted")
    check(group(**ZIP), [0, 1], rank)


# pytorch 150162: what FSDP2, DTensor, DDP, TorchTitan and Megatron call
@only_zipccl
@ranks(2)
def test_no_call_of_the_frameworks_is_unsupported(rank: int, world_size: int) -> None:
    g = group(**ZIP)
    backend = g._get_backend(torch.device("cpu"))
    x, two = torch.ones(4), torch.ones(8)
    calls = {
        "broadcast": lambda: dist.broadcast(x, 0, group=g),
        "all_reduce": lambda: dist.all_reduce(x, group=g),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([x, two], group=g),
        "reduce": lambda: dist.reduce(x, 0, group=g),
        "all_gather": lambda: dist.all_gather([x.clone(), x.clone()], x, group=g),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, x, group=g),
        "reduce_scatter": lambda: dist.reduce_scatter(x, [x.clone(), x.clone()], group=g),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, two, group=g),
        "all_to_all": lambda: dist.all_to_all([x.clone(), x.clone()], [x.clone(), x.clone()], group=g),
        "all_to_all_single": lambda: dist.all_to_all_single(two, two.clone(), group=g),
        "gather": lambda: dist.gather(x, [x.clone(), x.clone()] if rank == 0 else None, group=g),
        "scatter": lambda: dist.scatter(x, [x.clone(), x.clone()] if rank == 0 else None, group=g),
        "send_recv": lambda: dist.send(x, 1, group=g) if rank == 0 else dist.recv(x, 0, group=g),
        "recv_any": lambda: dist.send(x, 1, group=g) if rank == 0 else dist.recv(x, group=g),
        "barrier": lambda: dist.barrier(group=g),
        "sequence_number": lambda: g._get_sequence_number_for_group(),
        "bound_device": lambda: g.bound_device_id,
        "options": lambda: backend.options,
        "timeout": lambda: dist.distributed_c10d._set_pg_timeout(seconds(30), g),
        "wait_for_pending": lambda: g._wait_for_pending_works(),
        "timing": lambda: g._enable_collectives_timing(),
    }
    unsupported = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as e:
            unsupported[name] = f"{type(e).__name__}: {e}"
    assert not unsupported
