"""Reduce-scatter in all its forms: fp32 accumulation in rank order and one rounding at the end, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multirank import BACKEND, group, only_zipccl, ranks
from oracle import (
    BF16,
    FP32,
    KINDS,
    REDUCTIONS,
    SIZES,
    assert_bits,
    assert_number,
    data,
    factor,
    reduce_op,
    reduced,
    small_integers,
)
from test_all_gather import LARGE, MODES

ZIPPED = ["zip", "raw", "segments", "no_inline", "checksum"]
OPS = REDUCTIONS if BACKEND == "zipccl" else ["sum", "avg", "min", "max"]


def by_list(out: torch.Tensor, parts: list[torch.Tensor], op, g, async_op: bool):
    return dist.reduce_scatter(out, parts, op=op, group=g, async_op=async_op)


def by_tensor(out: torch.Tensor, parts: list[torch.Tensor], op, g, async_op: bool):
    return dist.reduce_scatter_tensor(out, torch.cat(parts), op=op, group=g, async_op=async_op)


FORMS = {"list": by_list, "tensor": by_tensor}


def contribution(kind: str, n: int, sender: int, receiver: int) -> torch.Tensor:
    return data(kind, n, sender, case=receiver)


def scatter(form: str, op: str, parts: list[torch.Tensor], rank: int, g, async_op: bool = False) -> torch.Tensor:
    out = torch.full_like(parts[0], 7, memory_format=torch.contiguous_format)
    work = FORMS[form](out, parts, reduce_op(op, rank), g, async_op)
    if work is not None:
        work.wait()
    return out


def check(form: str, op: str, kind: str, n: int, rank: int, world_size: int, options: dict, async_op: bool) -> None:
    parts = [contribution(kind, n, rank, j) for j in range(world_size)]
    out = scatter(form, op, parts, rank, group(**options), async_op)
    want = reduced([contribution(kind, n, r, rank) for r in range(world_size)], op)
    assert_number(out, want, (form, op, kind, n))
    for j, part in enumerate(parts):
        assert_bits(part, contribution(kind, n, rank, j), "an input changed")


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "segments"])  # the others: test_zip_and_raw_are_bit_identical
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_every_kind_of_data(rank: int, world_size: int, op: str, form: str, mode: str) -> None:
    for i, kind in enumerate(KINDS):
        for n in (257, LARGE):
            check(form, op, kind, n, rank, world_size, MODES[mode], async_op=bool(i % 2))


# deepspeed 4386, 3827
@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_every_size(rank: int, world_size: int, op: str, form: str, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_low_zero", "fp32_full"):
        for i, n in enumerate(SIZES):
            check(form, op, kind, n, rank, world_size, MODES[mode], async_op=bool(i % 2))


@only_zipccl
@ranks(2, 3, 4)
@pytest.mark.parametrize("op", OPS)
def test_zip_and_raw_are_bit_identical(rank: int, world_size: int, op: str) -> None:
    """Whatever the data: which NaN a sum keeps depends on the order, and the order is the same."""
    for kind in KINDS:
        parts = [contribution(kind, LARGE, rank, j) for j in range(world_size)]
        raw = scatter("tensor", op, parts, rank, group(**MODES["raw"]))
        for mode in ZIPPED:
            for form in FORMS:
                assert_bits(scatter(form, op, parts, rank, group(**MODES[mode])), raw, (mode, form, kind))


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["native", "auto"])
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max"])
def test_handed_on(rank: int, world_size: int, op: str, mode: str) -> None:
    """Values whose sums are exact: the order of the wrapped backend's sum is its own."""
    for dtype in (BF16, FP32):
        for form in FORMS:
            for n in (1, 257, 8193, LARGE):
                parts = [small_integers(dtype, n, rank + j) for j in range(world_size)]
                out = scatter(form, op, parts, rank, group(**MODES[mode]))
                want = reduced([small_integers(dtype, n, r + rank) for r in range(world_size)], op)
                assert_number(out, want, (form, op, dtype, n))


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["native", "auto", "zip"])
def test_premul_sum_at_every_size(rank: int, world_size: int, mode: str) -> None:
    """Gloo refuses PREMUL_SUM; below min_bytes and in native mode it must work all the same."""
    for kind in ("bf16_gauss", "fp32_full"):
        for n in (1, 257, LARGE):
            for form in FORMS:
                check(form, "premul_sum", kind, n, rank, world_size, MODES[mode], async_op=False)


