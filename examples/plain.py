"""Trains a small model in plain PyTorch, one way of five, over any backend; one line tells which: `init_process_group`.

    torchrun --nproc-per-node 2 examples/plain.py ddp|fsdp2|tp|device_mesh [--backend gloo|nccl|zipccl] [--steps 5]
    torchrun --nproc-per-node 4 examples/plain.py hsdp

On GPUs where there are some, else on CPU processes. Prints each step's loss and what zipccl sent. On one machine zipccl
mostly finds that Gloo is faster and hands calls on: `ZIPCCL_MODE=zip` makes it compress all that it can.
"""

import argparse
import gc
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import zipccl

VOCABULARY = 512
WIDTH = 256
BLOCKS = 3
BATCH, SEQUENCE = 8, 32

device = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts from each token the next."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))  # a row for each token


# ---- Five ways to share the work: each says how the model becomes parallel, and which groups that takes

Groups = dict[str, dist.ProcessGroup | None]


def ddp(model: Model) -> tuple[nn.Module, Groups]:
    """Every rank has the model; bf16 gradients are all-reduced."""
    return DistributedDataParallel(model.bfloat16()), {"world": None}


def sharded(model: Model, **mesh: int) -> tuple[nn.Module, Groups]:
    """FSDP2: bf16 parameters are gathered, and their gradients are reduced in fp32."""
    over = init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=over, mp_policy=precision)
    return model, {name: over.get_group(name) for name in mesh}


def fsdp2(model: Model) -> tuple[nn.Module, Groups]:
    """Every rank has a part of each parameter."""
    return sharded(model, shard=dist.get_world_size())


def hsdp(model: Model) -> tuple[nn.Module, Groups]:
    """Each half of the ranks shares the parameters; gradients are all-reduced between the halves."""
    return sharded(model, replicate=2, shard=dist.get_world_size() // 2)


def tp(model: Model) -> tuple[nn.Module, Groups]:
    """Every rank has some columns and rows of each block, and the same batch; bf16 activations are all-reduced."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.bfloat16().blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, {"tensor": mesh.get_group()}


class Gathered(nn.Module):
    """FSDP by hand: DTensor gathers each parameter, and its backward reduces and scatters the gradient."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.parts = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(distribute_tensor(parameter.detach(), self.mesh, [Shard(0)]))
                for name, parameter in model.bfloat16().named_parameters()
            }
        )
        self.model = [model]  # its parameters are not this module's

    def forward(self, tokens: Tensor) -> Tensor:
        whole = {}
        for name, part in self.parts.items():
            assert isinstance(part, DTensor)
            whole[name.replace("/", ".")] = part.full_tensor(grad_placements=[Partial()])
        return torch.func.functional_call(self.model[0], whole, (tokens,))


def device_mesh(model: Model) -> tuple[nn.Module, Groups]:
    """Parameters are DTensors on a DeviceMesh, gathered in bf16 where they are used."""
    gathered = Gathered(model)
    return gathered, {"data": gathered.mesh.get_group()}


WAYS: dict[str, Callable[[Model], tuple[nn.Module, Groups]]] = {
    way.__name__: way for way in (ddp, fsdp2, hsdp, tp, device_mesh)
}


# ---- Training


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Text that counts, from anywhere."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    text = ((start + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(device)
    return text[:, :-1], text[:, 1:]


def report(groups: Groups) -> None:
    for name, group in groups.items():
        for collective, did in zipccl.stats(group).items():
            ratio = f", {did['wire_bytes'] / did['raw_bytes']:.3f} of the bytes sent" if did["raw_bytes"] else ""
            if did["calls"]:
                print(f"{name}: {collective} {did['calls']} calls, {did['zipped']} zipped{ratio}")


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, groups = WAYS[arguments.way](Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = 1 if arguments.way == "tp" else dist.get_world_size()  # of the batch
    generator = torch.Generator().manual_seed(dist.get_rank() if parts > 1 else 0)
    for step in range(1, arguments.steps + 1):
        tokens, following = batch(generator)
        loss = F.cross_entropy(model(tokens).float(), following.flatten())
        (loss / parts if arguments.way == "device_mesh" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / parts
        if parts > 1:
            dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.9f}")
    if dist.get_rank() == 0 and arguments.backend == "zipccl":
        report(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=WAYS, help="how the ranks share the work")
    parser.add_argument("--backend", choices=("gloo", "nccl", "zipccl"), default="zipccl")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    global device
    if torch.cuda.is_available() and arguments.backend != "gloo":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    dist.init_process_group(arguments.backend)  # all that changes

    train(arguments)
    gc.collect()  # modules hold groups, whose threads must end before the interpreter does
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
