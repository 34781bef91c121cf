"""Code windows from the parameters' standard deviations: `zipccl.attach` and `zipccl.known_sigma`."""

from __future__ import annotations

import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from multirank import fresh_group, group, only_zipccl, ranks
from oracle import BF16, FP32, assert_bits, data
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zipccl
from zipccl import _C, layers

pytestmark = only_zipccl
ZIP = dict(mode="zip", min_bytes=0)
WIDTH = 256


class Net(nn.Module):
    """Layers whose sigma lies octaves apart, next to each other in what FSDP gathers."""

    def __init__(self, depth: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList()
        for i in range(depth):
            block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            for k, layer in enumerate(block[:2]):
                nn.init.normal_(layer.weight, std=0.02 * 8.0 ** (k - i))
                nn.init.normal_(layer.bias, std=0.5)
            self.blocks.append(block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded(g: dist.ProcessGroup, dtype: torch.dtype = BF16, depth: int = 2) -> Net:
    torch.manual_seed(0)
    model = Net(depth)
    mesh = DeviceMesh.from_group(g, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int, rank: int) -> float:
    torch.manual_seed(100 * index + rank)
    loss = model(torch.randn(4, WIDTH)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def gathered(parameter: nn.Parameter) -> torch.Tensor:
    """The whole of a parameter that is cut into equal shards."""
    local = parameter.to_local().detach()
    whole = torch.empty(parameter.shape, dtype=local.dtype)
    dist.all_gather_into_tensor(whole, local.contiguous(), group=group(backend="gloo"))
    return whole


def best_message_bytes(values: torch.Tensor) -> int:
    """A message of bf16 values in which each chunk has its best window of 7, by looking at all its exponents."""
    size = 128
    for chunk in values.view(torch.int16).int().bitwise_right_shift(7).bitwise_and(0xFF).split(8192):
        counts = torch.bincount(chunk, minlength=256)
        escapes = len(chunk) - max(int(counts[top - 6 : top + 1].sum()) for top in range(6, 256))
        padded = -(-len(chunk) // 1024) * 1024
        size += 32 + padded + 3 * padded // 8 + min(escapes, len(chunk))
    return size


@pytest.mark.core
@ranks(2, 4)
def test_fsdp2_gathers_without_samples_and_with_exactly_the_room(rank: int, world_size: int) -> None:
    runs = []
    for attached in (False, True):
        with fresh_group(**ZIP) as g:
            model = sharded(g)
            found = zipccl.attach(model) if attached else None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = [step(model, optimizer, 0, rank)]
            zipccl.reset_stats(g)
            losses += [step(model, optimizer, i, rank) for i in range(1, 4)]
            stats = zipccl.stats(g)["all_gather"]
            runs.append((losses, [p.to_local().clone() for p in model.parameters()]))
            if found is None:
                assert stats["sampled_chunks"] > 0
                continue
            assert stats["sampled_chunks"] == 0 and stats["dynamic_bytes"] == 0 and stats["zipped"] == stats["calls"]
            assert zipccl.stats(g)["all_reduce"]["calls"] == 3, "one small all-reduce a step"
            found.detach()
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert_bits(a, b)


@ranks(2)
def test_the_ratio_is_that_of_the_best_windows(rank: int, world_size: int) -> None:
    """Within half a percent, on parameters that are long enough for rounding up to 128 bytes not to matter."""
    with fresh_group(**ZIP) as g:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        for i, layer in enumerate(model):
            nn.init.normal_(layer.weight, std=0.01 * 1.31**i)
        mesh = DeviceMesh.from_group(g, "cpu")
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        zipccl.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(2):
            zipccl.reset_stats(g)
            before = torch.cat([p.to_local().detach().bfloat16().view(-1) for p in model.parameters()])
            model(torch.randn(4, 1024)).square().mean().backward()
            optimizer.step()
        stats = zipccl.stats(g)["all_gather"]
        assert stats["calls"] in (1, 2)
        best = stats["calls"] * best_message_bytes(before)
        assert stats["wire_bytes"] < 1.005 * best, (stats["wire_bytes"], best)


@ranks(2)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_layer_that_grows_over_octaves(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """100 steps: what is gathered is right each time, and what escapes is few again with every step's count."""
    with fresh_group(**ZIP) as g:
        model = sharded(g, dtype, depth=1)
        found = zipccl.attach(model, refresh_steps=1000)
        weight = model.blocks[0][0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        octaves = []
        for index in range(100):
            with torch.no_grad():
                weight.to_local().mul_(1.06)
            optimizer.step()
            zipccl.reset_stats(g)
            whole = gathered(weight).to(dtype)
            seen = []
            hook = model.blocks[0].register_forward_pre_hook(
                lambda module, _, seen=seen: seen.append(module[0].weight.detach().clone())
            )
            model(torch.randn(1, WIDTH))
            hook.remove()
            assert_bits(seen[0], whole)
            model.blocks[0].reshard()
            layer = found["blocks.0.0.weight"]
            octaves.append(layer.window[-1])
            if index:
                assert layer.observed < 0.04, f"step {index}: {layer}"
        assert octaves[-1] - octaves[0] >= 7


@ranks(2)
def test_refresh_by_steps(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        model = sharded(g)
        found = zipccl.attach(model, refresh_steps=3)
        weight = model.blocks[0][0].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        layer = found["blocks.0.0.weight"]
        sigma = layer.sigma
        seen = []
        for _ in range(6):
            with torch.no_grad():
                weight.to_local().mul_(1.01)  # too little for its window to move
            optimizer.step()
            seen.append(layer.sigma)
        assert seen[:2] == [sigma] * 2 and seen[2] == pytest.approx(sigma * 1.01**3, rel=1e-5)
        assert seen[3:5] == [seen[2]] * 2 and seen[5] == pytest.approx(sigma * 1.01**6, rel=1e-5)


@ranks(2)
def test_plain_parameters_by_their_memory(rank: int, world_size: int) -> None:
    """As a distributed optimizer has them: parameters are views of one buffer, of which ranks gather shards."""
    with fresh_group(**ZIP) as g:
        torch.manual_seed(0)
        model = Net().bfloat16()
        whole = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        assert whole.numel() % world_size == 0
        buffer = whole.clone()
        nn.utils.vector_to_parameters(buffer, model.parameters())
        found = zipccl.attach(model)
        shard = buffer.chunk(world_size)[rank]
        out = torch.zeros_like(buffer)
        for _ in range(2):
            dist.all_gather_into_tensor(out, shard, group=g)
            assert_bits(out, whole)
        stats = zipccl.stats(g)["all_gather"]
        chunks = -(-shard.numel() // 8192)
        assert stats["sampled_chunks"] < chunks / 4 * 2, "only where small layers meet"
        zipccl.reset_stats(g)
        found.detach()
        dist.all_gather_into_tensor(out, shard, group=g)
        assert zipccl.stats(g)["all_gather"]["sampled_chunks"] > 0


@ranks(2)
def test_plain_parameters_move(rank: int, world_size: int) -> None:
    model = nn.Linear(512, 512).bfloat16()
    found = zipccl.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    layer = found["weight"]
    optimizer.step()
    assert layer.observed < 0.04
    with torch.no_grad():
        model.weight.mul_(64)
    sigma = layer.sigma
    optimizer.step()
    assert layer.sigma == pytest.approx(64 * sigma, rel=1e-3) and layer.observed < 0.04
    # An optimizer of copies in fp32 moves what no optimizer holds.
    other = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.0)
    with torch.no_grad():
        model.weight.mul_(64)
    other.step()
    assert layer.sigma == pytest.approx(4096 * sigma, rel=1e-3)


@pytest.mark.core
@ranks(2)
def test_detach_and_attach_again(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        model = sharded(g)
        groups = [m._get_fsdp_state()._fsdp_param_group for m in (*model.blocks, model)]
        before = [g._all_gather_comm for g in groups if g]
        first = zipccl.attach(model)
        assert all(isinstance(g._all_gather_comm, layers._LayersGather) for g in groups if g)
        second = zipccl.attach(model)
        assert all(g._all_gather_comm.inner in before for g in groups if g), "one in another"
        first.detach()
        assert all(isinstance(g._all_gather_comm, layers._LayersGather) for g in groups if g)
        second.detach()
        second.detach()
        assert [g._all_gather_comm for g in groups if g] == before


@ranks(2)
def test_what_is_attached_ends_with_its_model(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        for make in (lambda: sharded(g), lambda: nn.Linear(8, 8)):
            model = make()
            found = weakref.ref(zipccl.attach(model))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            optimizer.step()
            assert found() is not None
            del model, optimizer
            gc.collect()
            assert found() is None


@ranks(2)
def test_without_the_private_parts_of_fsdp(rank: int, world_size: int) -> None:
    missing = AttributeError("'FSDPParam' object has no attribute '_sharded_param_data'")
    with fresh_group(**ZIP) as g:
        model = sharded(g)
        with (
            mock.patch.object(layers._LayersGather, "runs", side_effect=missing),
            mock.patch.object(layers, "_said", set()),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            zipccl.attach(model)
            zipccl.attach(model)
        assert len([w for w in said if "samples choose windows" in str(w.message)]) == 1, "said once"
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for index in range(2):
            step(model, optimizer, index, rank)
        assert zipccl.stats(g)["all_gather"]["sampled_chunks"] > 0


@ranks(2)
def test_another_backends_gathers_are_left_alone(rank: int, world_size: int) -> None:
    model = sharded(group(backend="gloo"))
    found = zipccl.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model, optimizer, 0, rank)
    state = model.blocks[0]._get_fsdp_state()
    assert not isinstance(state._fsdp_param_group._all_gather_comm, layers._LayersGather)
    assert len(found) == len(list(model.parameters()))


@ranks(2)
def test_the_table(rank: int, world_size: int) -> None:
    with fresh_group(**ZIP) as g:
        model = sharded(g)
        nn.init.zeros_(model.blocks[0][0].bias)
        found = zipccl.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for index in range(2):
            step(model, optimizer, index, rank)
    layer = found["blocks.1.0.weight"]
    own = dict(model.named_parameters())["blocks.1.0.weight"].to_local()
    assert layer.sigma == pytest.approx(own.square().mean().sqrt().item(), rel=1e-2)
    assert layer.window == zipccl.window(layer.sigma)
    assert 0.02 < layer.predicted < 0.031 and layer.observed == pytest.approx(layer.predicted, abs=0.01)
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found) and all(part in lines[0] for part in ("sigma", "window", "predicted"))
    assert any(line.startswith("blocks.1.0.weight ") and f"{layer.window[-1]}" in line for line in lines)
    with pytest.raises(KeyError):
        found["nothing"]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "10"])
def test_refresh_steps_are_checked(steps: object) -> None:
    with pytest.raises(ValueError, match=r"refresh_steps=.* expected 1 or more"):
        zipccl.attach(nn.Linear(2, 2), refresh_steps=steps)


# ---------------------------------------------------------------------------------------------------------- activations


@pytest.mark.core
@ranks(2, 3)
def test_known_sigma(rank: int, world_size: int) -> None:
    n = 50_000
    with fresh_group(**ZIP) as g:
        out = torch.empty(n * world_size, dtype=BF16)
        want = torch.cat([data("bf16_gauss", n, r) for r in range(world_size)])
        rows = torch.cat([data("bf16_gauss", n, rank, j) for j in range(world_size)])
        wanted_rows = torch.cat([data("bf16_gauss", n, r, rank) for r in range(world_size)])
        with zipccl.known_sigma(0.02):
            dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank), group=g)
            assert_bits(out, want)
            dist.all_to_all_single(out, rows, group=g)
            assert_bits(out, wanted_rows)
        stats = zipccl.stats(g)
        assert stats["all_gather"]["sampled_chunks"] == stats["all_to_all"]["sampled_chunks"] == 0
        dist.all_to_all_single(out, rows, group=g)
        assert zipccl.stats(g)["all_to_all"]["sampled_chunks"] > 0, "only in the block"
        zipccl.reset_stats(g)
        with zipccl.known_sigma(1e-6):  # far off: samples come in
            dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank), group=g)
        assert_bits(out, want)
        stats = zipccl.stats(g)["all_gather"]
        assert stats["sampled_chunks"] > 0 and stats["wire_bytes"] < 0.75 * stats["raw_bytes"]
    with fresh_group(**ZIP, window="sample") as g, zipccl.known_sigma(0.02):
        dist.all_gather_into_tensor(out, data("bf16_gauss", n, rank), group=g)
        assert_bits(out, want)
        assert zipccl.stats(g)["all_gather"]["sampled_chunks"] > 0
    with pytest.raises(ValueError, match="sigma=-1.0 is not allowed"), zipccl.known_sigma(-1.0):
        pass


@ranks(2)
def test_escapes_beyond_what_was_agreed(rank: int, world_size: int) -> None:
    """They travel in the second phase: nothing is lost because a parameter changed behind our back."""
    with fresh_group(**ZIP) as g:
        model = sharded(g)
        zipccl.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for index in range(2):
            step(model, optimizer, index, rank)
        model.blocks[0].unshard()  # counts
        model.blocks[0].reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local()
                local.copy_(data("fp32_bits", local.numel(), rank).view_as(local))
        want = [gathered(p).bfloat16() for p in model.blocks[0].parameters()]
        zipccl.reset_stats(g)
        model.blocks[0].unshard()
        for parameter, whole in zip(model.blocks[0].parameters(), want, strict=True):
            assert_bits(parameter.detach(), whole)
        assert zipccl.stats(g)["all_gather"]["dynamic_bytes"] > 0


def test_the_rate_that_sigma_predicts() -> None:
    torch.manual_seed(0)
    values = torch.randn(1_000_000, dtype=torch.float64)
    for sigma in (1.0, 0.02, 0.0137, 3e-8):
        window = zipccl.window(sigma)
        exponents = (values * sigma).float().view(torch.int32).bitwise_right_shift(23).bitwise_and(0xFF)
        outside = ((exponents < window[0]) | (exponents > window[-1])).double().mean().item()
        assert _C.escape_rate(sigma, window[-1]) == pytest.approx(outside, abs=1e-3)


def test_what_an_expert_makes_of_its_input() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(512, 300, bias=False)
    layer = zipccl.attach(linear)["weight"]
    assert layer.output_sigma(0.7) == pytest.approx((0.7 * linear(torch.randn(2000, 512))).std().item(), rel=0.03)


@pytest.mark.parametrize("n", [1, 1000, 8192, 30_000])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_counting_on_a_device_is_as_on_the_processor(n: int, dtype: torch.dtype) -> None:
    values = data("bf16_gauss" if dtype == BF16 else "fp32_full", n, 0)
    values[: n // 3 : 2] = 0
    values[n // 2 : n // 2 + n // 4] = data("bf16_bits" if dtype == BF16 else "fp32_bits", n // 4, 0)
    for top in (120, -1, _C.window_top(0.02), _C.window_top(0.02) | 0x100):
        windows = torch.full((-(-n // 8192),), top, dtype=torch.int16)
        for a, b in zip(_C.plan(values, windows), _C.plan(values, windows, by_operators=True), strict=True):
            assert torch.equal(a, b), (top, a, b)
