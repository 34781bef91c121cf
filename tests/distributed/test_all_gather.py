"""All-gather in all its forms: bit for bit what every rank put in, whatever the data, the size and the mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multirank import fresh_group, group, only_zipccl, ranks
from oracle import BF16, KINDS, NATIVE, SIZES, assert_bits, data, small_integers
from torch.distributed import distributed_c10d as c10d

MODES = {
    "zip": dict(mode="zip", min_bytes=0),
    "raw": dict(mode="raw", min_bytes=0),
    "native": dict(mode="native"),
    "auto": dict(mode="auto"),
    # several segments of a message, and no room for escapes beside the planes
    "segments": dict(mode="zip", min_bytes=0, segment_bytes=32768),
    "no_inline": dict(mode="zip", min_bytes=0, inline_fraction=0.0),
    "checksum": dict(mode="zip", min_bytes=0, checksum=True),
}
LARGE = 8192 * 4 + 5  # as bf16, just above the default min_bytes


def by_list(outputs: list[torch.Tensor], x: torch.Tensor, g: dist.ProcessGroup, async_op: bool):
    return dist.all_gather(outputs, x, group=g, async_op=async_op)


def into_tensor(outputs: list[torch.Tensor], x: torch.Tensor, g: dist.ProcessGroup, async_op: bool):
    flat = torch.cat(outputs) if x.numel() else torch.empty(0, dtype=x.dtype)
    work = dist.all_gather_into_tensor(flat, x, group=g, async_op=async_op)
    if work is not None:
        work.wait()
    for out, part in zip(outputs, flat.chunk(len(outputs)) if x.numel() else outputs, strict=True):
        out.copy_(part)
    return None


FORMS = {"list": by_list, "into_tensor": into_tensor}


def check(
    form: str, kind: str | torch.dtype, n: int, rank: int, world_size: int, options: dict, async_op: bool
) -> None:
    x = data(kind, n, rank)
    outputs = [torch.ones(n, dtype=x.dtype) for _ in range(world_size)]
    work = FORMS[form](outputs, x, group(**options), async_op)
    if work is not None:
        work.wait()
    for r in range(world_size):
        assert_bits(outputs[r], data(kind, n, r), (form, kind, n, r))
    assert_bits(x, data(kind, n, rank), "the input changed")


# deepspeed 4386, 3827: numel 1, 7, 8, 9, 255, 257, 8191, 8193
@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_data_and_size(rank: int, world_size: int, form: str, mode: str) -> None:
    for kind in KINDS:
        sizes = SIZES if kind in ("bf16_gauss", "bf16_bits", "fp32_low_zero", "fp32_full") else [257, 8193]
        for i, n in enumerate([*sizes, LARGE]):
            check(form, kind, n, rank, world_size, MODES[mode], async_op=bool(i % 2))


# pytorch 42519, 152706
@pytest.mark.core
@only_zipccl  # Gloo has not all of them
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes_are_exact(rank: int, world_size: int, form: str, mode: str) -> None:
    for dtype in NATIVE:
        for n in (0, 1, 257, 8193):
            check(form, dtype, n, rank, world_size, MODES[mode], async_op=False)
        check(form, dtype, LARGE, rank, world_size, MODES[mode], async_op=True)


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "segments", "no_inline", "raw"])
def test_every_bf16_pattern_three_times(rank: int, world_size: int, mode: str) -> None:
    def patterns(r: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(r)
        return torch.randperm(3 * 65536, generator=g).to(torch.int32).bitwise_and(0xFFFF).to(torch.int16).view(BF16)

    out = torch.empty(world_size * 3 * 65536, dtype=BF16)
    dist.all_gather_into_tensor(out, patterns(rank), group=group(**MODES[mode]))
    assert_bits(out, torch.cat([patterns(r) for r in range(world_size)]))


# FSDP2 gathers into the tensor that holds the shard
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "segments", "auto"])
@pytest.mark.parametrize("kind", ["bf16_gauss", "bf16_escapes", "fp32_full"])
def test_input_is_a_view_of_the_output(rank: int, world_size: int, mode: str, kind: str) -> None:
    for n in (1, 257, LARGE):
        out = torch.zeros(n * world_size, dtype=KINDS[kind])
        mine = out[rank * n : (rank + 1) * n]
        mine.copy_(data(kind, n, rank))
        dist.all_gather_into_tensor(out, mine, group=group(**MODES[mode]))
        assert_bits(out, torch.cat([data(kind, n, r) for r in range(world_size)]), n)


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "segments"])
def test_list_outputs_may_hold_the_input(rank: int, world_size: int, mode: str) -> None:
    outputs = [torch.zeros(LARGE, dtype=BF16) for _ in range(world_size)]
    outputs[rank].copy_(data("bf16_gauss", LARGE, rank))
    dist.all_gather(outputs, outputs[rank], group=group(**MODES[mode]))
    for r in range(world_size):
        assert_bits(outputs[r], data("bf16_gauss", LARGE, r), r)


# deepspeed 3827: a storage offset of one element breaks every alignment that a kernel may hope for
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "native"])
@pytest.mark.parametrize("kind", ["bf16_gauss", "bf16_bits", "fp32_low_zero", "fp32_full"])
def test_storage_offset_of_one_element(rank: int, world_size: int, mode: str, kind: str) -> None:
    for n in (1, 7, 257, 8193, LARGE):
        x = torch.empty(n + 1, dtype=KINDS[kind])[1:]
        x.copy_(data(kind, n, rank))
        out = torch.zeros(n * world_size + 2, dtype=KINDS[kind])
        dist.all_gather_into_tensor(out[1:-1], x, group=group(**MODES[mode]))
        assert_bits(out[1:-1], torch.cat([data(kind, n, r) for r in range(world_size)]), n)
        assert out[0] == 0 and out[-1] == 0, "wrote beside the output"


# pytorch 192920, 74809: a column view; pytorch 128066: a transposed tensor
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_list_form_takes_any_strides(rank: int, world_size: int, mode: str) -> None:
    n = 9000
    x = torch.empty(n, 3, dtype=BF16)[:, 0]
    x.copy_(data("bf16_gauss", n, rank))
    tables = [torch.zeros(n, 2, dtype=BF16) for _ in range(world_size)]
    dist.all_gather([t[:, 1] for t in tables], x, group=group(**MODES[mode]))
    for r, table in enumerate(tables):
        assert_bits(table[:, 1], data("bf16_gauss", n, r), r)
        assert table[:, 0].abs().sum() == 0, "wrote between the output's elements"


@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_transposed_input_keeps_its_order(rank: int, world_size: int, mode: str) -> None:
    def shard(r: int) -> torch.Tensor:
        return data("bf16_gauss", 24000, r).reshape(40, 30, 20).transpose(1, 2)

    out = [torch.zeros(40, 20, 30, dtype=BF16) for _ in range(world_size)]
    dist.all_gather(out, shard(rank), group=group(**MODES[mode]))
    for r in range(world_size):
        assert_bits(out[r], shard(r), r)
    # the tensor form: right, or refused in words
    flat = torch.zeros(40 * world_size, 20, 30, dtype=BF16)
    try:
        dist.all_gather_into_tensor(flat, shard(rank), group=group(**MODES[mode]))
    except (ValueError, RuntimeError) as e:
        assert "contiguous" in str(e)
    else:
        assert_bits(flat, torch.cat([shard(r) for r in range(world_size)]))


@only_zipccl
@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_tensor_form_refuses_a_strided_output(rank: int, world_size: int, mode: str) -> None:
    out = torch.zeros(20000, 2, dtype=BF16)[:, 0]
    with pytest.raises((ValueError, RuntimeError), match="contiguous"):
        dist.all_gather_into_tensor(out, torch.ones(10000, dtype=BF16), group=group(**MODES[mode]))
    check("list", "bf16_gauss", 8193, rank, world_size, MODES[mode], async_op=False)  # nobody is out of step


# pytorch 85234
@ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "auto"])
def test_empty_shapes(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    outputs = [torch.empty(1, 0, 2, dtype=BF16) for _ in range(world_size)]
    dist.all_gather(outputs, torch.empty(1, 0, 2, dtype=BF16), group=g)
    out = torch.empty(world_size, 0, 2, dtype=BF16)
    dist.all_gather_into_tensor(out, torch.empty(1, 0, 2, dtype=BF16), group=g)
    assert out.shape == (world_size, 0, 2)


@only_zipccl  # Gloo has no stacked form
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_shapes_of_the_tensor_form(rank: int, world_size: int, mode: str) -> None:
    """Concatenated along the first dimension, or stacked in a new one; a scalar gives one element per rank."""
    g = group(**MODES[mode])
    shards = [data("bf16_gauss", 6000, r).reshape(60, 100) for r in range(world_size)]
    joined = torch.empty(60 * world_size, 100, dtype=BF16)
    dist.all_gather_into_tensor(joined, shards[rank], group=g)
    assert_bits(joined, torch.cat(shards))
    stacked = torch.empty(world_size, 60, 100, dtype=BF16)
    dist.all_gather_into_tensor(stacked, shards[rank], group=g)
    assert_bits(stacked, torch.stack(shards))
    scalars = torch.empty(world_size, dtype=BF16)
    dist.all_gather_into_tensor(scalars, torch.tensor(float(rank), dtype=BF16), group=g)
    assert scalars.tolist() == list(range(world_size))


# torchcomms 2551, pytorch 135338
@only_zipccl  # Gloo mixes up the dtypes of coalesced tensors
@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_coalesced(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    cases = [("bf16_gauss", 50000), ("fp32_full", 8193), (torch.int64, 100), ("bf16_zeros", 1), ("fp32_low_zero", 9)]
    inputs = [data(kind, n, rank) for kind, n in cases]
    outputs = [torch.zeros(x.numel() * world_size, dtype=x.dtype) for x in inputs]
    with dist._coalescing_manager(group=g):
        for out, x in zip(outputs[:2], inputs[:2], strict=True):
            dist.all_gather_into_tensor(out, x, group=g)
    with dist._coalescing_manager(group=g, async_ops=True) as manager:
        for out, x in zip(outputs[2:], inputs[2:], strict=True):
            dist.all_gather_into_tensor(out, x, group=g)
    manager.wait()
    for out, (kind, n) in zip(outputs, cases, strict=True):
        assert_bits(out, torch.cat([data(kind, n, r) for r in range(world_size)]), kind)


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_three_bf16_gathers_under_one_coalescing_manager(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    sizes = [70000, 8192, 3]
    outputs = [torch.zeros(n * world_size, dtype=BF16) for n in sizes]
    with dist._coalescing_manager(group=g):
        for out, n in zip(outputs, sizes, strict=True):
            dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank), group=g)
    for out, n in zip(outputs, sizes, strict=True):
        assert_bits(out, torch.cat([data("bf16_gauss", n, r) for r in range(world_size)]), n)


@ranks(2)
def test_legacy_all_gather_coalesced(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])
    sizes = [9000, 17, 8192]
    lists = [[torch.zeros(n, dtype=BF16) for n in sizes] for _ in range(world_size)]
    c10d.all_gather_coalesced(lists, [data("bf16_gauss", n, rank) for n in sizes], group=g)
    for r in range(world_size):
        for out, n in zip(lists[r], sizes, strict=True):
            assert_bits(out, data("bf16_gauss", n, r), (r, n))


@ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments_are_refused_and_the_group_still_works(rank: int, world_size: int, form: str) -> None:
    """Wrong arguments are refused on every rank before anything is sent, and the group still works."""
    g = group(**MODES["zip"])
    x = data("bf16_gauss", 9000, rank)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        if form == "list":
            dist.all_gather([torch.empty(9000, dtype=BF16) for _ in range(world_size + 1)], x, group=g)
        else:
            dist.all_gather_into_tensor(torch.empty(9000 * world_size + 1, dtype=BF16), x, group=g)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        if form == "list":
            dist.all_gather([torch.empty(9000, dtype=torch.float32) for _ in range(world_size)], x, group=g)
        else:
            dist.all_gather_into_tensor(torch.empty(9000 * world_size), x, group=g)
    check(form, "bf16_gauss", 9000, rank, world_size, MODES["zip"], async_op=False)


@only_zipccl
@ranks(2, 4)
def test_modes_agree_on_every_kind(rank: int, world_size: int) -> None:
    for kind in KINDS:
        x = data(kind, LARGE, rank)
        results = []
        for mode in MODES:
            out = torch.empty(LARGE * world_size, dtype=x.dtype)
            dist.all_gather_into_tensor(out, x, group=group(**MODES[mode]))
            results.append(out)
        for out in results[1:]:
            assert_bits(out, results[0], kind)


@ranks(2)
def test_same_bits_as_bf16_and_as_fp16(rank: int, world_size: int) -> None:
    """CUDALibrarySamples 249: the dtype travels with the message."""
    for dtype in (BF16, torch.float16):
        x = data("bf16_bits", LARGE, rank).view(dtype)
        out = torch.empty(LARGE * world_size, dtype=dtype)
        dist.all_gather_into_tensor(out, x, group=group(**MODES["zip"]))
        assert_bits(out, torch.cat([data("bf16_bits", LARGE, r).view(dtype) for r in range(world_size)]))


@ranks(2)
def test_input_that_requires_grad(rank: int, world_size: int) -> None:
    x = small_integers(BF16, 9001, rank).requires_grad_()
    out = [torch.empty(9001, dtype=BF16) for _ in range(world_size)]
    dist.all_gather(out, x, group=group(**MODES["zip"]))
    for r in range(world_size):
        assert_bits(out[r], small_integers(BF16, 9001, r))


# x.imag of a conjugated tensor is such a view; its memory holds the negated values
@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_negated_views_are_right_or_refused(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_full"):
        for n in (257, 9000):
            outputs = [torch._neg_view(torch.zeros(n, dtype=KINDS[kind])) for _ in range(world_size)]
            x = torch._neg_view(-data(kind, n, rank)) if rank == 0 else data(kind, n, rank)
            assert outputs[0].is_neg() and x.is_neg() == (rank == 0)
            try:
                dist.all_gather(outputs, x, group=group(**MODES[mode]))
            except (ValueError, RuntimeError) as e:
                assert "neg" in str(e)
                continue
            for r, out in enumerate(outputs):
                assert_bits(out.resolve_neg(), data(kind, n, r), (kind, n, r))


@only_zipccl
@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_conjugated_views_are_right_or_refused(rank: int, world_size: int, mode: str) -> None:
    outputs = [torch.zeros(257, dtype=torch.complex64).conj() for _ in range(world_size)]
    try:
        dist.all_gather(outputs, data(torch.complex64, 257, rank), group=group(**MODES[mode]))
    except (ValueError, RuntimeError) as e:
        assert "conj" in str(e)
        return
    for r, out in enumerate(outputs):
        assert_bits(out.resolve_conj(), data(torch.complex64, 257, r), r)


@only_zipccl
@ranks(2)
@pytest.mark.parametrize("wrong_on", ["all_ranks", "rank_0"])
def test_refused_coalesced_call_counts_for_nothing(rank: int, world_size: int, wrong_on: str) -> None:
    """Its first input is right, its second is not; calls are numbered, and the ranks compare the numbers."""
    with fresh_group(**MODES["zip"]) as g:
        if rank == 0 or wrong_on == "all_ranks":
            lists = [[torch.zeros(9000, dtype=BF16), torch.zeros(8193, dtype=BF16)] for _ in range(world_size)]
            inputs = [data("bf16_gauss", n, rank) for n in (9000, 8192)]
            with pytest.raises(ValueError, match="8193"):
                c10d.all_gather_coalesced(lists, inputs, group=g)
            assert all(t.abs().sum() == 0 for ts in lists for t in ts)
        for case in range(2):
            out = torch.zeros(world_size * 9000, dtype=BF16)
            dist.all_gather_into_tensor(out, data("bf16_gauss", 9000, rank, case), group=g)
            assert_bits(out, torch.cat([data("bf16_gauss", 9000, r, case) for r in range(world_size)]), case)
