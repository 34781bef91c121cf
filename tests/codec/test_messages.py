"""Messages: exact round trips, identical bytes from every coder, nothing written outside, and the sizes promised."""

import library
import numpy as np
import pytest
import reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library import BF16, BYTES, CHUNK, FP32

SIZES = [0, 1, 2, 7, 8, 9, 255, 257, 1023, 1024, 1025, 8191, 8192, 8193, 3 * 8192, 30_001]
SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F], np.uint16
)


def normal(n: int, sigma: float = 0.02, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * sigma).astype(np.float32)


def values_of(kind: str, n: int) -> np.ndarray:
    if kind == "random":
        return np.random.default_rng(n).integers(0, 65536, n).astype(np.uint16)
    if kind == "relu":
        return library.bf16(np.maximum(normal(n), 0))
    if kind == "zeros":
        return np.zeros(n, np.uint16)
    return library.bf16(normal(n))


def check_everywhere(values: np.ndarray, dtype: int, **options) -> tuple[bytes, bytes]:
    """All coders of the CPU write the same bytes, the GPU's the same but for its choices, and all read them."""
    parts = {library.encode(values, dtype, coder=coder, **options) for coder in library.cpu_coders()}
    assert len(parts) == 1
    messages = list(parts)
    if "cuda" in library.coders() and dtype != BYTES:
        messages.append(library.encode(values, dtype, coder="cuda", **options))
        check_choices(*messages)
    for static, dynamic in messages:
        for coder in library.coders() if dtype != BYTES else library.cpu_coders():
            assert (library.decode(static, dynamic, len(values), dtype, coder=coder) == values).all()
    return messages[0]


def check_choices(cpu: tuple[bytes, bytes], gpu: tuple[bytes, bytes]) -> None:
    """The GPU samples every chunk, where the CPU may keep the window of the one before, and has its own order in the
    pool and the low halves. Everything else is the same: `test_format` has the GPU's windows, too."""
    headers = [reference.read_header(static) for static, _ in (cpu, gpu)]
    free = {"pool_bytes": 0, "checksum": 0}
    assert headers[0]._replace(**free) == headers[1]._replace(**free)
    assert len(cpu[0]) == len(gpu[0])
    ordered = reference.in_chunk_order(*gpu)
    if windows(cpu[0]) == windows(gpu[0]):
        assert ordered == cpu
    else:
        assert headers[0].elements > CHUNK


def windows(static: bytes) -> list[tuple[int, int]]:
    header = reference.read_header(static)
    return [(c.top, c.mode) for c in reference.read_chunk_headers(static, header)] if not header.flags & 1 else []


