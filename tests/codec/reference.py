"""Reference codec of the wire format: docs/format.md in numpy, for tests. Written to be read, not to be fast."""

from __future__ import annotations

import struct
from collections import namedtuple
from collections.abc import Sequence

import numpy as np

BYTES, BFLOAT16, FLOAT32 = 0, 1, 2  # dtype
WINDOW, WINDOW_AND_ZERO, RAW = 0, 1, 2  # mode
PLAIN, CHECKSUM = 1, 2  # flags
CHUNK, SUB_BLOCK, STRIDE, NO_LOW = 8192, 1024, 11264, 0xFFFFFFFF
VALUE = {BYTES: np.dtype("u1"), BFLOAT16: np.dtype("<u2"), FLOAT32: np.dtype("<u4")}
HEADER, CHUNK_HEADER = struct.Struct("<IHBBQQQQfIQQ"), struct.Struct("<HBBIQ8H")
Header = namedtuple(
    "Header",
    "magic version dtype flags elements pool_bytes inline_bytes low_bytes scale reserved0 checksum reserved1",
)
ChunkHeader = namedtuple("ChunkHeader", "elements top mode low pool_offset escape_end")


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def counts(n: int) -> list[int]:
    return [min(CHUNK, n - start) for start in range(0, n, CHUNK)]


def padded(m: int) -> int:
    return round_up(m, SUB_BLOCK)


def slot_bytes(m: int) -> int:
    return padded(m) * 3 // 8


def raw_pool_bytes(m: int) -> int:
    return max(0, m - slot_bytes(m))


