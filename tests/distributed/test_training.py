"""Training over zipccl: DDP, FSDP2, a mixture of experts. Losses and gradients are those over Gloo, bit for bit."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from multirank import BACKEND, group, only_zipccl, ranks
from oracle import BF16, FP32, assert_bits, reduced, small_integers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

ZIP = dict(mode="zip", min_bytes=0)
RAW = dict(mode="raw", min_bytes=0)
VOCABULARY, WIDTH, LENGTH = 128, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=g)
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def fsdp_losses(
    mesh: DeviceMesh, rank: int, steps: int, divide_factor: float | None = None, reshard: bool = True
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of every step, and this rank's shards of all parameters afterwards."""
    model = model_of()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    if divide_factor is not None:
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(divide_factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.to_local().detach().clone() for p in model.parameters()]


def mesh_over(options: dict | None, world_size: int) -> DeviceMesh:
    g = group(**options) if options is not None else group(backend="gloo")
    return DeviceMesh.from_group(g, "cpu", mesh=torch.arange(world_size))


def assert_same(a: tuple, b: tuple) -> None:
    assert a[0] == b[0], [(i, x, y) for i, (x, y) in enumerate(zip(a[0], b[0], strict=True)) if x != y]
    for p, q in zip(a[1], b[1], strict=True):
        assert_bits(p, q)


@pytest.mark.core
@ranks(2)
def test_fsdp2_equals_gloo_over_20_steps(rank: int, world_size: int) -> None:
    over_gloo = fsdp_losses(mesh_over(None, world_size), rank, 20)
    assert over_gloo[0][-1] < over_gloo[0][0]
    assert_same(fsdp_losses(mesh_over(ZIP, world_size), rank, 20), over_gloo)
    if BACKEND == "zipccl":
        import zipccl

        stats = zipccl.stats(group(**ZIP))
        assert stats["all_gather"]["zipped"] > 0 and stats["reduce_scatter"]["zipped"] > 0
        for name, bound in (("all_gather", 0.85), ("reduce_scatter", 0.5)):  # small layers, many headers
            assert stats[name]["wire_bytes"] < bound * stats[name]["raw_bytes"], (name, stats[name])


# DeepSpeed 4852, 6926
@only_zipccl
@ranks(2, 3)
def test_fsdp2_is_the_same_with_compression_on_and_off(rank: int, world_size: int) -> None:
    steps = 20 if world_size == 2 else 6
    raw = fsdp_losses(mesh_over(RAW, world_size), rank, steps)
    assert_same(fsdp_losses(mesh_over(ZIP, world_size), rank, steps), raw)
    segments = fsdp_losses(mesh_over(dict(ZIP, segment_bytes=8192), world_size), rank, 3)
    assert segments[0] == raw[0][:3]


# pytorch 155903
@only_zipccl
@ranks(2, 3)
def test_fsdp2_with_a_divide_factor(rank: int, world_size: int) -> None:
    """300 becomes PREMUL_SUM, which Gloo refuses."""
    raw = fsdp_losses(mesh_over(RAW, world_size), rank, 4, divide_factor=300.0)
    assert_same(fsdp_losses(mesh_over(ZIP, world_size), rank, 4, divide_factor=300.0), raw)


@only_zipccl
@ranks(4, **ZIP)
def test_hybrid_sharding_on_a_two_dimensional_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    losses, _ = fsdp_losses(mesh, rank, 4)
    assert losses == fsdp_losses(mesh, rank, 4)[0], "not deterministic"
    flat, _ = fsdp_losses(mesh_over(RAW, world_size), rank, 4)
    assert losses == pytest.approx(flat, rel=2e-2)