@only_zipccl
@ranks(2)
def test_premul_sum_with_a_power_of_two_equals_avg(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])
    for kind in ("bf16_gauss", "fp32_low_zero", "fp32_full"):
        x = data(kind, 2 * LARGE, rank)
        a, b = torch.empty(LARGE, dtype=x.dtype), torch.empty(LARGE, dtype=x.dtype)
        dist.reduce_scatter_tensor(a, x, op=dist.ReduceOp.AVG, group=g)
        dist.reduce_scatter_tensor(b, x, op=dist._make_nccl_premul_sum(0.5), group=g)
        assert_bits(a, b, kind)


# pytorch 155903
@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_avg_is_the_mean(rank: int, world_size: int, mode: str) -> None:
    """W = 2 and 4 exact; W = 3 within one bf16 ulp of the fp32 mean."""
    parts = [contribution("bf16_gauss", LARGE, rank, j) for j in range(world_size)]
    out = scatter("tensor", "avg", parts, rank, group(**MODES[mode]))
    mean = torch.stack([contribution("bf16_gauss", LARGE, r, rank).double() for r in range(world_size)]).mean(0)
    near = mean.bfloat16()
    distance = (out.view(torch.int16).int() - near.view(torch.int16).int()).abs()
    assert out.isfinite().all()
    assert int(distance[near != 0].max()) <= (0 if world_size == 2 else 1)


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_one_rounding_at_the_end(rank: int, world_size: int, mode: str) -> None:
    """256 + 1 + 1 + ... in bf16 stays 256 if every step rounds; W = 3 gives 258."""
    x = torch.full((world_size * 9000,), 256.0 if rank == 0 else 1.0, dtype=BF16)
    out = torch.empty(9000, dtype=BF16)
    dist.reduce_scatter_tensor(out, x, group=group(**MODES[mode]))
    assert set(out.tolist()) == {256.0 if world_size == 2 else 258.0}


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_special_values(rank: int, world_size: int, mode: str) -> None:
    """Infinities meet, overflow, cancel; NaN stays NaN; -0 + -0 = -0; MIN and MAX of a NaN are NaN."""
    inf, nan, big, tiny = float("inf"), float("nan"), 3.0e38, 1e-40
    table = torch.tensor(
        [[inf, inf, nan, big, -0.0, 0.0, tiny, 1.0, nan], [-inf, inf, 1.0, big, -0.0, -0.0, tiny, -1.0, nan]]
    )
    table = torch.cat([table, table[:1] * 1.0])[:world_size].repeat(1, 1000 * world_size)
    for dtype in (BF16, FP32):
        for op in ("sum", "min", "max"):
            out = torch.empty(9000, dtype=dtype)
            x = table[rank].to(dtype)
            dist.reduce_scatter_tensor(out, x, op=reduce_op(op), group=group(**MODES[mode]))
            want = reduced([table[r].to(dtype)[rank * 9000 : (rank + 1) * 9000] for r in range(world_size)], op)
            assert_number(out, want, (op, dtype))


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_shapes_of_the_tensor_form(rank: int, world_size: int, mode: str) -> None:
    """The input is the parts one after another, or stacked; the size of a message does not decide what is allowed."""
    g = group(**MODES[mode])
    for rows in (3, 30000):
        parts = [small_integers(FP32, rows * 5, rank + j).reshape(rows, 5) for j in range(world_size)]
        want = reduced([small_integers(FP32, rows * 5, r + rank) for r in range(world_size)], "sum").reshape(rows, 5)
        for x in (torch.cat(parts), torch.stack(parts), torch.cat(parts).flatten()):
            out = torch.empty(rows, 5)
            dist.reduce_scatter_tensor(out, x, group=g)
            assert_bits(out, want, (rows, x.shape))
    scalar = torch.empty(())
    dist.reduce_scatter_tensor(scalar, torch.arange(world_size, dtype=FP32), group=g)
    assert scalar.item() == world_size * rank


# pytorch 128066, 163712
@ranks(4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_transposed_input(rank: int, world_size: int, mode: str) -> None:
    x = torch.arange(24, dtype=BF16).reshape(4, 3, 2).transpose(1, 2)
    out = torch.zeros(2, 3, dtype=BF16)
    try:
        dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.MAX, group=group(**MODES[mode]))
    except (ValueError, RuntimeError) as e:
        assert "contiguous" in str(e), str(e)
        return
    assert out.tolist() == x[rank].tolist()
    if rank == 0:
        assert out.tolist() == [[0, 2, 4], [1, 3, 5]]
        # four equal contributions
    dist.reduce_scatter_tensor(out, x, group=group(**MODES[mode]))
    assert out.tolist() == (4 * x[rank]).tolist()
    if rank == 0:
        assert out.tolist() == [[0, 8, 16], [4, 12, 20]]


