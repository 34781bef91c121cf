"""Pretrains a GPT with megatron.training on CPU processes: `torchrun megatron_on_cpu.py FOLDER ARGUMENT...`

The arguments are Megatron's own. megatron-core 0.19.2 takes a GPU for granted; `fill_in` maps it to the CPU and changes
nothing else. Each rank writes what it saw to FOLDER/RANK.json: of each step the losses and the gradient norm as they
are, what carries the groups, and of zipccl what it sent.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from zipccl.integrations.summary import totals

CPU = torch.device("cpu")


# ---- The CPU in the place of a GPU


def _moved(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return CPU
    return CPU if isinstance(value, str) and value.split(":")[0] == "cuda" else value


class CudaIsCpu(TorchFunctionMode):
    """What is asked for on a GPU is made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # Megatron sorts gradients by these names
        return result


class Nothing:
    """A stream or an event: all that was queued is done."""

    cuda_stream = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *arguments: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def fill_in() -> None:
    """Before anything of megatron is imported."""
    typing.override = override  # of Python 3.12
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it would compile for a GPU
    properties = types.SimpleNamespace(major=10, minor=0, total_memory=1 << 34, multi_processor_count=1, name="CPU")
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: CPU,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (10, 0),
        "Stream": Nothing,
        "Event": Nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Nothing(),
        "default_stream": lambda device=None: Nothing(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda device=None: {},
    }
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_call"):
        replaced[name] = lambda *arguments: None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replaced[name] = lambda device=None: 0
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = replaced["current_stream"]
    for name in ("Float", "Half", "BFloat16", "Int", "Long", "Byte", "Double"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def fill_in_megatron() -> None:
    """What is no function of PyTorch."""
    from megatron.core.datasets import utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import token_dispatcher

    utils.compile_helpers = lambda: None  # pip's package has them compiled, and no Makefile

    random._get_cuda_rng_state = lambda *arguments, **named: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *arguments, **named: torch.set_rng_state(state)

    # It looks where the tensor is, and leaves it as it is.
    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu

    # Apex' norms, which need a GPU, can be in a sequence parallel model: their gradients are summed over its ranks.
    make = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, *arguments: Any, **named: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        made = make(cls, alone, *arguments, **named)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    torch_norm.WrappedTorchNorm.__new__ = norm


# ---- What is seen


def record() -> dict[str, Any]:
    """Filled while the model trains."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.training import training

    seen: dict[str, Any] = {"losses": [], "norms": [], "coalesced": 0}
    log = training.training_log

    @functools.wraps(log)
    def recorded_log(losses: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        seen["losses"].append({name: float(value) for name, value in losses.items()})
        seen["norms"].append(float(arguments[6]))
        return log(losses, *arguments, **named)

    training.training_log = recorded_log
    coalesce = param_and_grad_buffer._coalescing_manager

    def counted(*arguments: Any, **named: Any) -> Any:
        seen["coalesced"] += 1
        return coalesce(*arguments, **named)

    param_and_grad_buffer._coalescing_manager = counted
    return seen


def groups() -> dict[str, Any]:
    """What carries Megatron's groups, what Megatron is told, and what was sent."""
    from megatron.core import mpu

    twin = mpu.get_data_parallel_group_gloo(with_context_parallel=True)
    return {
        "world": torch.distributed.distributed_c10d.get_backend(),
        "world as told": torch.distributed.get_backend(),
        "twin": torch.distributed.get_backend(twin),
        "stats": totals(),
    }


# ---- The script


def batches(sizes: list[int]) -> tuple[Iterator[dict[str, torch.Tensor]], None, None]:
    """Endless text in which the next token is nearly certain, the same on all ranks of a tensor parallel group."""
    from megatron.core import mpu
    from megatron.training import get_args

    args = get_args()
    generator = torch.Generator().manual_seed(args.seed + mpu.get_data_parallel_rank())
    shape = (args.micro_batch_size, args.seq_length + 1)

    def endless() -> Iterator[dict[str, torch.Tensor]]:
        while True:
            steps = torch.randint(2, shape, generator=generator).cumsum(1)
            text = (steps + torch.randint(args.vocab_size, (shape[0], 1), generator=generator)) % args.vocab_size
            yield {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}

    return endless(), None, None


def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().sum()
    count = torch.tensor(output.numel(), dtype=torch.int)
    return loss, count, {"lm loss": torch.stack([loss.detach(), count.float()])}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any, *more: Any) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    return model(batch["tokens"], positions, None, labels=batch["labels"]), loss_of


def pretrain_gpt() -> None:
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, arguments, pretrain

    args = arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    container = argument_utils.pretrain_cfg_container_from_args(args, argument_utils.gpt_config_from_args(args))
    batches.is_distributed = True
    pretrain(container, batches, ModelType.encoder_or_decoder, forward_step)


def main() -> None:
    folder = Path(sys.argv.pop(1))
    fill_in()
    fill_in_megatron()
    seen = record()
    with CudaIsCpu():
        pretrain_gpt()
    seen |= groups()
    (folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
