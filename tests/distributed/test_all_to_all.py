"""All-to-all: every split of rows, on any side, in every form, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from multirank import BACKEND, group, only_zipccl, ranks
from oracle import BF16, KINDS, NATIVE, SIZES, SPLIT_CASES, assert_bits, data, splits
from test_all_gather import LARGE, MODES


def piece(kind: str | torch.dtype, rows: int, width: int, sender: int, receiver: int) -> torch.Tensor:
    return data(kind, rows * width, sender, case=receiver).reshape(rows, width)


def exchange(
    kind: str | torch.dtype,
    table: list[list[int]],
    width: int,
    rank: int,
    g,
    async_op: bool = False,
    form: str = "single",
) -> None:
    """splits: table[i][j] rows go from rank i to rank j."""
    w = len(table)
    sent = [piece(kind, table[rank][j], width, rank, j) for j in range(w)]
    want = [piece(kind, table[i][rank], width, i, rank) for i in range(w)]
    if form == "single":
        x, out = torch.cat(sent), torch.ones_like(torch.cat(want))
        n_in, n_out = [len(t) for t in sent], [len(t) for t in want]
        work = dist.all_to_all_single(out, x, n_out, n_in, group=g, async_op=async_op)
        got = list(out.split(n_out))
    else:
        got = [torch.ones_like(t) for t in want]
        work = dist.all_to_all(got, sent, group=g, async_op=async_op)
    if async_op:
        work.wait()
    for i in range(w):
        assert_bits(got[i], want[i], (kind, form, "from", i))


FORMS = ["single", "list"] if BACKEND == "zipccl" else ["single"]


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_every_split(rank: int, world_size: int, form: str, mode: str) -> None:
    for i, case in enumerate(SPLIT_CASES):
        for kind in ("bf16_gauss", "fp32_low_zero"):
            exchange(kind, splits(world_size, case), 3, rank, group(**MODES[mode]), bool(i % 2), form)


# deepspeed 4386, 3827
@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto", "segments", "no_inline"])
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_data_and_size(rank: int, world_size: int, form: str, mode: str) -> None:
    for kind in KINDS:
        sizes = SIZES if kind in ("bf16_gauss", "fp32_full") else [257, 8193]
        for i, n in enumerate([*sizes, LARGE]):
            table = [[n] * world_size for _ in range(world_size)]
            exchange(kind, table, 1, rank, group(**MODES[mode]), bool(i % 2), form)


# pytorch 42519, 152706
@pytest.mark.core
@only_zipccl
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_other_dtypes_are_exact(rank: int, world_size: int, form: str, mode: str) -> None:
    for dtype in NATIVE:
        for case in ("ragged", "some_zero"):
            exchange(dtype, splits(world_size, case, 9000), 1, rank, group(**MODES[mode]), False, form)


@pytest.mark.core
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("mode", MODES)
def test_without_splits(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_full", "bf16_escapes"):
        for n in (1, 8193, LARGE):
            x = torch.cat([data(kind, n, rank, j) for j in range(world_size)])
            out = torch.ones_like(x)
            dist.all_to_all_single(out, x, group=group(**MODES[mode]))
            assert_bits(out, torch.cat([data(kind, n, r, rank) for r in range(world_size)]), (kind, n))


# pytorch 146468, nccl 788, 1593
@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_rows_of_a_million_with_zero_splits(rank: int, world_size: int, mode: str) -> None:
    """Rank 0 sends [1, 1] and receives [1, 0]; rank 1 sends [0, 0] and receives [1, 0]; then nothing at all."""
    g = group(**MODES[mode])
    exchange("bf16_gauss", [[1, 1], [0, 0]], 1_000_000, rank, g)
    exchange("bf16_gauss", [[0, 0], [0, 0]], 1_000_000, rank, g)
    exchange("bf16_gauss", [[0, 1], [1, 0]], 1_000_000, rank, g)


# pytorch 101380
@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_seven_elements_do_not_split_in_two(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    with pytest.raises((ValueError, RuntimeError), match="(?i)divi"):
        dist.all_to_all_single(torch.empty(7, dtype=BF16), torch.ones(7, dtype=BF16), group=g)
    exchange("bf16_gauss", splits(2, "ragged"), 3, rank, g)


@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw", "auto"])
def test_wrong_split_sums_are_refused(rank: int, world_size: int, mode: str) -> None:
    g = group(**MODES[mode])
    x, out = torch.ones(9000, 4, dtype=BF16), torch.empty(9000, 4, dtype=BF16)
    for n_out, n_in in [
        ([4000, 4000], [4500, 4500]),
        ([4500, 4500], [4500, 4501]),
        ([9000], [4500, 4500]),
        ([4500, 4500], [3000, 3000, 3000]),
        ([10000, -1000], [4500, 4500]),
    ]:
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_to_all_single(out, x, n_out, n_in, group=g)
    exchange("bf16_gauss", splits(2, "ragged"), 3, rank, g)


# pytorch 88245
@only_zipccl
@ranks(2, 3, 4)
@pytest.mark.parametrize("mode", ["zip", "raw", "native", "auto"])
def test_lists_of_different_shapes(rank: int, world_size: int, mode: str) -> None:
    def tensor(i: int, j: int) -> torch.Tensor:
        shape = [(3, 5000), (20000,), (2, 2, 2500), ()][(i + 2 * j) % 4]
        n = torch.Size(shape).numel()
        return data("bf16_gauss", n, i, case=j).reshape(shape)

    got = [torch.ones_like(tensor(i, rank)) for i in range(world_size)]
    dist.all_to_all(got, [tensor(rank, j) for j in range(world_size)], group=group(**MODES[mode]))
    for i in range(world_size):
        assert_bits(got[i], tensor(i, rank), i)


# pytorch 192920, 74809
@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_list_form_takes_any_strides(rank: int, world_size: int, mode: str) -> None:
    n = 9000

    def column(t: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(n, 2, dtype=BF16)
        table[:, 1] = t
        return table[:, 1]

    sent = [column(data("bf16_gauss", n, rank, j)) for j in range(world_size)]
    tables = [torch.zeros(n, 2, dtype=BF16) for _ in range(world_size)]
    dist.all_to_all([t[:, 1] for t in tables], sent, group=group(**MODES[mode]))
    for i, table in enumerate(tables):
        assert_bits(table[:, 1], data("bf16_gauss", n, i, rank), i)
        assert table[:, 0].abs().sum() == 0


@ranks(2)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_single_form_on_strided_tensors(rank: int, world_size: int, mode: str) -> None:
    """Right, or refused in words."""
    x = torch.zeros(2 * 9000, 2, dtype=BF16)
    x[:, 1] = torch.cat([data("bf16_gauss", 9000, rank, j) for j in (0, 1)])
    out = torch.zeros(2 * 9000, dtype=BF16)
    try:
        dist.all_to_all_single(out, x[:, 1], group=group(**MODES[mode]))
    except (ValueError, RuntimeError) as e:
        assert "contiguous" in str(e)
    else:
        assert_bits(out, torch.cat([data("bf16_gauss", 9000, i, rank) for i in (0, 1)]))
    with pytest.raises((ValueError, RuntimeError), match="contiguous"):
        dist.all_to_all_single(x[:, 0], out, group=group(**MODES[mode]))


@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw"])
def test_storage_offset_of_one_element(rank: int, world_size: int, mode: str) -> None:
    for kind in ("bf16_gauss", "fp32_full"):
        for n in (1, 9, 8193):
            x = torch.empty(n * world_size + 1, dtype=KINDS[kind])[1:]
            x.copy_(torch.cat([data(kind, n, rank, j) for j in range(world_size)]))
            out = torch.zeros(n * world_size + 2, dtype=KINDS[kind])
            dist.all_to_all_single(out[1:-1], x, group=group(**MODES[mode]))
            assert_bits(out[1:-1], torch.cat([data(kind, n, r, rank) for r in range(world_size)]))
            assert out[0] == 0 and out[-1] == 0, "wrote beside the output"


@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("mode", ["zip", "raw", "segments"])
def test_in_place(rank: int, world_size: int, mode: str) -> None:
    """Input and output are one tensor: what was put in arrives, not what was overwritten meanwhile."""
    for kind in ("bf16_gauss", "bf16_escapes", "fp32_full"):
        x = torch.cat([data(kind, LARGE, rank, j) for j in range(world_size)])
        dist.all_to_all_single(x, x, group=group(**MODES[mode]))
        assert_bits(x, torch.cat([data(kind, LARGE, r, rank) for r in range(world_size)]), kind)


@only_zipccl
@ranks(2, 3, 4)
def test_modes_agree_on_every_kind(rank: int, world_size: int) -> None:
    for kind in KINDS:
        x = torch.cat([data(kind, LARGE, rank, j) for j in range(world_size)])
        results = []
        for mode in MODES:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x, group=group(**MODES[mode]))
            results.append(out)
        for out in results[1:]:
            assert_bits(out, results[0], kind)


@ranks(2, 3)
def test_dtypes_of_input_and_output_must_agree(rank: int, world_size: int) -> None:
    g = group(**MODES["zip"])
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        dist.all_to_all_single(torch.empty(world_size * 9000), torch.ones(world_size * 9000, dtype=BF16), group=g)
    exchange("bf16_gauss", splits(world_size, "ragged"), 3, rank, g)


@only_zipccl
@ranks(2, 3)
def test_lists_of_a_wrong_length_are_refused(rank: int, world_size: int) -> None:
    """An empty one too: there is no first tensor to learn the dtype from."""
    g = group(**MODES["zip"])

    def tensors(n: int) -> list[torch.Tensor]:
        return [torch.ones(9000, dtype=BF16) for _ in range(n)]

    w = world_size
    for n_out, n_in in ((w, 0), (0, w), (w, w - 1), (w - 1, w), (w, w + 1), (w + 1, w), (w + 1, w + 1)):
        with pytest.raises(ValueError, match="list|tensor"):
            dist.all_to_all(tensors(n_out), tensors(n_in), group=g)
            raise AssertionError(f"{n_out} outputs and {n_in} inputs were accepted")
    exchange("bf16_gauss", splits(world_size, "ragged"), 3, rank, g, form="list")
