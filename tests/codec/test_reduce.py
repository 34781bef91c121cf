"""Accumulation and the final rounding, against the same operations of numpy in fp32."""

import library
import numpy as np
import pytest
from library import BF16, FP32, MAX, MIN, STORE, SUM

SIZES = [0, 1, 9, 1024, 8193, 20_000]


def patterns(dtype: int, n: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(n)
    if kind == "any":
        return random.integers(0, 1 << (16 * dtype), n).astype(library.NUMPY[dtype])
    values = (random.standard_normal(n) * 0.02).astype(np.float32)
    return library.bf16(values) if dtype == BF16 else values.view(np.uint32)


def reference(values: np.ndarray, scale: float, reduction: int, accumulator: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        product = library.to_float(values) * np.float32(scale)
        if reduction == STORE:
            return product
        if reduction == SUM:
            return accumulator + product
        better = product < accumulator if reduction == MIN else product > accumulator
        return np.where(better | np.isnan(product), product, accumulator)


def assert_same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Bit for bit, but for the payloads of NaNs."""
    nan = np.isnan(wanted)
    assert (np.isnan(got) == nan).all()
    assert (got.view(np.uint32)[~nan] == wanted.view(np.uint32)[~nan]).all()


@pytest.mark.parametrize("reduction", [STORE, SUM, MIN, MAX])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("kind", ["normal", "any"])
def test_accumulate(coder, dtype, reduction, kind):
    for n in SIZES:
        values = patterns(dtype, n, kind)
        start = (np.random.default_rng(1).standard_normal(n) * 0.02).astype(np.float32)
        start[::97] = np.nan
        for scale in (1.0, 1 / 3):
            wanted = reference(values, scale, reduction, start)
            assert_same(
                library.accumulate_values(values, dtype, scale, reduction, start, coder=coder, offset_elements=1),
                wanted,
            )
            for plain in (False, True):
                message = library.encode(values, dtype, scale=scale, plain=plain, checksum=True)
                assert_same(library.accumulate(*message, dtype, reduction, start, coder=coder), wanted)


def test_product_and_sum_are_rounded_separately(coder):
    """A fused multiply-add would give other bits for most of these."""
    values = patterns(FP32, 10_000, "normal")
    start = -(library.to_float(values) * np.float32(1 / 3))
    for scale in (1 / 3, 0.1):
        wanted = start + library.to_float(values) * np.float32(scale)
        got = library.accumulate_values(values, FP32, scale, SUM, start, coder=coder)
        assert (got.view(np.uint32) == wanted.view(np.uint32)).all()


@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 300.0])
def test_finish(coder, divisor):
    random = np.random.default_rng(3)
    for n in SIZES:
        accumulator = random.integers(0, 1 << 32, n).astype(np.uint32)
        accumulator[::7] = accumulator[::7] & 0xFFFF0000 | 0x8000  # ties
        accumulator[::11] = 0x7F7FFFFF  # rounds to infinity
        accumulator[5::11] = 0xFF812345  # NaN
        with np.errstate(all="ignore"):
            wanted = accumulator.view(np.float32) / np.float32(divisor)
        assert (library.finish(accumulator.view(np.float32), divisor, BF16, coder=coder) == library.bf16(wanted)).all()
        assert_same(library.finish(accumulator.view(np.float32), divisor, FP32, coder=coder).view(np.float32), wanted)


def test_bytes_cannot_be_reduced(coder):
    with pytest.raises(RuntimeError, match="bf16 and fp32"):
        library.accumulate_values(np.zeros(4, np.uint8), library.BYTES, 1.0, SUM, np.zeros(4, np.float32), coder=coder)