def bodies_offset(n: int) -> int:
    return round_up(64 + 32 * -(-n // CHUNK), 128)


def pool_start(n: int) -> int:
    last = n - (n - 1) // CHUNK * CHUNK  # elements of the last chunk
    return 64 if n == 0 else bodies_offset(n) + (n - 1) // CHUNK * STRIDE + padded(last) * 11 // 8


def plain_bytes(n: int, dtype: int) -> int:
    return 64 if n == 0 else 128 + n * VALUE[dtype].itemsize


def word_sum(*parts: bytes) -> int:
    """Sum of the 64-bit words of each part, modulo 2^64; a last partial word is extended with zeros."""
    words = (np.frombuffer(part + bytes(-len(part) % 8), "<u8") for part in parts)
    return sum(int(w.sum(dtype=np.uint64)) for w in words) % 2**64


def codes_of(exponents: np.ndarray, top: int, mode: int) -> np.ndarray:
    below = np.uint8(top) - exponents  # modulo 256
    if mode == WINDOW:
        return np.where(below < 7, below + 1, 0).astype(np.uint8)
    return np.where(below < 6, below + 1, np.where(exponents == 0, 7, 0)).astype(np.uint8)


def exponents_of(codes: np.ndarray, top: int, mode: int) -> np.ndarray:
    table = np.array([0] + [(top - k) % 256 for k in range(7)], np.uint8)
    if mode == WINDOW_AND_ZERO:
        table[7] = 0
    return table[codes]


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sign-mantissas and exponents of an even number of bf16 patterns."""
    pairs = values.astype("<u2").view("<u4")
    rotated = (pairs << 1 | pairs >> 31).astype("<u4").view(np.uint8)
    return rotated[0::2], rotated[1::2]


def join(sign_mantissas: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    rotated = np.stack([sign_mantissas, exponents], 1).reshape(-1).view("<u4")
    return (rotated >> 1 | rotated << 31).astype("<u4").view("<u2")


def encode_chunk(values: np.ndarray, top: int, mode: int) -> tuple[bytes, bytes, list[int]]:
    """Body, pool bytes and escape_end of one chunk of bf16 patterns."""
    m = len(values)
    fill = np.full(padded(m) - m, 0 if mode == RAW else top << 7, np.uint16)
    sign_mantissas, exponents = split(np.concatenate([values, fill]))
    if mode == RAW:
        if top != 0:
            raise ValueError("a raw chunk has no top")
        slots = exponents[:m].tobytes()[: slot_bytes(m)].ljust(slot_bytes(m), b"\0")
        pool = exponents[:m].tobytes()[slot_bytes(m) :]
        return sign_mantissas.tobytes() + slots, pool, [0] * 7 + [len(pool)]
    codes = codes_of(exponents, top, mode)
    planes = b"".join(np.packbits(codes >> p & 1, bitorder="little").tobytes() for p in range(3))
    ends = np.cumsum((codes == 0).reshape(-1, SUB_BLOCK).sum(1)).tolist()
    if ends[-1] > raw_pool_bytes(m):
        raise ValueError("more escapes than the raw mode would put into the pool")
    return sign_mantissas.tobytes() + planes, exponents[codes == 0].tobytes(), (ends + ends[-1:] * 8)[:8]


def encode(
    values: np.ndarray,
    dtype: int,
    windows: Sequence[tuple[int, int]] | None,
    inline_bytes: int = 0,
    checksum: bool = False,
    scale: float = 1.0,
) -> tuple[bytes, bytes]:
    """Static and dynamic part; `values` are bit patterns, `windows` (top, mode) by chunk, None for a plain message."""
    n, flags, values = len(values), CHECKSUM * checksum, np.ascontiguousarray(values, VALUE[dtype])
    table, bodies, pool, low = b"", b"", b"", b""
    if windows is None:
        flags, inline_bytes = flags | PLAIN, 0
        table, bodies = bytes(plain_bytes(n, dtype) - 64 - values.nbytes), values.tobytes()
    else:
        high = values if dtype == BFLOAT16 else (values >> 16).astype("<u2")
        for k, (m, (top, mode)) in enumerate(zip(counts(n), windows, strict=True)):
            part = slice(k * CHUNK, k * CHUNK + m)
            body, escapes, escape_end = encode_chunk(high[part], top, mode)
            halves = (values[part] & 0xFFFF).astype("<u2") if dtype == FLOAT32 else np.zeros(0, "<u2")
            low_index = len(low) // 128 if halves.any() else NO_LOW
            table += CHUNK_HEADER.pack(m, top, mode, low_index, len(pool), *escape_end)
            bodies, pool = bodies + body, pool + escapes
            low += halves.tobytes().ljust(round_up(2 * m, 128), b"\0") if halves.any() else b""
        table = table.ljust(bodies_offset(n) - 64 if n else 0, b"\0")
    header = Header(0x4C43505A, 1, dtype, flags, n, len(pool), inline_bytes, len(low), scale, 0, 0, 0)
    return assemble(header, table + bodies, pool, low)


def assemble(header: Header, coded: bytes, pool: bytes, low: bytes) -> tuple[bytes, bytes]:
    """Both parts from a header without its checksum, chunk headers and bodies, pool, and low halves."""
    if header.flags & CHECKSUM:
        header = header._replace(checksum=word_sum(HEADER.pack(*header), coded, pool, low))
    overflow = pool[header.inline_bytes :]
    gap = bytes(-len(overflow) % 128) if low else b""
    inlined = pool[: header.inline_bytes].ljust(header.inline_bytes, b"\0")
    return HEADER.pack(*header) + coded + inlined, overflow + gap + low


def in_chunk_order(static: bytes, dynamic: bytes) -> tuple[bytes, bytes]:
    """The same message with pool and low halves in chunk order and without gaps, as `encode` makes it."""
    header = read_header(static)
    if header.flags & PLAIN:
        return static, dynamic
    table, pool, low = b"", b"", b""
    old_pool, old_low = pool_and_low(static, dynamic, header)
    for chunk in read_chunk_headers(static, header):
        low_index = NO_LOW if chunk.low == NO_LOW else len(low) // 128
        table += CHUNK_HEADER.pack(*chunk._replace(low=low_index, pool_offset=len(pool))[:5], *chunk.escape_end)
        pool += old_pool[chunk.pool_offset :][: chunk.escape_end[7]]
        if chunk.low != NO_LOW:
            low += old_low[128 * chunk.low :][: round_up(2 * chunk.elements, 128)]
    require((len(pool), len(low)) == (header.pool_bytes, header.low_bytes), "gaps or overlap")
    coded = table + static[64 + len(table) : pool_start(header.elements)]
    return assemble(header._replace(checksum=0), coded, pool, low)


def contiguous(static: bytes, dynamic: bytes) -> bytes:
    """One byte range from the parts of a message whose inline pool is exactly as long as its pool."""
    return static + bytes(-len(static) % 128) + dynamic if dynamic else static


def separate(message: bytes) -> tuple[bytes, bytes]:
    """The parts of a contiguous message."""
    header = read_header(message)
    size = static_bytes(header)
    return message[:size], message[round_up(size, 128) :] if header.low_bytes else b""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def static_bytes(header: Header) -> int:
    plain = header.flags & PLAIN
    return plain_bytes(header.elements, header.dtype) if plain else pool_start(header.elements) + header.inline_bytes


def read_header(static: bytes) -> Header:
    require(len(static) >= 64, "shorter than a header")
    header = Header(*HEADER.unpack(static[:64]))
    require(header.magic == 0x4C43505A, "magic")
    require(header.version == 1, f"version {header.version}")
    require(header.elements < 1 << 61, "elements")
    require(header.dtype in VALUE and not header.flags & ~(PLAIN | CHECKSUM), "unknown dtype or flags")
    require(header.reserved0 == header.reserved1 == 0, "reserved fields")
    require(header.flags & CHECKSUM or header.checksum == 0, "checksum without its flag")
    if header.flags & PLAIN:
        require(header.pool_bytes == header.inline_bytes == header.low_bytes == 0, "plain message with a pool")
    require(header.dtype != BYTES or header.flags & PLAIN, "bytes are always plain")
    # Bounds, in a form that costs nothing for a false `elements`: full chunks, then the last one.
    full, m = divmod(header.elements, CHUNK)
    low_bound = (2 * CHUNK * full + round_up(2 * m, 128)) * (header.dtype == FLOAT32)
    require(header.low_bytes % 128 == 0 and header.low_bytes <= low_bound, "low bytes")
    require(header.pool_bytes <= raw_pool_bytes(CHUNK) * full + raw_pool_bytes(m), "pool bytes")
    return header


def read_chunk_headers(static: bytes, header: Header) -> list[ChunkHeader]:
    rows = CHUNK_HEADER.iter_unpack(static[64 : 64 + 32 * len(counts(header.elements))])
    return [ChunkHeader(*row[:5], row[5:]) for row in rows]


def check_chunk(chunk: ChunkHeader, m: int, header: Header) -> None:
    escapes = chunk.escape_end[7]
    require(chunk.elements == m, "element count")
    require(chunk.mode in (WINDOW, WINDOW_AND_ZERO, RAW), "mode")
    raw = (0, (0,) * 7 + (raw_pool_bytes(m),))
    require(chunk.mode != RAW or (chunk.top, chunk.escape_end) == raw, "top or escape_end of a raw chunk")
    require(escapes <= raw_pool_bytes(m), "too many escapes")
    require(chunk.pool_offset + escapes <= header.pool_bytes, "escapes beyond the pool")
    if chunk.low != NO_LOW:
        require(128 * chunk.low + round_up(2 * m, 128) <= header.low_bytes, "low halves beyond their end")


def decode_chunk(body: np.ndarray, chunk: ChunkHeader, pool: np.ndarray) -> np.ndarray:
    m, size = chunk.elements, padded(chunk.elements)
    if chunk.mode == RAW:
        exponents = np.zeros(size, np.uint8)
        exponents[:m] = np.concatenate([body[size : size + slot_bytes(m)][:m], pool])
    else:
        planes = np.unpackbits(body[size:].reshape(3, -1), axis=1, bitorder="little")
        codes = planes[0] | planes[1] << 1 | planes[2] << 2
        ends = np.cumsum((codes == 0).reshape(-1, SUB_BLOCK).sum(1)).tolist()
        require(tuple((ends + ends[-1:] * 8)[:8]) == chunk.escape_end, "codes and escape_end disagree")
        exponents = exponents_of(codes, chunk.top, chunk.mode)
        exponents[codes == 0] = pool
    return join(body[:size], exponents)[:m]


def pool_and_low(static: bytes, dynamic: bytes, header: Header) -> tuple[bytes, bytes]:
    overflow = max(0, header.pool_bytes - header.inline_bytes)
    low_at = round_up(overflow, 128)
    require(len(dynamic) >= (low_at + header.low_bytes if header.low_bytes else overflow), "size of the dynamic part")
    pool = (static[pool_start(header.elements) :] + dynamic[:overflow])[: header.pool_bytes]
    return pool, dynamic[low_at : low_at + header.low_bytes]


def decode(static: bytes, dynamic: bytes = b"") -> tuple[np.ndarray, Header]:
    header = read_header(static)
    n, values_at = header.elements, 128 if header.elements else 64
    require(len(static) == static_bytes(header), "size of the static part")
    zeroed = static[:48] + bytes(8) + static[56:64]
    if header.flags & PLAIN:
        require(not header.flags & CHECKSUM or word_sum(zeroed, static[values_at:]) == header.checksum, "checksum")
        return np.frombuffer(static[values_at:], VALUE[header.dtype]), header
    pool, low = pool_and_low(static, dynamic, header)
    checked = header.flags & CHECKSUM
    require(not checked or word_sum(zeroed, static[64 : pool_start(n)], pool, low) == header.checksum, "checksum")
    out = np.zeros(n, VALUE[header.dtype])
    for k, (m, chunk) in enumerate(zip(counts(n), read_chunk_headers(static, header), strict=True)):
        check_chunk(chunk, m, header)
        at, part = bodies_offset(n) + k * STRIDE, slice(k * CHUNK, k * CHUNK + m)
        escapes = np.frombuffer(pool, np.uint8)[chunk.pool_offset :][: chunk.escape_end[7]]
        values = decode_chunk(np.frombuffer(static[at : at + padded(m) * 11 // 8], np.uint8), chunk, escapes)
        out[part] = values if header.dtype == BFLOAT16 else values.astype("<u4") << 16
        if chunk.low != NO_LOW:
            out[part] |= np.frombuffer(low, "<u2")[64 * chunk.low :][:m]
    return out, header
