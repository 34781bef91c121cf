"""Options, their environment variables, and the statistics that tell what they did."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from multirank import explain, fresh_group, launch, only_zipccl, ranks, seconds
from oracle import BF16, assert_bits, data

zipccl = pytest.importorskip("zipccl")
pytestmark = only_zipccl

ZIP = dict(mode="zip", min_bytes=0)
MIB = 1 << 19  # bf16 elements in a MiB


# ---------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(mode="zstd"), ["mode", "auto", "zip", "raw", "native"]),
        (dict(mode=None), ["mode", "auto", "zip", "raw", "native"]),
        (dict(mode=3), ["mode", "auto"]),
        (dict(window="gauss"), ["window", "sample"]),
        (dict(min_bytes=-1), ["min_bytes"]),
        (dict(min_bytes="64k"), ["min_bytes"]),
        (dict(min_bytes=1.5), ["min_bytes"]),
        (dict(segment_bytes=0), ["segment_bytes"]),
        (dict(segment_bytes=-4096), ["segment_bytes"]),
        (dict(inline_fraction=-0.1), ["inline_fraction"]),
        (dict(inline_fraction=float("nan")), ["inline_fraction"]),
        (dict(inline_fraction="1/24"), ["inline_fraction"]),
        (dict(checksum="maybe"), ["checksum"]),
        (dict(level=9), ["level", "mode", "min_bytes", "segment_bytes", "inline_fraction", "window", "checksum"]),
        (dict(Mode="zip"), ["Mode", "mode"]),
    ],
)
def test_wrong_options_are_refused_with_what_is_allowed(options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        zipccl.Options(**options)
    for word in words:
        assert word in str(refusal.value)


def test_defaults() -> None:
    options = zipccl.Options()
    assert (options.mode, options.min_bytes, options.segment_bytes) == ("auto", 65536, 1 << 20)
    assert options.inline_fraction == pytest.approx(1 / 24)
    assert (options.window, options.checksum, options.two_phase) == ("sigma", False, True)


def test_options_are_shown_and_compared() -> None:
    options = zipccl.Options(mode="raw", min_bytes=123)
    assert "raw" in repr(options) and "123" in repr(options)


def test_copies_are_options_too() -> None:
    """c10d copies what it is given as pg_options."""
    options = zipccl.Options(mode="raw", min_bytes=123, segment_bytes=1 << 20, inline_fraction=0.25, checksum=True)
    options._timeout = seconds(7)
    for made in (copy.deepcopy(options), copy.deepcopy([options])[0]):
        assert type(made) is zipccl.Options and made is not options
        assert repr(made) == repr(options)
        assert made._timeout == seconds(7)
    made.mode = "zip"
    assert options.mode == "raw", "the copy is the same object"


@ranks(2)
def test_a_copy_is_accepted_as_options(rank: int, world_size: int) -> None:
    options = copy.deepcopy(zipccl.Options(mode="raw", min_bytes=0))
    g = dist.new_group(backend="zipccl", pg_options=options)
    dist.all_gather_into_tensor(torch.empty(2048, dtype=BF16), torch.ones(1024, dtype=BF16), group=g)
    only(zipccl.stats(g)["all_gather"], calls=1, raw=1)
    dist.destroy_process_group(g)


def test_positional_options_are_refused() -> None:
    with pytest.raises(TypeError):
        zipccl.Options("zip")


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "MODE": "raw",
        "MIN_BYTES": "1000",
        "SEGMENT_BYTES": "1048576",
        "INLINE_FRACTION": "0.25",
        "WINDOW": "sample",
        "CHECKSUM": "1",
    }.items():
        monkeypatch.setenv(f"ZIPCCL_{name}", text)
    options = zipccl.Options()
    assert (options.mode, options.min_bytes, options.segment_bytes) == ("raw", 1000, 1048576)
    assert (options.inline_fraction, options.window, options.checksum) == (0.25, "sample", True)
    assert zipccl.Options(mode="zip").mode == "zip", "an argument goes before the variable"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MODE", "fast"),
        ("MIN_BYTES", "64k"),
        ("CHECKSUM", "perhaps"),
        ("INLINE_FRACTION", "x"),
        ("SEGMENT_BYTES", "-1"),
    ],
)
def test_wrong_environment_variables_are_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"ZIPCCL_{name}", text)
    with pytest.raises(ValueError) as refusal:
        zipccl.Options()
    assert name.lower() in str(refusal.value).lower() and text in str(refusal.value)


def uses_environment(rank: int, world_size: int, store: dist.Store) -> dict:
    os.environ["ZIPCCL_MODE"] = "raw"
    os.environ["ZIPCCL_MIN_BYTES"] = "0"
    dist.init_process_group("zipccl", store=store, rank=rank, world_size=world_size, timeout=seconds(20))
    dist.all_gather_into_tensor(torch.empty(2048, dtype=BF16), torch.ones(1024, dtype=BF16))
    stats = zipccl.stats()["all_gather"]
    dist.destroy_process_group()
    return {k: stats[k] for k in ("calls", "raw", "zipped", "native")}


def test_environment_variables_reach_the_group() -> None:
    ended = launch(2, uses_environment)
    assert [e.value for e in ended] == [dict(calls=1, raw=1, zipped=0, native=0)] * 2, explain(ended)


def unknown_coder(rank: int, world_size: int, store: dist.Store) -> str:
    os.environ["ZIPCCL_CPU"] = "sse9"
    with pytest.raises((ValueError, RuntimeError)) as refusal:
        dist.init_process_group("zipccl", store=store, rank=rank, world_size=world_size, timeout=seconds(10))
    return str(refusal.value)


def test_an_unknown_coder_is_refused_when_a_group_is_made() -> None:
    """Not in the worker of some ranks during their first call, for which the others would wait."""
    ended = launch(2, unknown_coder, timeout=25)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    for e in ended:
        assert "sse9" in e.value and "portable" in e.value, e.value


def inherits_while_it_lives(rank: int, world_size: int, store: dist.Store) -> list[tuple[str, int]]:
    from zipccl.backend import backend_of

    got = []
    for i, (world, options) in enumerate(
        [("zipccl", dict(mode="raw", min_bytes=123)), ("gloo", {}), ("zipccl", dict(mode="zip"))]
    ):
        dist.init_process_group(
            world,
            store=dist.PrefixStore(f"world{i}", store),
            rank=rank,
            world_size=world_size,
            timeout=seconds(20),
            pg_options=zipccl.Options(**options) if options else None,
        )
        made = backend_of(dist.new_group(backend="zipccl")).options
        got.append((made.mode, made.min_bytes))
        dist.destroy_process_group()
    return got


def test_options_are_inherited_from_a_living_default_group_only() -> None:
    ended = launch(2, inherits_while_it_lives)
    assert [e.value for e in ended] == [[("raw", 123), ("auto", 65536), ("zip", 65536)]] * 2, explain(ended)


def foreign_options(rank: int, world_size: int, store: dist.Store) -> str:
    gloo = dist.ProcessGroupGloo._Options()
    with pytest.raises((ValueError, TypeError, RuntimeError)) as refusal:
        dist.init_process_group("zipccl", store=store, rank=rank, world_size=world_size, pg_options=gloo)
    return str(refusal.value)


def test_options_of_another_backend_are_refused() -> None:
    ended = launch(1, foreign_options)
    assert ended[0].state == "ok" and "Options" in ended[0].value, explain(ended)


def disagree(rank: int, world_size: int, store: dist.Store, options: list[dict]) -> str:
    with pytest.raises(RuntimeError) as refusal:
        dist.init_process_group(
            "zipccl",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=seconds(20),
            pg_options=zipccl.Options(**options[rank]),
        )
    return str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        [dict(mode="zip"), dict(mode="raw")],
        [dict(min_bytes=1), dict(min_bytes=2), dict(min_bytes=1)],
        [dict(), dict(segment_bytes=12345678)],
        [dict(inline_fraction=0.25), dict()],
        [dict(checksum=True), dict()],
    ],
    ids=["mode", "min_bytes", "segment_bytes", "inline_fraction", "checksum"],
)
def test_ranks_with_different_options_are_told_both(options: list[dict]) -> None:
    ended = launch(len(options), disagree, options=options)
    assert [e.state for e in ended] == ["ok"] * len(options), explain(ended)
    name = next(iter(options[0] or options[1]))
    values = {repr(o.get(name, getattr(zipccl.Options(), name))) for o in options}
    for e in ended:
        assert name in e.value and all(v in e.value for v in values), e.value
        assert "rank" in e.value


def other_version(rank: int, world_size: int, store: dist.Store) -> str:
    from zipccl import backend

    if rank == 1:  # says what a rank with a later build would

        class Later:
            def __init__(self, store: dist.Store, *_: object) -> None:
                store.set("zipccl/options/1", "wire format 99, and options of later")
                assert "wire format 1," in store.get("zipccl/options/0").decode()
                store.add("zipccl/options/seen", 1)
                raise RuntimeError("wire format 1 is not 99")

        backend._C.ProcessGroupZipCCL = Later  # type: ignore[misc]
    return disagree(rank, world_size, store, [{}, {}])


def test_ranks_with_different_versions_are_told_both() -> None:
    ended = launch(2, other_version)
    assert [e.state for e in ended] == ["ok"] * 2, explain(ended)
    assert "rank 0 has wire format 1," in ended[0].value and "rank 1 has wire format 99," in ended[0].value


# ---------------------------------------------------------------------------------------------------------- statistics


def only(stats: dict, **want: int) -> None:
    got = {k: stats[k] for k in ("calls", "zipped", "native", "raw")}
    assert got == dict(dict(calls=0, zipped=0, native=0, raw=0), **want), got


@pytest.mark.core
@ranks(2, 3)
def test_ratio_of_bf16_gathers(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        out = torch.empty(world_size * 4 * MIB, dtype=BF16)
        dist.all_gather_into_tensor(out, data("bf16_gauss", 4 * MIB, rank), group=g)
        stats = zipccl.stats(g)["all_gather"]
    only(stats, calls=1, zipped=1)
    assert stats["elements"] > 0 and stats["elements"] % (4 * MIB) == 0
    assert stats["raw_bytes"] >= 4 * MIB * 2
    assert 0.69 < stats["wire_bytes"] / stats["raw_bytes"] < 0.72
    assert 0.02 < stats["escapes"] / stats["elements"] < 0.035
    assert stats["dynamic_bytes"] == 0, "Gaussian data finishes in one phase"
    assert all(v >= 0 for v in stats["seconds"].values()) and sum(stats["seconds"].values()) > 0


@pytest.mark.core
@ranks(2, 3)
def test_ratio_of_bf16_gradients_in_fp32(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        x = torch.cat([data("fp32_low_zero", MIB, rank, j) for j in range(world_size)])
        dist.reduce_scatter_tensor(torch.empty(MIB), x, group=g)
        stats = zipccl.stats(g)["reduce_scatter"]
    only(stats, calls=1, zipped=1)
    assert 0.34 < stats["wire_bytes"] / stats["raw_bytes"] < 0.38


@ranks(2)
def test_ratio_of_other_data(rank: int, world_size: int) -> None:
    """fp32 with low halves .85; random bits at most raw and headers; zeros no worse than Gaussian data."""
    bounds = {
        "fp32_full": (0.83, 0.88),
        "bf16_bits": (0.95, 1.02),
        "fp32_bits": (0.95, 1.02),
        "bf16_zeros": (0.5, 0.75),
        "bf16_relu": (0.5, 0.75),
        "bf16_escapes": (0.8, 1.06),
    }
    for kind, (low, high) in bounds.items():
        with fresh_group(**ZIP) as g:
            x = data(kind, 2 * MIB, rank)
            dist.all_to_all_single(torch.empty_like(x), x, group=g)
            stats = zipccl.stats(g)["all_to_all"]
        only(stats, calls=1, zipped=1)
        assert low < stats["wire_bytes"] / stats["raw_bytes"] < high, (kind, stats)


@ranks(2)
def test_raw_mode_counts_as_raw(rank: int, world_size: int) -> None:
    with fresh_group(mode="raw", min_bytes=0) as g:
        out = torch.empty(2 * MIB, dtype=BF16)
        dist.all_gather_into_tensor(out, data("bf16_gauss", MIB, rank), group=g)
        stats = zipccl.stats(g)["all_gather"]
    only(stats, calls=1, raw=1)
    assert 1.0 <= stats["wire_bytes"] / stats["raw_bytes"] < 1.001
    assert stats["escapes"] == 0


@pytest.mark.core
@ranks(2, 3)
def test_small_messages_and_other_dtypes_are_handed_on(rank: int, world_size: int) -> None:
    """Below min_bytes nothing is added: the call goes to the wrapped backend."""
    with fresh_group(mode="auto") as g:
        small, w = 1000, world_size
        dist.all_gather_into_tensor(torch.empty(w * small, dtype=BF16), torch.ones(small, dtype=BF16), group=g)
        dist.all_gather([torch.empty(small) for _ in range(w)], torch.ones(small), group=g)
        dist.reduce_scatter_tensor(torch.empty(small), torch.ones(w * small), group=g)
        large = torch.ones(MIB, dtype=torch.int64)
        dist.all_gather_into_tensor(torch.empty(w * MIB, dtype=torch.int64), large, group=g)
        dist.all_reduce(torch.ones(small), group=g)
        dist.broadcast(torch.ones(small), 0, group=g)
        stats = zipccl.stats(g)
    only(stats["all_gather"], calls=3, native=3)
    only(stats["reduce_scatter"], calls=1, native=1)
    only(stats["all_reduce"], calls=1, native=1)
    only(stats["broadcast"], calls=1, native=1)


@ranks(2)
def test_min_bytes_is_the_line(rank: int, world_size: int) -> None:
    for mode in ("auto", "zip"):
        with fresh_group(mode=mode, min_bytes=20000) as g:
            for n, zipped in ((9999, 0), (10000, 1)):  # bf16 elements
                zipccl.reset_stats(g)
                out = torch.empty(2 * n, dtype=BF16)
                dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank), group=g)
                entry = zipccl.stats(g)["all_gather"]
                if mode == "zip":
                    assert entry["zipped"] == zipped, n
                (decision,) = entry["decisions"]  # in auto mode, what is measured says whether
                assert (decision["reason"] == "smaller than min_bytes") == (not zipped), (mode, n, decision)


@ranks(2)
def test_native_mode_compresses_nothing(rank: int, world_size: int) -> None:
    with fresh_group(mode="native", min_bytes=0) as g:
        dist.all_gather_into_tensor(torch.empty(2 * MIB, dtype=BF16), torch.ones(MIB, dtype=BF16), group=g)
        dist.reduce_scatter_tensor(torch.empty(MIB), torch.ones(2 * MIB), group=g)
        dist.all_to_all_single(torch.empty(2 * MIB), torch.ones(2 * MIB), group=g)
        stats = zipccl.stats(g)
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        assert stats[name]["calls"] == 1 and stats[name]["zipped"] == 0, (name, stats[name])


@ranks(2)
def test_reset_and_groups_apart(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g, fresh_group(**ZIP) as h:
        for _ in range(3):
            dist.all_gather_into_tensor(torch.empty(2 * MIB, dtype=BF16), torch.ones(MIB, dtype=BF16), group=g)
        assert zipccl.stats(g)["all_gather"]["calls"] == 3
        assert zipccl.stats(h).get("all_gather", {"calls": 0})["calls"] == 0
        zipccl.reset_stats(g)
        assert zipccl.stats(g).get("all_gather", {"calls": 0})["calls"] == 0
        dist.all_gather_into_tensor(torch.empty(2 * MIB, dtype=BF16), torch.ones(MIB, dtype=BF16), group=g)
        assert zipccl.stats(g)["all_gather"]["calls"] == 1


@ranks(2)
def test_stats_of_a_group_without_zipccl(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="zipccl"):
        zipccl.stats(gloo)
    dist.destroy_process_group(gloo)


def test_encode_and_decode_of_a_tensor() -> None:
    for kind in ("bf16_gauss", "bf16_bits", "fp32_low_zero", "fp32_full"):
        for n in (0, 1, 8193):
            x = data(kind, n, 0)
            message = zipccl.encode(x)
            assert message.dtype == torch.uint8
            assert_bits(zipccl.decode(message), x)
            out = torch.empty_like(x)
            zipccl.decode(message, out=out)
            assert_bits(out, x)
    assert zipccl.encode(data("bf16_gauss", MIB, 0)).numel() < 0.704 * 2 * MIB
    assert len(zipccl.window(0.02)) == 7
    with pytest.raises((ValueError, RuntimeError)):
        zipccl.decode(torch.zeros(100, dtype=torch.uint8))
    # other dtypes are stored as they are
    y = torch.arange(100)
    out = torch.empty_like(y)
    assert_bits(zipccl.decode(zipccl.encode(y), out=out), y)
