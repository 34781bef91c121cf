"""The mixture of experts of examples/train_moe.py: as in one process, under every imbalance, forward and backward."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from multirank import fresh_group, group, only_zipccl, ranks
from oracle import assert_bits, data

import zipccl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_moe

ZIP = dict(mode="zip", min_bytes=0)
WAYS = (ZIP, dict(mode="raw", min_bytes=0), dict(ZIP, two_phase=False))
WIDTH, EXPERTS = 64, 8


def layer_of(rank: int, g: dist.ProcessGroup) -> train_moe.MixtureOfExperts:
    """That of a rank; the router is the same on all."""
    torch.manual_seed(0)
    layer = train_moe.MixtureOfExperts(WIDTH, EXPERTS, g)
    torch.manual_seed(1 + rank)
    for weight in layer.experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return layer


def rows_of(imbalance: str, rank: int, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    found = train_moe.IMBALANCES[imbalance]
    count = 16 * round(12 * found._sequences(rank, size))
    chosen = None if found._experts is None else found._experts(torch.arange(count), step) % EXPERTS
    return data("bf16_gauss", count * WIDTH, rank, step).view(count, WIDTH).mul(50).requires_grad_(), chosen


def in_one_process(g: dist.ProcessGroup, imbalance: str, rank: int, step: int) -> list[torch.Tensor]:
    """Results and gradients of a rank, of a program that has all tokens and all experts."""
    size = g.size()
    layers = [layer_of(r, g) for r in range(size)]
    rows, chosen = map(list, zip(*(rows_of(imbalance, r, size, step) for r in range(size)), strict=True))
    scores = [train_moe.linear(x, layer.router).softmax(-1) for x, layer in zip(rows, layers, strict=True)]
    chosen = [s.argmax(-1) if c is None else c for s, c in zip(scores, chosen, strict=True)]
    outputs = [torch.zeros_like(x) for x in rows]
    for expert in range(EXPERTS):
        owner, index = divmod(expert, EXPERTS // size)
        weights = layers[owner].experts
        where = [torch.nonzero(c == expert).flatten() for c in chosen]
        x = torch.cat([x[i] for x, i in zip(rows, where, strict=True)])
        done = train_moe.linear(torch.relu(train_moe.linear(x, weights.up[index])), weights.down[index])
        for r, part in enumerate(done.split([len(i) for i in where])):
            outputs[r] = outputs[r].index_copy(0, where[r], part)
    results = [o * s.gather(1, c[:, None]) for o, s, c in zip(outputs, scores, chosen, strict=True)]
    sum(result.float().square().sum() for result in results).backward()
    return [results[rank].detach(), rows[rank].grad, *gradients(layers[rank])]


def gradients(layer: train_moe.MixtureOfExperts) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]


@only_zipccl
@ranks(2, 4)
@pytest.mark.parametrize("imbalance", train_moe.IMBALANCES)
def test_equals_one_process(rank: int, world_size: int, imbalance: str) -> None:
    for step in range(2):  # bursts come and go
        want = in_one_process(group(), imbalance, rank, step)
        for options in WAYS:
            layer = layer_of(rank, group(**options))
            layer.sigmas = (1.0, 0.5) if options is ZIP else None
            rows, chosen = rows_of(imbalance, rank, world_size, step)
            result = layer(rows, chosen)
            result.float().square().sum().backward()
            for a, b in zip([result.detach(), rows.grad, *gradients(layer)], want, strict=True):
                assert_bits(a, b, (imbalance, options, step))


@only_zipccl
@ranks(2, 4)
@pytest.mark.parametrize("imbalance", train_moe.IMBALANCES)
def test_training_is_the_same_coded_and_not(rank: int, world_size: int, imbalance: str) -> None:
    arguments = argparse.Namespace(imbalance=imbalance, width=64, blocks=2, experts=8, batch=2, length=32)
    runs = []
    for options in WAYS:
        with fresh_group(**options) as g:
            training = train_moe.Training(g, arguments)
            if options is ZIP:
                training.attach()
            losses = [training.step(index) for index in range(4)]
            weights = [p.to_local() if hasattr(p, "to_local") else p for p in training.model.parameters()]
            runs.append((losses, [w.detach().clone() for w in weights]))
            stats = zipccl.stats(g)
            assert options["mode"] == "raw" or stats["all_gather"]["zipped"] > 0
            assert stats["all_to_all"]["calls"] == 4 * 2 * 5, "counts, two exchanges of a layer and their gradients"
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        for a, b in zip(weights, runs[0][1], strict=True):
            assert_bits(a, b)
    assert len(set(runs[0][0])) == (1 if imbalance == "no_tokens" else 4), "it learns nothing"


def there_and_back(x: torch.Tensor, n_out: list[int], n_in: list[int], name: str) -> torch.Tensor:
    there = funcol.all_to_all_single_autograd(x, n_out, n_in, name)
    return funcol.all_to_all_single_autograd(there * 2 + 1, n_in, n_out, name) * x


@only_zipccl
@ranks(2)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_functional_all_to_all_compiled(rank: int, world_size: int, backend: str | None) -> None:
    """Forward and backward, overlapped or not, in one graph."""
    g = group(**ZIP)
    n_in, n_out = [[300, 500], [0, 700]][rank], [[300, 0], [500, 700]][rank]
    function = partial(there_and_back, n_out=n_out, n_in=n_in, name=g.group_name)
    if backend is not None:
        torch._dynamo.reset()
        function = torch.compile(function, fullgraph=True, backend=backend)
    x = data("bf16_gauss", sum(n_in) * 64, rank).view(-1, 64).float().requires_grad_()
    result = function(x)
    result.sum().backward()
    assert_bits(result.detach(), (x * 2 + 1) * x)
    assert_bits(x.grad, (x * 2 + 1) + 2 * x)
