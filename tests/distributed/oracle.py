"""What the collectives must give, in a few lines of PyTorch, and the data to show it with.

Every rank can make every rank's input (`data`), so a reference needs no communication.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

BF16, FP32 = torch.bfloat16, torch.float32

# dtypes that are never coded
NATIVE = [
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float16,
    torch.int64,
    torch.complex64,
    torch.float64,
]

# around the groups of 8, 64, 256 and the chunk of 8192 elements
SIZES = [0, 1, 7, 8, 9, 255, 257, 8191, 8193]

# every zipped call: (kind of data, dtype)
KINDS = {
    "bf16_gauss": BF16,
    "bf16_bits": BF16,
    "bf16_escapes": BF16,
    "bf16_zeros": BF16,
    "bf16_relu": BF16,
    "fp32_low_zero": FP32,
    "fp32_full": FP32,
    "fp32_bits": FP32,
    "fp32_mixed": FP32,
}

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def generator(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def random_bits(n: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Any bit pattern the dtype has."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (n,), generator=g, dtype=torch.uint8).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (n * size,), generator=g, dtype=torch.uint8).view(dtype)


def data(kind: str | torch.dtype, n: int, rank: int, case: object = "") -> torch.Tensor:
    """`n` elements that differ by rank and by position."""
    g = generator(str(kind), n, rank, case)
    if isinstance(kind, torch.dtype):
        return random_bits(n, kind, g)
    if kind.endswith("_bits"):
        return random_bits(n, KINDS[kind], g)
    gauss = torch.randn(n, generator=g) * 0.02
    if kind == "bf16_gauss":
        return gauss.bfloat16()
    if kind == "bf16_zeros":  # both zeros, and a few values that tell the ranks apart
        zeros = torch.where(torch.rand(n, generator=g) < 0.5, 0.0, -0.0).bfloat16()
        zeros[:: 97 + rank] = float(rank + 1)
        return zeros
    if kind == "bf16_relu":
        return gauss.relu().bfloat16()
    if kind == "bf16_escapes":
        # what a sample of one 64-element group in 8 sees is unlike everything else, so that nearly all is escapes
        far = random_bits(n, BF16, g)
        sampled = (torch.arange(n) // 64) % 8 == 0
        return torch.where(sampled, gauss.bfloat16().view(torch.int16), far.view(torch.int16)).view(BF16)
    if kind == "fp32_low_zero":  # bf16 gradients that are reduced in fp32
        return gauss.bfloat16().float()
    if kind == "fp32_full":
        return gauss
    if kind == "fp32_mixed":  # some chunks have low halves, others have none
        full = (torch.arange(n) // 8192) % 2 == 1
        return torch.where(full, gauss, gauss.bfloat16().float())
    raise ValueError(kind)


def small_integers(dtype: torch.dtype, n: int, rank: int) -> torch.Tensor:
    """Values whose sums are exact in any order and dtype."""
    return ((torch.arange(n) * 3 + 7 * rank) % 13).to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers, so that NaNs and signed zeros compare."""
    t = t.detach().contiguous()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_INT[t.element_size()]) if t.dtype != torch.bool else t.view(torch.uint8)


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    assert got.dtype == want.dtype, (what, got.dtype, want.dtype)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if torch.equal(bits(got), bits(want)):
        return
    wrong = (bits(got) != bits(want)).flatten().nonzero().flatten()
    at = int(wrong[0]) if wrong.numel() else -1
    raise AssertionError(
        f"{what}: {wrong.numel()} of {got.numel()} differ, first at {at}: "
        f"got {bits(got).flatten()[at].item():#x}, want {bits(want).flatten()[at].item():#x}"
    )


def assert_number(got: torch.Tensor, want: torch.Tensor, what: object = "") -> None:
    """Equal bits, but any NaN for a NaN: which payload a sum of NaNs keeps is the processor's choice."""
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaNs in other places"
    zero = torch.zeros((), dtype=got.dtype)
    assert_bits(torch.where(got.isnan(), zero, got), torch.where(want.isnan(), zero, want), what)


# ---------------------------------------------------------------------------------------------------------- reductions

REDUCTIONS = ["sum", "avg", "premul_sum", "min", "max"]


def factor(rank: int) -> float:
    """Of PREMUL_SUM: no power of two, not exact in fp32, another on each rank."""
    return 0.1 + 0.3 * rank


def reduce_op(name: str, rank: int = 0) -> dist.ReduceOp:
    if name == "premul_sum":
        return dist._make_nccl_premul_sum(factor(rank))
    return getattr(dist.ReduceOp, name.upper())


def reduced(
    inputs: list[torch.Tensor], op: str, hosts: list[list[int]] | None = None, partial: torch.dtype = FP32
) -> torch.Tensor:
    """fp32 accumulation in rank order inside each host, of hosts' `partial` sums in host order, and one rounding."""

    def accumulate(values: list[torch.Tensor]) -> torch.Tensor:
        acc = values[0]
        for v in values[1:]:
            if op == "min":
                acc = torch.where((v < acc) | v.isnan(), v, acc)
            elif op == "max":
                acc = torch.where((v > acc) | v.isnan(), v, acc)
            else:
                acc = acc + v
        return acc

    values = [t.float() for t in inputs]
    if op == "premul_sum":
        values = [v * torch.tensor(factor(rank), dtype=FP32) for rank, v in enumerate(values)]
    sums = [accumulate([values[rank] for rank in host]) for host in hosts or [list(range(len(inputs)))]]
    acc = accumulate([s.to(partial).float() for s in sums])
    if op == "avg":
        acc = acc / len(inputs)
    return acc.to(inputs[0].dtype)


# ------------------------------------------------------------------------------------------------------------- splits


def splits(world_size: int, case: str, unit: int = 1000) -> list[list[int]]:
    """splits[i][j]: how many rows rank i sends to rank j."""
    w = range(world_size)
    return {
        "even": [[unit] * world_size for _ in w],
        "ragged": [[(7 * i + 3 * j + 1) * unit // 4 for j in w] for i in w],
        "zeros": [[0] * world_size for _ in w],
        "some_zero": [[unit * ((i + j) % 2) for j in w] for i in w],
        "one_receiver": [[unit if j == 0 else 0 for j in w] for _ in w],
        "one_sender": [[unit if i == world_size - 1 else 0 for _ in w] for i in w],
        "only_self": [[unit if i == j else 0 for j in w] for i in w],
        "never_self": [[0 if i == j else unit for j in w] for i in w],
        "mixed_sizes": [[(1, 7, 9, 255, 257, 8191, 8193, 20000)[(3 * i + j) % 8] for j in w] for i in w],
    }[case]


SPLIT_CASES = [
    "even",
    "ragged",
    "zeros",
    "some_zero",
    "one_receiver",
    "one_sender",
    "only_self",
    "never_self",
    "mixed_sizes",
]
