"""Trains a small mixture-of-experts transformer on CPU processes: expert parallelism, and FSDP2 for all the rest.

    torchrun --nproc-per-node 4 examples/train_moe.py --backend zipccl
    torchrun --nproc-per-node 4 examples/train_moe.py --backend gloo --imbalance hot_expert

Each rank holds some of the experts. Tokens travel to their experts and back in all-to-alls with autograd, which zipccl
sends in two phases: what has a known size at once, and the rest only between pairs that have any. `zipccl.attach` tells
it the standard deviation of each layer, from which that of the experts' results follows.
"""

import argparse
import contextlib
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import zipccl

VOCABULARY = 512
HEADS = 4


class Imbalance:
    """How many sequences each rank has, and which expert each of its tokens goes to (None: the router says)."""

    def __init__(
        self,
        sequences: Callable[[int, int], float] = lambda rank, size: 1,  # times the batch
        experts: Callable[[Tensor, int], Tensor] | None = lambda token, step: (
            token
        ),  # modulo their number; None: router
    ):
        self._sequences, self._experts = sequences, experts

    def sequences(self, batch: int) -> int:
        return round(batch * self._sequences(dist.get_rank(), dist.get_world_size()))

    def choose(self, tokens: int, experts: int, step: int) -> Tensor | None:
        return None if self._experts is None else self._experts(torch.arange(tokens), step) % experts


IMBALANCES = {
    "balanced": Imbalance(),
    "router": Imbalance(experts=None),
    "hot_expert": Imbalance(experts=lambda token, step: torch.where(token % 4 != 0, 0, token // 4)),
    "hot_rank": Imbalance(sequences=lambda rank, size: 4 if rank == 0 else 1),
    "ragged": Imbalance(sequences=lambda rank, size: 2 * (rank + 1) / size, experts=lambda token, step: token * token),
    "idle_rank": Imbalance(sequences=lambda rank, size: 0 if rank == size - 1 else 1),
    "bursts": Imbalance(experts=lambda token, step: token if step % 2 else torch.full_like(token, step // 2)),
    "no_tokens": Imbalance(sequences=lambda rank, size: 0),
}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """In fp32: many CPUs have no fast bf16 matrix multiplication."""
    return F.linear(x.float(), weight.float()).to(x.dtype)


class Experts(nn.Module):
    """The experts of one rank: x -> down(relu(up(x))), each on its own rows."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 4 * width, width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(count, width, 4 * width) / math.sqrt(4 * width))

    def forward(self, rows: Tensor, of_expert: list[int]) -> Tensor:
        parts = rows.split(of_expert)
        return torch.cat([linear(F.relu(linear(x, self.up[i])), self.down[i]) for i, x in enumerate(parts)])


class MixtureOfExperts(nn.Module):
    """Sends each row to one expert and back, scaled by the router's probability for it."""

    def __init__(self, width: int, experts: int, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.count = group, experts
        self.router = nn.Parameter(torch.randn(experts, width) / math.sqrt(width))
        self.experts = Experts(experts // group.size(), width)
        self.sigmas: tuple[float, float] | None = None  # of rows on their way there and back, if known

    def exchange(self, rows: Tensor, received: list[int], sent: list[int], back: bool) -> Tensor:
        with zipccl.known_sigma(self.sigmas[back]) if self.sigmas else contextlib.nullcontext():
            return all_to_all_single_autograd(rows, received, sent, self.group)

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        scores = linear(x, self.router).softmax(-1)
        chosen = scores.argmax(-1) if chosen is None else chosen
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.count)
        arriving = all_to_all_single(counts, None, None, self.group).view(self.group.size(), -1)
        sent = counts.view(self.group.size(), -1).sum(1).tolist()
        received = arriving.sum(1).tolist()
        rows = self.exchange(x[order], received, sent, back=False)
        # They come rank by rank, and of each rank expert by expert.
        expert = torch.arange(arriving.shape[1]).repeat(self.group.size()).repeat_interleave(arriving.flatten())
        by_expert = expert.argsort(stable=True)
        done = self.experts(rows[by_expert], arriving.sum(0).tolist())
        done = torch.empty_like(done).index_copy(0, by_expert, done)
        done = self.exchange(done, sent, received, back=True)
        return torch.zeros_like(x).index_copy(0, order, done) * scores.gather(1, chosen[:, None])


class Block(nn.Module):
    def __init__(self, width: int, experts: int, group: dist.ProcessGroup):
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Parameter(torch.randn(3 * width, width) / math.sqrt(width))
        self.projection = nn.Parameter(torch.randn(width, width) / math.sqrt(width))
        self.norm = nn.RMSNorm(width)
        self.moe = MixtureOfExperts(width, experts, group)

    def forward(self, x: Tensor, choose: Callable[[int], Tensor | None]) -> Tensor:
        batch, length, width = x.shape
        qkv = linear(self.attention_norm(x), self.qkv).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).reshape(x.shape), self.projection)
        rows = self.norm(x).view(-1, width)
        return x + self.moe(rows, choose(len(rows))).view(x.shape)

    def known(self, layers: zipccl.Layers, name: str) -> None:
        """Of rows with a root mean square of 1, what the norm makes of them, and what the experts make of that."""
        there = layers[f"{name}.norm.weight"].sigma
        half = math.sqrt(0.5)  # relu leaves half of the squares
        hidden = half * layers[f"{name}.moe.experts.up"].output_sigma(there)
        self.moe.sigmas = (there, layers[f"{name}.moe.experts.down"].output_sigma(hidden))


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int, experts: int, group: dist.ProcessGroup):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, experts, group) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Parameter(torch.randn(VOCABULARY, width) / math.sqrt(width))

    def experts(self) -> list[Experts]:
        return [module for module in self.modules() if isinstance(module, Experts)]

    def forward(self, tokens: Tensor, choose: Callable[[int], Tensor | None]) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, choose)
        return linear(self.norm(x), self.head).float()