# pytorch 192920, 74809
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_list_form_takes_any_strides(rank: int, world_size: int, mode: str) -> None:
    n = 9000
    parts = []
    for j in range(world_size):
        column = torch.empty(n, 3, dtype=BF16)[:, j % 3]
        column.copy_(contribution("bf16_gauss", n, rank, j))
        parts.append(column)
    out = torch.zeros(n, 2, dtype=BF16)
    dist.reduce_scatter(out[:, 1], parts, group=group(**MODES[mode]))
    assert_bits(out[:, 1], reduced([contribution("bf16_gauss", n, r, rank) for r in range(world_size)], "sum"))
    assert out[:, 0].abs().sum() == 0


@only_zipccl
@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_tensor_form_refuses_a_strided_output(rank: int, world_size: int, mode: str) -> None:
    out = torch.zeros(10000, 2, dtype=BF16)[:, 0]
    with pytest.raises((ValueError, RuntimeError), match="contiguous"):
        dist.reduce_scatter_tensor(out, torch.ones(20000, dtype=BF16), group=group(**MODES[mode]))
    check("tensor", "sum", "bf16_gauss", 9000, rank, world_size, MODES[mode], async_op=False)


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "segments"])
@pytest.mark.parametrize("kind", ["bf16_gauss", "fp32_low_zero", "fp32_full"])
def test_output_is_a_view_of_the_input(rank: int, world_size: int, mode: str, kind: str) -> None:
    n = LARGE
    x = torch.cat([contribution(kind, n, rank, j) for j in range(world_size)])
    out = x[rank * n : (rank + 1) * n]
    dist.reduce_scatter_tensor(out, x, group=group(**MODES[mode]))
    assert_bits(out, reduced([contribution(kind, n, r, rank) for r in range(world_size)], "sum"))
    # the list form, where the output is another rank's part
    parts = [contribution(kind, n, rank, j) for j in range(world_size)]
    out = parts[(rank + 1) % world_size]
    dist.reduce_scatter(out, parts, group=group(**MODES[mode]))
    assert_bits(out, reduced([contribution(kind, n, r, rank) for r in range(world_size)], "sum"))


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_storage_offset_of_one_element(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_low_zero", "fp32_full"):
        for n in (1, 9, 8193):
            x = torch.empty(n * world_size + 1, dtype=KINDS[kind])[1:]
            x.copy_(torch.cat([contribution(kind, n, rank, j) for j in range(world_size)]))
            out = torch.zeros(n + 2, dtype=KINDS[kind])
            dist.reduce_scatter_tensor(out[1:-1], x, group=group(**MODES[mode]))
            assert_bits(out[1:-1], reduced([contribution(kind, n, r, rank) for r in range(world_size)], "sum"))
            assert out[0] == 0 and out[-1] == 0, "wrote beside the output"


# pytorch 85234
@ranks(1, 2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "auto"])
def test_empty_shapes(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    out = torch.empty(1, 0, 2, dtype=BF16)
    dist.reduce_scatter_tensor(out, torch.empty(world_size, 0, 2, dtype=BF16), group=g)
    dist.reduce_scatter(out, [torch.empty(1, 0, 2, dtype=BF16) for _ in range(world_size)], group=g)
    assert out.shape == (1, 0, 2)


@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "auto"])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_coalesced(rank: int, world_size: int, mode: str, op: str) -> None:
    g = group(**MODES[mode])
    sizes = [50000, 8193, 9]
    dtype = FP32
    inputs = [torch.cat([small_integers(dtype, n, rank + j) for j in range(world_size)]) for n in sizes]
    outputs = [torch.zeros(n, dtype=dtype) for n in sizes]
    with dist._coalescing_manager(group=g, async_ops=True) as manager:
        for out, x in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(out, x, op=reduce_op(op), group=g)
    manager.wait()
    for out, n in zip(outputs, sizes, strict=True):
        assert_bits(out, reduced([small_integers(dtype, n, r + rank) for r in range(world_size)], op), n)


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum", "max"])
def test_coalesced_of_both_dtypes(rank: int, world_size: int, op: str) -> None:
    cases = [("bf16_gauss", 50000), ("fp32_full", 8193), ("fp32_low_zero", 40000), ("bf16_zeros", 1)]
    inputs = [torch.cat([contribution(k, n, rank, j) for j in range(world_size)]) for k, n in cases]
    for mode in ("zip", "raw"):
        g = group(**MODES[mode])
        outputs = [torch.zeros(n, dtype=KINDS[k]) for k, n in cases]
        with dist._coalescing_manager(group=g):
            for out, x in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(out, x, op=reduce_op(op, rank), group=g)
        for out, (k, n) in zip(outputs, cases, strict=True):
            assert_bits(out, reduced([contribution(k, n, r, rank) for r in range(world_size)], op), (k, n))


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "native", "auto"])
def test_average_of_floats_and_integers_coalesced(rank: int, world_size: int, mode: str) -> None:
    """Floats keep the fraction of a mean that is not whole, integers lose it towards zero, in either order."""

    def real(r: int) -> torch.Tensor:
        return torch.arange(-30, 30)[: 12 * world_size] * 0.25 + 1.5 * r

    def whole(r: int) -> torch.Tensor:
        return torch.arange(-18, 42, dtype=torch.int32)[: 12 * world_size] + r * r

    g, mine = group(**MODES[mode]), slice(12 * rank, 12 * (rank + 1))
    for order in ((real, whole), (whole, real)):
        outputs = [torch.zeros(12, dtype=make(0).dtype) for make in order]
        with dist._coalescing_manager(group=g):
            for out, make in zip(outputs, order, strict=True):
                dist.reduce_scatter_tensor(out, make(rank), op=dist.ReduceOp.AVG, group=g)
        for out, make in zip(outputs, order, strict=True):
            total = sum(make(r) for r in range(world_size))[mine]
            assert bool((total.remainder(world_size) != 0).any()), "every mean is whole: shows nothing"
            want = total / world_size if make is real else total.div(world_size, rounding_mode="trunc")
            assert_bits(out, want, (mode, make.__name__))


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "auto"])
def test_integers_are_handed_on(rank: int, world_size: int, mode: str) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        for op in ("sum", "min", "max"):
            for form in FORMS:
                parts = [small_integers(dtype, 9000, rank + j) for j in range(world_size)]
                out = scatter(form, op, parts, rank, group(**MODES[mode]))
                want = reduced([small_integers(dtype, 9000, r + rank) for r in range(world_size)], op)
                assert_bits(out, want, (form, op, dtype))


