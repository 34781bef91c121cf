"""Windows: from sigma, from a sample, carried from chunk to chunk; and the sizes that come of them."""

import math

import library
import numpy as np
import pytest
from library import BF16, CHUNK, FP32


def window_top(sigma: float) -> int:
    return library.library().api_window_top(sigma)


def best_window(counts: np.ndarray) -> tuple[int, int]:
    counts = np.ascontiguousarray(counts, np.uint32)
    found = library.library().api_best_window(counts.ctypes.data)
    return found & 0xFF, found >> 8


def exponent_probabilities(sigma: float) -> np.ndarray:
    """Of the exponent fields 0 .. 255 of N(0, sigma^2)."""
    edges = [0.0] + [2.0 ** (field - 127) for field in range(1, 256)] + [math.inf]
    below = np.array([math.erf(edge / sigma / math.sqrt(2)) for edge in edges])
    return np.diff(below)


def normal(n: int, sigma: float, seed: int = 0) -> np.ndarray:
    return library.bf16(np.random.default_rng(seed).standard_normal(n) * sigma)


def chunk_windows(static: bytes, n: int) -> list[tuple[int, int]]:
    return [(static[64 + 32 * chunk + 2], static[64 + 32 * chunk + 3]) for chunk in range(-(-n // CHUNK))]


def escapes(static: bytes) -> int:
    return int.from_bytes(static[16:24], "little")


def fewest_escapes(values: np.ndarray, length: int = 7) -> int:
    counts = np.bincount(values >> 7 & 0xFF, minlength=256)
    return len(values) - max(counts[top + 1 - length : top + 1].sum() for top in range(length - 1, 256))


@pytest.mark.parametrize("sigma", [0.02 * 2 ** (k / 16) for k in range(16)] + [1.0, 1e-6, 1e6])
def test_sigma_gives_the_best_window_of_a_gaussian(sigma):
    chances = exponent_probabilities(sigma)
    covered = [chances[top - 6 : top + 1].sum() for top in range(6, 256)]
    top = window_top(sigma)
    assert covered[top - 6] > max(covered) - 1e-3
    assert 0.9695 < covered[top - 6] < 0.979
    assert 2.42 < 2.0 ** (top - 126) / sigma < 4.87


def test_sigma_zero_and_extremes():
    assert window_top(0.0) == 6  # there are no exponents below 0
    assert window_top(1e-45) == 6
    assert window_top(3e38) == 255


def test_best_window_counts_and_breaks_ties():
    counts = np.zeros(256, np.uint32)
    assert best_window(counts) == (6, 0)
    counts[100:110] = 1
    assert best_window(counts) == (106, 0)
    counts[0] = 2
    assert best_window(counts) == (105, 1)
    counts[0] = 1
    assert best_window(counts) == (106, 0)
    counts[:] = 0
    counts[255] = 1
    assert best_window(counts) == (255, 0)


@pytest.mark.parametrize("sigma", [0.02 * 2 ** (k / 8) for k in range(8)])
def test_sample_is_close_to_the_best_window(sigma, coder):
    values = normal(CHUNK, sigma)
    static, _ = library.encode(values, BF16, coder=coder)
    assert escapes(static) - fewest_escapes(values) <= 0.005 * CHUNK


def ratio(values: np.ndarray, dtype: int, coder: str) -> float:
    return len(library.encode_contiguous(values, dtype, coder=coder)) / values.nbytes


def test_ratios(coder):
    n = 64 * CHUNK
    assert ratio(normal(n, 0.02), BF16, coder) < 0.7035
    assert max(ratio(normal(n, 0.02 * 2 ** (k / 8)), BF16, coder) for k in range(8)) < 0.709
    relu = library.bf16(np.maximum(np.random.default_rng(0).standard_normal(n), 0))
    assert ratio(relu, BF16, coder) < 0.71
    assert ratio(normal(n, 0.02).astype(np.uint32) << 16, FP32, coder) < 0.353
    assert (
        ratio((np.random.default_rng(0).standard_normal(n) * 0.02).astype(np.float32).view(np.uint32), FP32, coder)
        < 0.853
    )


def test_window_follows_the_data(coder):
    """Layers one behind the other, with scales far apart, as in a flattened bucket."""
    sigmas = [1e-3, 1e-3 * 1.4, 0.3, 1e-5, 2e-5, 5.0, 1e-4, 0.9e-4]
    values = np.concatenate([normal(3 * CHUNK + 1000, sigma, seed) for seed, sigma in enumerate(sigmas)])
    static, _ = library.encode(values, BF16, coder=coder)
    best = sum(fewest_escapes(values[start : start + CHUNK]) for start in range(0, len(values), CHUNK))
    assert escapes(static) - best < 0.006 * len(values)


def test_mode_follows_the_data(coder):
    values = normal(8 * CHUNK, 0.02)
    values[2 * CHUNK : 4 * CHUNK][::2] = 0
    values[5 * CHUNK : 6 * CHUNK] = np.random.default_rng(0).integers(0, 65536, CHUNK)
    static, _ = library.encode(values, BF16, coder=coder)
    assert [mode for _, mode in chunk_windows(static, len(values))] == [0, 0, 1, 1, 0, 2, 0, 0]


def test_steady_data_keeps_its_window(cpu_coder):
    values = normal(200 * CHUNK, 0.02)
    static, _ = library.encode(values, BF16, coder=cpu_coder)
    assert len(set(chunk_windows(static, len(values)))) == 1


def outside(values: np.ndarray, window: int) -> int:
    """How many of these values a given window leaves without a code."""
    exponents = (values >> 7 & 0xFF).astype(int)
    zeros = window & 0x100
    coded = (window - exponents) % 256 < (6 if zeros else 7)
    return int((~(coded | ((exponents == 0) & bool(zeros)))).sum())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [1, 1000, 1024, 3000, CHUNK, CHUNK + 1, 6 * CHUNK, 7 * CHUNK + 777])
def test_plan_says_what_encode_does(n: int, dtype: int, coder: str) -> None:
    """Windows that fit, that do not, and none; Gaussian, zeros, random bits."""
    random = np.random.default_rng(n)
    values = normal(n, 0.02, n)
    values[2 * CHUNK : 3 * CHUNK][::2] = 0
    values[3 * CHUNK : 4 * CHUNK] = random.integers(0, 1 << 16, len(values[3 * CHUNK : 4 * CHUNK]), np.uint16)
    wide = values.astype(np.uint32) << 16 | 1 if dtype == FP32 else values
    fits = window_top(0.02)
    given = [fits, 20, -1, fits, fits | 0x100, fits, fits - 40, fits][: -(-n // CHUNK)]
    windows, escapes = library.plan(wide, dtype, given)
    for chunk, (before, window, count) in enumerate(zip(given, windows, escapes, strict=True)):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        kept = 0 <= before and outside(part, before) <= len(part) // 16
        assert (window == before) == kept
        assert kept or window & 0x200, "a sample's window is to be kept"
        padded = -(-len(part) // 1024) * 1024
        assert count == min(outside(part, window), len(part) - min(len(part), 3 * padded // 8))
    static, dynamic = library.encode(wide, dtype, tops=windows, inline_bytes=sum(escapes), coder=coder)
    assert int.from_bytes(static[16:24], "little") == sum(escapes), "all of them are inline, and fill the pool"
    assert (library.decode(static, dynamic, n, dtype, coder=coder) == wide).all()


def test_a_window_with_zeros_can_be_given(coder: str) -> None:
    values = normal(2 * CHUNK, 0.02)
    values[::3] = 0
    top = window_top(0.02)
    static, _ = library.encode(values, BF16, tops=[top | 0x100] * 2, coder=coder)
    assert chunk_windows(static, len(values)) == [(top, 1)] * 2