class Training:
    """A model over a group: its experts on their ranks, the rest sharded over all."""

    def __init__(self, group: dist.ProcessGroup, arguments: argparse.Namespace):
        self.group, self.arguments = group, arguments
        self.imbalance = IMBALANCES[arguments.imbalance]
        torch.manual_seed(0)
        self.model = Transformer(arguments.width, arguments.blocks, arguments.experts, group)
        torch.manual_seed(1 + dist.get_rank(group))
        self.experts = [weight for weights in self.model.experts() for weight in weights.parameters()]
        for weight in self.experts:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=set(self.experts))
        self.layers: zipccl.Layers | None = None
        own = {id(weight) for weight in self.experts}
        rest = [weight for weight in self.model.parameters() if id(weight) not in own]
        self.optimizers = [torch.optim.AdamW(weights, lr=1e-3) for weights in (self.experts, rest)]

    def attach(self) -> None:
        self.layers = zipccl.attach(self.model)

    def step(self, index: int) -> float:
        """Returns the mean loss of all tokens."""
        if self.layers is not None:
            for name, module in self.model.named_modules():
                if isinstance(module, Block):
                    module.known(self.layers, name)
        size, rank = self.group.size(), dist.get_rank(self.group)
        generator = torch.Generator().manual_seed(1000 * index + rank)
        shape = (self.imbalance.sequences(self.arguments.batch), self.arguments.length)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        targets = (3 * tokens + 1) % VOCABULARY
        total = torch.tensor(tokens.numel())
        dist.all_reduce(total, group=self.group)
        scores = self.model(tokens, lambda rows: self.imbalance.choose(rows, self.arguments.experts, index))
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / total.clamp(min=1)
        (loss * size).backward()  # FSDP takes the mean over ranks
        for weight in self.experts:
            if weight.grad is not None:
                weight.grad /= size
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss, group=self.group)
        return loss.item()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--imbalance", choices=IMBALANCES, default="balanced", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--experts", type=int, default=8, help="a multiple of the ranks (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="of a sequence, in tokens (default: %(default)s)")


def train(arguments: argparse.Namespace) -> None:
    group = dist.group.WORLD
    assert group is not None
    training = Training(group, arguments)
    if arguments.backend == "zipccl":
        training.attach()
    for index in range(arguments.steps):
        begin = time.perf_counter()
        loss = training.step(index)
        if dist.get_rank() == 0:
            print(f"step {index + 1:3}  loss {loss:.6f}  {time.perf_counter() - begin:.3f} s", flush=True)
    if dist.get_rank() == 0 and arguments.backend == "zipccl":
        print(training.layers)
        for collective, stats in zipccl.stats().items():
            ratio = f", {stats['wire_bytes'] / stats['raw_bytes']:.3f} of the bytes" if stats["raw_bytes"] else ""
            print(f"{collective}: {stats['calls']} calls, {stats['zipped']} zipped{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "zipccl"), default="zipccl")
    parser.add_argument("--mode", default="zip", help="of zipccl: zip, raw, native or auto (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    add_arguments(parser)
    arguments = parser.parse_args()
    options: dict[str, Any] = {}
    if arguments.backend == "zipccl":
        options["pg_options"] = zipccl.Options(mode=arguments.mode)
    dist.init_process_group(arguments.backend, **options)
    if arguments.experts % dist.get_world_size():
        parser.error(f"{arguments.experts} experts do not divide equally among {dist.get_world_size()} ranks")
    train(arguments)
    gc.collect()  # FSDP's modules hold the group, whose threads must end before the interpreter does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