@ranks(2)
def test_fsdp2_without_resharding_and_with_gradient_accumulation(rank: int, world_size: int) -> None:
    runs = []
    for options in (None, ZIP):
        model = model_of()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh_over(options, world_size), reshard_after_forward=False)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            loss_of(model, step, rank).backward()
        runs.append([p.grad.to_local() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        assert_bits(a, b)


# torchcomms 688
@pytest.mark.core
@ranks(2)
@pytest.mark.parametrize("static", [False, True])
def test_ddp_gradients_equal_those_over_gloo(rank: int, world_size: int, static: bool) -> None:
    runs = []
    for g in (group(backend="gloo"), group(**ZIP)):
        model = DistributedDataParallel(model_of(rank), process_group=g, static_graph=static, bucket_cap_mb=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradients = []
        for step in range(2):
            loss_of(model, step, rank).backward()
            gradients += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        runs.append(gradients)
    for a, b in zip(*runs, strict=True):
        assert_bits(a, b)


@only_zipccl
@ranks(2)
def test_ddp_with_a_bf16_hook_and_uneven_inputs(rank: int, world_size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = DistributedDataParallel(model_of(), process_group=group(**ZIP))
    model.register_comm_hook(group(**ZIP), bf16_compress_hook)
    loss_of(model, 0, rank).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    plain = DistributedDataParallel(model_of(), process_group=group(**ZIP))
    with plain.join():
        for step in range(2 + rank):
            loss_of(plain, step, rank).backward()


# ------------------------------------------------------------------------------------------------ mixture of experts


class Exchange(torch.autograd.Function):
    """Rows to their experts; backwards the gradients to where the rows came from."""

    @staticmethod
    def forward(ctx, x, n_out, n_in, g):
        ctx.splits, ctx.group = (n_out, n_in), g
        out = x.new_empty(sum(n_out), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), n_out, n_in, group=g)
        return out

    @staticmethod
    def backward(ctx, gradient):
        n_out, n_in = ctx.splits
        return Exchange.apply(gradient, n_in, n_out, ctx.group), None, None, None


WIDE = 256


def tokens_of(rank: int, count: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(77 + rank)
    return torch.randn(count, WIDE, generator=g).bfloat16().float()


def expert_of(rank: int) -> nn.Linear:
    torch.manual_seed(500 + rank)
    return nn.Linear(WIDE, WIDE)


def moe_step(rank: int, routes: list[list[int]], g: dist.ProcessGroup, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """routes[r][t] is the expert of token t of rank r. Returns outputs and gradients of tokens and expert."""
    w = len(routes)
    x = tokens_of(rank, len(routes[rank])).to(dtype).requires_grad_()
    route = torch.tensor(routes[rank], dtype=torch.int64)
    order = torch.argsort(route, stable=True)
    n_in = torch.bincount(route, minlength=w)
    n_out = torch.empty_like(n_in)
    dist.all_to_all_single(n_out, n_in, group=g)  # counts, as frameworks do
    n_in, n_out = n_in.tolist(), n_out.tolist()
    assert n_out == [sum(1 for e in routes[r] if e == rank) for r in range(w)]
    expert = expert_of(rank).to(dtype)
    at_expert = Exchange.apply(x[order], n_out, n_in, g)
    back = Exchange.apply(expert(at_expert), n_in, n_out, g)
    out = torch.zeros_like(x).index_copy(0, order, back)
    (out * out).sum().backward()
    return out.detach(), x.grad, expert.weight.grad, expert.bias.grad


def moe_oracle(rank: int, routes: list[list[int]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The same in one process: each expert sees its tokens in the order of their ranks."""
    w = len(routes)
    xs = [tokens_of(r, len(routes[r])).to(dtype).requires_grad_() for r in range(w)]
    outs = [torch.zeros(len(routes[r]), WIDE, dtype=dtype) for r in range(w)]
    experts = [expert_of(e).to(dtype) for e in range(w)]
    for e in range(w):
        where = [torch.tensor([t for t, to in enumerate(routes[r]) if to == e], dtype=torch.int64) for r in range(w)]
        done = experts[e](torch.cat([xs[r][where[r]] for r in range(w)]))
        for r, part in enumerate(done.split([len(i) for i in where])):
            outs[r] = outs[r].index_copy(0, where[r], part)
    sum((o * o).sum() for o in outs).backward()
    return outs[rank].detach(), xs[rank].grad, experts[rank].weight.grad, experts[rank].bias.grad


# Megatron 1877, 4851
@pytest.mark.core
@ranks(2)
def test_all_tokens_to_one_expert_equals_gloo(rank: int, world_size: int) -> None:
    routes = [[0] * 300, [0] * 200]
    over_gloo = moe_step(rank, routes, group(backend="gloo"), FP32)
    for a, b in zip(moe_step(rank, routes, group(**ZIP), FP32), over_gloo, strict=True):
        assert_bits(a, b)


def imbalanced(case: str, w: int) -> list[list[int]]:
    count = 120
    return {
        "hot_expert": [[0 if t % 8 else (t // 8) % w for t in range(count)] for _ in range(w)],
        "hot_rank": [[t % w for t in range(count * (5 if r == 0 else 1))] for r in range(w)],
        "ragged_source": [[(t * t + r) % w for t in range(1 + 37 * r)] for r in range(w)],
        "rank_without_tokens": [[t % w for t in range(0 if r == w - 1 else count)] for r in range(w)],
        "expert_without_tokens": [[t % max(1, w - 1) for t in range(count)] for _ in range(w)],
        "burst": [[r if t < 450 else (r + 1) % w for t in range(500)] for r in range(w)],
        "nobody_has_tokens": [[] for _ in range(w)],
    }[case]


# Megatron 7488
@only_zipccl
@ranks(2, 3)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    "case",
    [
        "hot_expert",
        "hot_rank",
        "ragged_source",
        "rank_without_tokens",
        "expert_without_tokens",
        "burst",
        "nobody_has_tokens",
    ],
)
def test_imbalance_equals_one_process(rank: int, world_size: int, case: str, dtype: torch.dtype) -> None:
    routes = imbalanced(case, world_size)
    want = moe_oracle(rank, routes, dtype)
    for options in (ZIP, RAW):
        for a, b in zip(moe_step(rank, routes, group(**options), dtype), want, strict=True):
            assert_bits(a, b, case)


@ranks(2)
def test_optimizer_state_gathers(rank: int, world_size: int) -> None:
    """What a checkpoint does: full tensors of every shard."""
    model = model_of()
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=mesh_over(ZIP, world_size))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert_bits(p.full_tensor(), q.detach())


@only_zipccl
@ranks(3)
def test_sums_of_gradients_are_in_rank_order(rank: int, world_size: int) -> None:
    terms = [small_integers(FP32, 9000, r) * 1.1 for r in range(3)]
    out = torch.empty(3000)
    dist.reduce_scatter_tensor(out, terms[rank], group=group(**ZIP))
    assert_bits(out, reduced([t[rank * 3000 : (rank + 1) * 3000] for t in terms], "sum"))
    assert_bits(out, functools.reduce(torch.add, [t[rank * 3000 : (rank + 1) * 3000] for t in terms]))