def modes(static: bytes, n: int) -> list[int]:
    return [static[64 + 32 * chunk + 3] for chunk in range(-(-n // CHUNK))]


@pytest.mark.parametrize("kind", ["normal", "random", "relu", "zeros"])
@pytest.mark.parametrize("n", SIZES)
def test_bf16(n, kind):
    values = values_of(kind, n)
    for checksum in (False, True):
        static, _ = check_everywhere(values, BF16, checksum=checksum)
    assert len(static) == library.size("static_bytes", n, n // 24)
    if n >= 1024:
        assert modes(static, n)[0] == {"normal": 0, "random": 2, "relu": 1, "zeros": 0}[kind]


@pytest.mark.parametrize("low", ["zero", "random", "one chunk", "one bit"])
@pytest.mark.parametrize("n", SIZES)
def test_fp32(n, low):
    values = library.bf16(normal(n)).astype(np.uint32) << 16
    lows = np.random.default_rng(n).integers(0, 65536, n).astype(np.uint32)
    if low == "random":
        values |= lows
    elif low == "one chunk":
        values[CHUNK : 2 * CHUNK] |= lows[CHUNK : 2 * CHUNK]
    elif low == "one bit" and n:
        values[n // 2] |= 1
    for inline_bytes in (0, n // 40, n):
        static, dynamic = check_everywhere(values, FP32, inline_bytes=inline_bytes, checksum=True)
        header = np.frombuffer(static, np.uint64, 5, 0)
        slots = [
            2 * min(CHUNK, n - start)
            for start in range(0, n, CHUNK)
            if values[start : start + CHUNK].astype(np.uint16).any()
        ]
        assert header[4] == sum(-(-slot // 128) * 128 for slot in slots)
        assert len(dynamic) == library.size("dynamic_bytes", int(header[2]), inline_bytes, int(header[4]))


def test_special_values():
    for values in (
        SPECIAL,
        np.tile(SPECIAL, 1000),
        np.insert(library.bf16(normal(9000)), range(0, 9000, 700), SPECIAL),
    ):
        check_everywhere(values, BF16)
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FC01234, 0xFFFFFFFF, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32)
    check_everywhere(payloads, FP32)
    check_everywhere(np.tile(payloads, 2000), FP32)


def test_every_pattern_three_times_in_random_order():
    values = np.random.default_rng(5).permutation(np.tile(np.arange(65536, dtype=np.uint16), 3))
    static, dynamic = check_everywhere(values, BF16, inline_bytes=0)
    assert set(modes(static, len(values))) == {2}
    headers = 64 + 32 * 24 + 128
    assert len(static) + len(dynamic) <= 2 * len(values) + headers


def test_nothing_but_escapes():
    exponents = (np.arange(50_000) * 37 % 256).astype(np.uint16)
    check_everywhere(exponents << 7, BF16)
    check_everywhere(exponents << 7, BF16, tops=[130] * 7)


@pytest.mark.parametrize("inline_bytes", [0, 1, 7, 8, 127, 200, 255, 256, 300, 1000, 5119, 100_000])
def test_inline_pool_of_any_size(inline_bytes):
    """Escapes cross from the static part to the dynamic part at any byte, also inside a chunk and a raw chunk."""
    values = library.bf16(normal(40_000))
    values[CHUNK : 2 * CHUNK] = values_of("random", CHUNK)
    static, dynamic = check_everywhere(values, BF16, inline_bytes=inline_bytes, checksum=True)
    pool = int.from_bytes(static[16:24], "little")
    assert len(dynamic) == max(0, pool - inline_bytes)
    whole, nothing = library.encode(values, BF16, inline_bytes=pool)
    assert nothing == b""
    start = library.size("pool_offset", len(values))
    assert (static[start:] + dynamic)[:pool] == whole[start:] or inline_bytes > pool
    wide = values.astype(np.uint32) << 16 | 1
    check_everywhere(wide, FP32, inline_bytes=inline_bytes, checksum=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [1, 1000, 8192, 20_000])
def test_any_alignment(dtype, n, coder):
    values = normal(n).view(np.uint32)
    values = values if dtype == FP32 else library.bf16(values.view(np.float32))
    wanted = library.encode(values, dtype)
    for offset in (1, 3, 16):
        parts = library.encode(values, dtype, coder=coder, offset_elements=offset, output_offset=8 * offset)
        if coder == "cuda":
            check_choices(wanted, parts)
        else:
            assert parts == wanted
        back = library.decode(*wanted, n, dtype, coder=coder, offset_elements=offset, input_offset=8 * offset)
        assert (back == values).all()
        assert (library.decode(*wanted, n, dtype, coder=coder, input_offset=offset) == values).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [BYTES, BF16, FP32])
def test_plain(dtype, n):
    values = np.random.default_rng(n).integers(0, 256, n * [1, 2, 4][dtype]).astype(np.uint8).view(library.NUMPY[dtype])
    static, dynamic = check_everywhere(values, dtype, plain=True, checksum=True)
    assert dynamic == b""
    assert len(static) == library.size("plain_bytes", n, dtype)
    assert static[128:] == values.tobytes()
    assert library.encode_contiguous(values, dtype, plain=True, checksum=True) == static


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_contiguous(dtype, n):
    values = values_of("normal", n)
    values = values if dtype == BF16 else values.astype(np.uint32) << 16 | (np.arange(n) // CHUNK % 2).astype(np.uint32)
    for checksum in (False, True):
        messages = {library.encode_contiguous(values, dtype, checksum=checksum, coder=c) for c in library.cpu_coders()}
        assert len(messages) == 1
        message = messages.pop()
        if "cuda" in library.coders():
            gpu = library.encode_contiguous(values, dtype, checksum=checksum, coder="cuda")
            assert (library.decode_contiguous(gpu, n, dtype) == values).all()
            assert abs(len(gpu) - len(message)) <= len(message) / 100 and (len(gpu) == len(message) or n > CHUNK)
        assert (library.decode_contiguous(message, n, dtype) == values).all()
        pool, inline_bytes, low = np.frombuffer(message, np.uint64, 3, 16)
        assert inline_bytes == pool
        end = library.size("static_bytes", n, int(pool))
        assert len(message) == (-(-end // 128) * 128 + int(low) if low else end)


def test_given_windows_are_used_unless_they_fit_badly(coder):
    values = library.bf16(normal(4 * CHUNK))
    tops = [122, 123, 20, -1]
    check_everywhere(values, BF16, tops=tops)
    static, _ = library.encode(values, BF16, tops=tops, coder=coder)
    used = [static[64 + 32 * chunk + 2] for chunk in range(4)]
    assert used[:2] == tops[:2]
    assert used[2] == used[3] == library.library().api_window_top(0.02)


def test_escapes_are_counted_by_sub_block(coder):
    values = library.bf16(normal(10_000))
    static, _ = library.encode(values, BF16, coder=coder)
    for chunk, count in enumerate((8192, 1808)):
        header = static[64 + 32 * chunk :][:32]
        ends = np.frombuffer(header, np.uint16, 8, 16)
        distance = header[2] - (values[8192 * chunk :][:count] >> 7 & 0xFF).astype(np.int64)
        escaped = (distance < 0) | (distance > 6)
        assert ends.tolist() == [escaped[: 1024 * (k + 1)].sum() for k in range(8)]


def test_streaming_equals_cached(cpu_coder):
    """A message beyond the last-level cache, and the same in pieces that are not."""
    coder = cpu_coder
    if coder == "avx512" and not library.processor_has_avx512():
        pytest.skip("emulation is slow; test_chunks has the same kernels")
    n = (40 << 20) + 123
    piece = library.bf16(normal(1 << 20))
    values = np.resize(piece, n)
    static, dynamic = library.encode(values, BF16, coder=coder)
    assert (library.decode(static, dynamic, n, BF16, coder=coder) == values).all()
    small, _ = library.encode(values[: 100 * CHUNK], BF16, coder=coder)
    at = library.size("body_offset", n, 0)
    small_at = library.size("body_offset", 100 * CHUNK, 0)
    assert static[at : at + 100 * 11264] == small[small_at : small_at + 100 * 11264]


@pytest.mark.parametrize("n", [(1 << 31) + 7, 1 << 40])
def test_sizes_beyond_32_bits(n):
    chunks = -(-n // CHUNK)
    last = n - (chunks - 1) * CHUNK
    padded = -(-last // 1024) * 1024
    table = -(-(64 + 32 * chunks) // 128) * 128
    bodies_end = table + (chunks - 1) * 11264 + padded * 11 // 8
    raw_pool = (chunks - 1) * 5120 + max(0, last - padded * 3 // 8)
    low = (chunks - 1) * 16384 + -(-2 * last // 128) * 128
    inline_bytes = n // 24
    assert library.size("chunk_count", n) == chunks
    assert library.size("body_offset", n, chunks - 1) == table + (chunks - 1) * 11264
    assert library.size("pool_offset", n) == bodies_end
    assert library.size("static_bytes", n, inline_bytes) == bodies_end + inline_bytes
    assert library.size("plain_bytes", n, FP32) == 128 + 4 * n
    assert library.size("pool_bound", n) == raw_pool
    assert library.size("low_bound", n, FP32) == low
    rest = -(-(raw_pool - inline_bytes) // 128) * 128
    assert library.size("dynamic_bound", n, FP32, inline_bytes) == rest + low
    assert library.size("dynamic_bound", n, BF16, inline_bytes) == rest
    assert library.size("contiguous_bound", n, FP32) == -(-(bodies_end + raw_pool) // 128) * 128 + low


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_values(data):
    n = data.draw(st.one_of(st.integers(0, 3000), st.integers(0, 20_000)))
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    dtype = data.draw(st.sampled_from([BF16, FP32]))
    spread = data.draw(st.integers(1, 256))
    exponents = (data.draw(st.integers(0, 255)) + random.integers(0, spread, n)) % 256
    values = (exponents << 7 | random.integers(0, 2, n) << 15 | random.integers(0, 128, n)).astype(np.uint16)
    values[random.random(n) < data.draw(st.sampled_from([0, 0.01, 0.5]))] = 0
    if dtype == FP32:
        lows = random.integers(0, 65536, n) * (random.random(n) < data.draw(st.sampled_from([0, 0.0001, 1])))
        values = values.astype(np.uint32) << 16 | lows.astype(np.uint32)
    tops = data.draw(st.one_of(st.none(), st.lists(st.integers(-1, 255), min_size=3, max_size=3)))
    inline_bytes = data.draw(st.integers(0, 9000))
    check_everywhere(values, dtype, tops=tops, inline_bytes=inline_bytes, checksum=data.draw(st.booleans()))


def test_coder_names():
    lib = library.library()
    assert lib.api_set_coder(b"sse9") == -2
    text = lib.last_error().decode()
    assert "sse9" in text and "portable" in text
    for name in library.cpu_coders():
        assert lib.api_set_coder(name.encode()) == 0
        assert lib.api_coder_name() == name.encode()
    lib.api_set_coder(b"portable")