@ranks(2)
@pytest.mark.parametrize("op", ["product", "band", "bor", "bxor"])
def test_other_operations_are_handed_on(rank: int, world_size: int, op: str) -> None:
    x = torch.arange(2 * 9000, dtype=torch.int32) % 5 + rank
    out = torch.empty(9000, dtype=torch.int32)
    dist.reduce_scatter_tensor(out, x, op=reduce_op(op), group=group(**MODES["zip"]))
    both = [((torch.arange(2 * 9000, dtype=torch.int32) % 5) + r)[rank * 9000 : (rank + 1) * 9000] for r in (0, 1)]
    fn = {"product": torch.mul, "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    assert torch.equal(out, fn(*both))


@ranks(2)
def test_product_of_floats_is_handed_on(rank: int, world_size: int) -> None:
    x = small_integers(FP32, 2 * LARGE, rank) + 1
    out = torch.empty(LARGE)
    dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.PRODUCT, group=group(**MODES["zip"]))
    want = (small_integers(FP32, 2 * LARGE, 0) + 1) * (small_integers(FP32, 2 * LARGE, 1) + 1)
    assert torch.equal(out, want[rank * LARGE : (rank + 1) * LARGE])


@ranks(2)
@pytest.mark.parametrize("form", FORMS)
def test_wrong_arguments_are_refused_and_the_group_still_works(rank: int, world_size: int, form: str) -> None:
    g = group(**MODES["zip"])
    parts = [contribution("bf16_gauss", 9000, rank, j) for j in range(world_size)]
    for out in (torch.empty(9001, dtype=BF16), torch.empty(9000, dtype=FP32)):
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            FORMS[form](out, parts, dist.ReduceOp.SUM, g, False)
    if form == "list":
        with pytest.raises((ValueError, RuntimeError, TypeError)):
            FORMS[form](torch.empty(9000, dtype=BF16), parts[:1], dist.ReduceOp.SUM, g, False)
    if BACKEND == "zipccl":
        check(form, "sum", "bf16_gauss", 9000, rank, world_size, MODES["zip"], async_op=False)


@only_zipccl
@ranks(3)
def test_factor_is_rounded_to_fp32(rank: int, world_size: int) -> None:
    assert factor(1) != float(torch.tensor(factor(1), dtype=FP32)), "a factor that fp32 holds shows nothing"
    check("tensor", "premul_sum", "fp32_full", 9000, rank, world_size, MODES["zip"], async_op=False)
