"""mode="auto": what is measured, what is chosen from it, and that all ranks choose the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from multirank import explain, fresh_group, init, launch, only_zipccl, ranks
from oracle import BF16, FP32, assert_bits, data, reduced

zipccl = pytest.importorskip("zipccl")
from zipccl.backend import backend_of  # noqa: E402

pytestmark = only_zipccl

KIB, MIB = 1 << 10, 1 << 20
COLLECTIVES = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


def call(collective: str, n: int, rank: int, w: int, g: dist.ProcessGroup, kind: str = "bf16_gauss") -> None:
    """Parts of n elements, and the right result. Sums are of values that any order and way adds up exactly."""
    dtype = FP32 if kind.startswith("fp32") else BF16
    if collective == "all_gather":
        out = torch.empty(w * n, dtype=dtype)
        dist.all_gather_into_tensor(out, data(kind, n, rank), group=g)
        assert_bits(out, torch.cat([data(kind, n, r) for r in range(w)]))
    elif collective == "all_to_all":
        out = torch.empty(w * n, dtype=dtype)
        dist.all_to_all_single(out, torch.cat([data(kind, n, rank, j) for j in range(w)]), group=g)
        assert_bits(out, torch.cat([data(kind, n, r, rank) for r in range(w)]))
    else:
        whole = [((torch.arange(w * n) + r) % 16).to(dtype) for r in range(w)]
        if collective == "reduce_scatter":
            out = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole[rank], group=g)
            assert_bits(out, reduced(whole, "sum").chunk(w)[rank])
        else:
            out = whole[rank].clone()
            dist.all_reduce(out, group=g)
            assert_bits(out, reduced(whole, "sum"))


def same_on_all(value: Any, w: int) -> bool:
    everyone: list[Any] = [None] * w
    dist.all_gather_object(everyone, value)
    return all(other == everyone[0] for other in everyone)


def decisions(g: dist.ProcessGroup, collective: str) -> list[dict[str, Any]]:
    return zipccl.stats(g)[collective]["decisions"]


def point(collective: str, part_bytes: int, layout: str = "2", dtype: str = "bfloat16", **seconds: float) -> dict:
    figures = dict(ratio=0.7, encode_seconds=0.001, decode_seconds=0.001)
    where = dict(layout=layout, collective=collective, dtype=dtype, device="cpu", part_bytes=part_bytes)
    return dict(where, seconds=seconds, low=seconds, high=seconds, **figures)


def options_with(points: list[dict], **options: Any) -> zipccl.Options:
    made = zipccl.Options(**options)
    made.points = points
    return made


# ---------------------------------------------------------------------------------------------------------- measuring


@pytest.mark.core
@ranks(2, 3)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_first_calls_measure_and_all_ranks_choose_the_same(rank: int, world_size: int, collective: str) -> None:
    with fresh_group() as g:
        for n in (40_000, 100_000, 40_000, 600_000):
            call(collective, n, rank, world_size, g)
        entry = zipccl.stats(g)[collective]
        assert entry["calls"] == entry["zipped"] + entry["raw"] + entry["native"] == 4, "measurements were counted"
        assert sum(one["calls"] for one in entry["decisions"]) == 4
        measured = entry["measured"]
        assert {one["part_bytes"] for one in measured} == {64 * KIB, 256 * KIB, MIB, 4 * MIB}
        for one in measured:
            assert set(one["seconds"]) == {"native", "raw", "zip"} and all(v > 0 for v in one["seconds"].values())
            assert one["ratio"] < 0.8 and 0 < one["encode_seconds"] < one["seconds"]["zip"] + 1
        for one in entry["decisions"]:
            assert one["route"] == "native" or one["predicted"][one["route"]] == min(one["predicted"].values())
            assert one["reason"]
        assert same_on_all((measured, entry["decisions"]), world_size)


@ranks(4)
def test_with_hosts_the_hierarchical_way_is_measured_too(rank: int, world_size: int) -> None:
    with fresh_group(host=f"host {rank // 2}") as g:
        for collective in COLLECTIVES:
            call(collective, 100_000, rank, world_size, g)
            ways = {"native", "raw", "zip"} | ({"hierarchical"} if collective != "all_to_all" else set())
            for one in zipccl.stats(g)[collective]["measured"]:
                assert set(one["seconds"]) == ways and one["layout"] == "2 + 2"


@pytest.mark.core
@ranks(2)
def test_what_is_small_or_cannot_be_coded_is_not_measured(rank: int, world_size: int) -> None:
    with fresh_group() as g:
        call("all_gather", 1000, rank, world_size, g)
        big = torch.zeros(1 << 20, dtype=torch.int32)
        dist.all_gather_into_tensor(torch.empty(2 << 20, dtype=torch.int32), big, group=g)
        dist.all_reduce(big, group=g)
        assert backend_of(g).profile() == []
        reasons = [(one["route"], one["reason"]) for one in decisions(g, "all_gather")]
        assert reasons[0] == ("native", "smaller than min_bytes")
        assert reasons[1][0] == "native" and "dtype" in reasons[1][1]
        zipccl.reset_stats(g)
        assert zipccl.stats(g) == {}


@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw", "native"])
def test_a_mode_is_followed_without_measuring(rank: int, world_size: int, mode: str) -> None:
    with fresh_group(mode=mode) as g:
        call("all_gather", 100_000, rank, world_size, g)
        (decision,) = decisions(g, "all_gather")
        assert decision["route"] == mode and "mode" in decision["reason"] and decision["predicted"] == {}
        assert backend_of(g).profile() == []


@ranks(2)
def test_the_data_decides_what_the_coded_way_costs(rank: int, world_size: int) -> None:
    for kind, low, high in (("bf16_gauss", 0.68, 0.76), ("bf16_bits", 1.0, 1.02)):
        with fresh_group() as g:
            call("all_gather", 2 << 20, rank, world_size, g, kind)
            largest = zipccl.stats(g)["all_gather"]["measured"][-1]
            assert low < largest["ratio"] < high, largest


@ranks(2, 3)
def test_split_sizes_are_not_known_to_all(rank: int, world_size: int) -> None:
    """So that the way must not depend on them: tiny, empty and large calls go the same one."""
    with fresh_group() as g:
        for unit in (1, 0, 100_000):
            rows = [[unit * (1 + (i + j) % 2) for j in range(world_size)] for i in range(world_size)]
            n_in, n_out = rows[rank], [rows[i][rank] for i in range(world_size)]
            x = torch.cat([data("bf16_gauss", n, rank, j) for j, n in enumerate(n_in)])
            out = torch.empty(sum(n_out), dtype=BF16)
            dist.all_to_all_single(out, x, n_out, n_in, group=g)
            assert_bits(out, torch.cat([data("bf16_gauss", n, i, rank) for i, n in enumerate(n_out)]))
        (decision,) = decisions(g, "all_to_all")
        assert decision["route"] in ("raw", "zip") and decision["calls"] == 3
        assert same_on_all(decision, world_size)


@ranks(2)
def test_coalesced_calls_are_measured_only_where_nothing_is_in_the_way(rank: int, world_size: int) -> None:
    x = data("bf16_gauss", 100_000, rank)
    with fresh_group() as g:
        for _ in range(2):
            outs = [torch.empty(200_000, dtype=BF16) for _ in range(2)]
            with dist._coalescing_manager(group=g):
                for out in outs:
                    dist.all_gather_into_tensor(out, x, group=g)
            for out in outs:
                assert_bits(out, torch.cat([data("bf16_gauss", 100_000, r) for r in range(2)]))
        call("all_gather", 100_000, rank, world_size, g)
        assert zipccl.stats(g)["all_gather"]["calls"] == sum(one["calls"] for one in decisions(g, "all_gather"))
        assert same_on_all(decisions(g, "all_gather"), world_size)


@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_what_cannot_be_coded_does_not_hold_up_what_can(rank: int, world_size: int, mode: str) -> None:
    """In one coalesced call, beside it."""
    n = 100_000
    with fresh_group(mode=mode) as g:
        inputs = [torch.arange(n) + rank, data("bf16_gauss", n, rank), torch.arange(5) * rank]
        outs = [torch.empty(2 * x.numel(), dtype=x.dtype) for x in inputs]
        with dist._coalescing_manager(group=g):
            for out, x in zip(outs, inputs, strict=True):
                dist.all_gather_into_tensor(out, x, group=g)
        want = [torch.arange(n), data("bf16_gauss", n, 0), torch.arange(5) * 0]
        also = [torch.arange(n) + 1, data("bf16_gauss", n, 1), torch.arange(5)]
        for out, first, second in zip(outs, want, also, strict=True):
            assert_bits(out, torch.cat([first, second]))
        entry = zipccl.stats(g)["all_gather"]
        assert (entry["calls"], entry["native"]) == (1, 0)
        if mode == "zip":
            assert (entry["zipped"], entry["elements"]) == (1, n)


@ranks(1)
def test_alone_there_is_nothing_to_measure(rank: int, world_size: int) -> None:
    with fresh_group() as g:
        for collective in COLLECTIVES:
            call(collective, 100_000, rank, world_size, g)
            (decision,) = decisions(g, collective)
            assert decision["route"] == "native" and "alone" in decision["reason"]
        assert backend_of(g).profile() == []


def other_collective(rank: int, world_size: int, store: dist.Store) -> str:
    init(rank, world_size, store, timeout=6)
    try:
        call(COLLECTIVES[rank == world_size - 1], 100_000, rank, world_size, dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    return "nothing is wrong"


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_are_about_to_measure_different_calls(world_size: int) -> None:
    """They are told, before the wrapped backend sees any of it."""
    ended = launch(world_size, other_collective, timeout=25)
    assert [e.state for e in ended] == ["ok"] * world_size, explain(ended)
    for rank in (0, world_size - 1):
        text = ended[rank].value
        assert "calls all_gather" in text or "calls reduce_scatter" in text, text


# ------------------------------------------------------------------------------------------------------------ choosing


@pytest.mark.core
@ranks(2)
def test_predictions_are_linear_between_what_was_measured(rank: int, world_size: int) -> None:
    points = [
        point("all_gather", 256 * KIB, native=0.010, raw=0.020, zip=0.030),
        point("all_gather", MIB, native=0.040, raw=0.035, zip=0.033),
    ]
    with fresh_group(profile="") as g:
        assert backend_of(g).profile() == []
    g = dist.new_group(backend="zipccl", pg_options=options_with(points))
    for part_bytes, route, seconds in (
        (256 * KIB, "native", dict(native=0.010, raw=0.020, zip=0.030)),
        (640 * KIB, "native", dict(native=0.025, raw=0.0275, zip=0.0315)),
        (MIB, "zip", dict(native=0.040, raw=0.035, zip=0.033)),
    ):
        zipccl.reset_stats(g)
        call("all_gather", part_bytes // 2, rank, world_size, g)
        (decision,) = decisions(g, "all_gather")
        assert decision["route"] == route and decision["part_bytes"] == part_bytes
        assert decision["predicted"] == pytest.approx(seconds)
        assert zipccl.stats(g)["all_gather"]["native"] == (route == "native")
    assert backend_of(g).profile() == points, "something was measured again"
    dist.destroy_process_group(g)


@ranks(2)
def test_another_way_must_be_measurably_faster_than_native(rank: int, world_size: int) -> None:
    for native, zipped, high, route in (
        (10e-3, 9.7e-3, 9.7e-3, "native"),
        (10e-3, 9.3e-3, 9.3e-3, "zip"),
        (10e-3, 9.3e-3, 10.1e-3, "native"),  # it spreads
        (0.1e-3, 0.085e-3, 0.085e-3, "native"),  # too short
        (0.1e-3, 0.075e-3, 0.075e-3, "zip"),
    ):
        points = [point("all_gather", 256 * KIB, native=native, raw=0.020, zip=zipped)]
        points[0]["high"] = dict(points[0]["high"], zip=high)
        g = dist.new_group(backend="zipccl", pg_options=options_with(points))
        call("all_gather", 128 * KIB, rank, world_size, g)
        assert [one["route"] for one in decisions(g, "all_gather")] == [route]
        dist.destroy_process_group(g)


@ranks(4)
def test_the_hierarchical_way_is_chosen_where_it_is_fastest(rank: int, world_size: int) -> None:
    ways = dict(native=0.04, raw=0.03, zip=0.02)
    for hierarchical, route in ((0.01, "hierarchical"), (0.03, "zip")):
        points = [
            point(collective, 256 * KIB, "2 + 2", hierarchical=hierarchical, **ways) for collective in COLLECTIVES
        ]
        g = dist.new_group(backend="zipccl", pg_options=options_with(points, host=f"host {rank // 2}"))
        for collective in ("all_gather", "reduce_scatter", "all_reduce"):
            call(collective, 128 * KIB, rank, world_size, g)
            assert [one["route"] for one in decisions(g, collective)] == [route]
        dist.destroy_process_group(g)


@pytest.mark.core
@ranks(2)
def test_the_choice_follows_the_link(rank: int, world_size: int) -> None:
    """A profile of another link: within 256 short calls its figures are found wrong, and measured again."""
    wrong = [point("all_gather", size, native=1e-6, raw=1e-3, zip=1e-3) for size in (64 * KIB, 256 * KIB)]
    g = dist.new_group(backend="zipccl", pg_options=options_with(wrong))
    for _ in range(255):
        call("all_gather", 40_000, rank, world_size, g)
    assert backend_of(g).profile() == wrong
    call("all_gather", 40_000, rank, world_size, g)
    found = backend_of(g).profile()
    assert [one["part_bytes"] for one in found] == [64 * KIB, 256 * KIB]
    assert all(one["seconds"]["native"] > 1e-5 for one in found), found
    assert same_on_all((found, decisions(g, "all_gather")), world_size)
    assert zipccl.stats(g)["all_gather"]["calls"] == 256
    # The same again: now the figures are right, so that none is measured anew.
    for _ in range(256):
        call("all_gather", 40_000, rank, world_size, g)
    assert zipccl.stats(g)["all_gather"]["calls"] == 512
    dist.destroy_process_group(g)


# ------------------------------------------------------------------------------------------------------------ profiles


def saves(rank: int, world_size: int, store: dist.Store, path: str) -> list[dict]:
    init(rank, world_size, store, timeout=20)
    for collective in ("all_gather", "reduce_scatter"):
        call(collective, 100_000, rank, world_size, dist.group.WORLD)
    if rank == 0:
        zipccl.save_profile(path)
    points = backend_of().profile()
    dist.barrier()
    dist.destroy_process_group()
    return points


def loads(rank: int, world_size: int, store: dist.Store, path: str) -> tuple[list[dict], list[dict]]:
    init(rank, world_size, store, timeout=20, profile=path)
    before = backend_of().profile()
    call("all_gather", 100_000, rank, world_size, dist.group.WORLD)
    after = backend_of().profile()
    dist.destroy_process_group()
    return before, after


def test_profiles_are_saved_and_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    saved = {}
    for world_size in (2, 3):  # one file for both
        ended = launch(world_size, saves, path=path)
        assert [e.state for e in ended] == ["ok"] * world_size, explain(ended)
        saved[world_size] = ended[0].value
        assert len(saved[world_size]) == 4
    for world_size in (2, 3):
        ended = launch(world_size, loads, path=path)
        for e in ended:
            assert e.state == "ok" and e.value == (saved[world_size], saved[world_size]), explain(ended)


def different_profiles(rank: int, world_size: int, store: dist.Store, folder: str) -> str:
    points = [point("all_gather", 256 * KIB, native=0.01 * (1 + rank), raw=0.02, zip=0.03)]
    path = Path(folder) / f"{rank}.json"
    path.write_text(json.dumps(dict(format="zipccl profile 1", points=points)))
    with pytest.raises(RuntimeError) as refusal:
        init(rank, world_size, store, timeout=10, profile=str(path))
    return str(refusal.value)


def test_ranks_must_have_the_same_profile(tmp_path: Path) -> None:
    ended = launch(2, different_profiles, folder=str(tmp_path))
    for e in ended:
        assert e.state == "ok" and "profile=" in e.value and "do not agree" in e.value, explain(ended)


@pytest.mark.parametrize(
    "content", [None, "", "{}", "[]", '{"format": "zipccl profile 9", "points": []}', '{"format": "zipccl profile 1"}']
)
def test_what_is_no_profile(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"profile\.json.*is no profile"):
        zipccl.Options(profile=str(path))


@pytest.mark.parametrize("field, value", [("collective", "broadcast"), ("dtype", "float16"), ("seconds", {"fast": 1})])
def test_points_of_unknown_kinds_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError):
        options_with([point("all_gather", MIB, native=0.1) | {field: value}])
