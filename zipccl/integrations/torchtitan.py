"""TorchTitan over zipccl, by its own flags::

    torchrun --nproc-per-node 8 -m torchtitan.train --module zipccl.integrations.torchtitan \\
        --config llama3_debugmodel --zipccl.mode auto

``--config`` names any function of titan's config registries. What it returns gets a section ``zipccl`` with the options
of :class:`zipccl.Options` (``--help`` shows them), and CUDA graphs turned off, as captured calls are not compressed.
:func:`with_zipccl` does the same to a config of your own.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torchtitan
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

import zipccl
from zipccl import options
from zipccl.backend import BACKEND
from zipccl.integrations.summary import summary

__all__ = ["with_zipccl"]


class _Section:
    def __post_init__(self) -> None:
        zipccl.Options(**self.values())  # checks them

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in options._DEFAULTS}


def _section() -> type:
    """The options as a dataclass, which is how titan declares flags. They and their help are those of `Options`."""
    fields: list[Any] = [("backend", Literal[BACKEND, "default"], dataclasses.field(default=BACKEND))]
    for name, (default, _) in options._DEFAULTS.items():
        kind = Literal[options._CHOICES[name]] if name in options._CHOICES else type(default)
        from_environment = functools.partial(options._from_environment, name)
        fields.append((name, kind, dataclasses.field(default_factory=from_environment)))
    section = dataclasses.make_dataclass("ZipCCL", fields, bases=(_Section,), kw_only=True, slots=True)
    section.__module__ = __name__
    help = f"""Lossless compression of collectives.

    Args:
        backend: What carries the collectives of the accelerator's tensors: ``"{BACKEND}"``, or ``"default"`` for what
            titan takes otherwise.
{(options.Options.__doc__ or "").partition("Args:" + chr(10))[2]}"""
    section.__doc__ = re.sub(r":\w+:|``?", "", help)
    return section


ZipCCL = _section()


class _OverZipCCL(Trainer):
    """What is different in a Trainer over zipccl."""

    config: Any  # a Trainer.Config with a section zipccl

    def __init__(self, config: Any):
        super().__init__(config)
        if not self._zipped:
            return
        graphs = "off" if config.training.disable_cuda_graphs else "on, and the calls in them are not compressed"
        logger.info(f"zipccl: {config.zipccl.values()}; CUDA graphs are {graphs} (--training.disable_cuda_graphs)")
        for part in self.model_parts:
            zipccl.attach(part)

    @property
    def _zipped(self) -> bool:
        """Not where titan only goes through the motions on one process."""
        return self.config.zipccl.backend == BACKEND and self.config.comm.mode not in ("fake_backend", "local_tensor")

    def init_distributed(self) -> ParallelDims:
        if not self._zipped:
            return super().init_distributed()
        if self.config.comm.mode == "torchcomms":
            raise ValueError(
                "zipccl: --comm.mode torchcomms has collectives of its own; leave it out, or use "
                "--zipccl.backend default"
            )
        if dist.is_initialized():
            raise ValueError(
                f"zipccl: the default process group was made before titan's Trainer, over "
                f"{dist.get_backend()!r}; leave that to the Trainer, or use --zipccl.backend default"
            )
        # titan has no setting for the backend: it takes the device's from this map, and passes no options.
        environment = {f"ZIPCCL_{name.upper()}": str(value) for name, value in self.config.zipccl.values().items()}
        with _set(dist.Backend.default_device_backend_map, {utils.device_type: BACKEND}), _set(os.environ, environment):
            return super().init_distributed()

    def train(self) -> None:
        super().train()
        if self._zipped and dist.get_rank() == 0:
            logger.info(f"zipccl, on rank 0: {summary()}")


@contextlib.contextmanager
def _set(mapping: Any, values: dict[str, str]) -> Iterator[None]:
    before = {key: mapping[key] for key in values if key in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for key in values:
            del mapping[key]
        mapping.update(before)


# ---- Configs


@functools.cache
def _config_type(stock: type) -> type:
    """A Config like this one with the section, whose build() makes a Trainer over zipccl."""
    section = ("zipccl", ZipCCL, dataclasses.field(default_factory=ZipCCL))
    config = dataclasses.make_dataclass("Config", [section], bases=(stock,), kw_only=True, slots=True)
    owner = stock._owner  # type: ignore[attr-defined]
    type(f"{owner.__name__}OverZipCCL", (_OverZipCCL, owner), {"Config": config, "__module__": __name__})
    return config


def with_zipccl(config: Trainer.Config) -> Any:
    """A config of any of titan's Trainers as one that trains over zipccl.

    Returns:
        A copy of its own type with a section ``zipccl`` and ``training.disable_cuda_graphs`` set. Its ``build()`` makes
        the same Trainer, over zipccl.

    Raises:
        TypeError: It is no ``Trainer.Config``.
    """
    if not isinstance(config, Trainer.Config):
        raise TypeError(f"zipccl: {type(config).__qualname__} is no config of a torchtitan.trainer.Trainer")
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    values["training"] = dataclasses.replace(config.training, disable_cuda_graphs=True)
    stock: type = type(config)
    return _config_type(stock)(**values)


@functools.cache
def _stock() -> dict[str, str]:
    """titan's config functions, and the modules that hold them. Read and not imported, as some need more packages."""
    root = Path(torchtitan.__file__).parent
    found = {}
    for file in sorted(root.rglob("config_registry.py")):
        module = ".".join((torchtitan.__name__, *file.relative_to(root).with_suffix("").parts))
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.args.args:
                found[node.name] = module
    return found


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in _stock():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: with_zipccl(getattr(importlib.import_module(_stock()[name]), name)())


def __dir__() -> list[str]:
    """What titan lists where there is no function of the name it was given."""
    return sorted(_stock())
