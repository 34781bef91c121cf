"""Runs a training script of Megatron-LM over zipccl. Neither it nor Megatron changes: what says "nccl" is zipccl.

    torchrun ... -m zipccl.integrations.megatron [--zipccl-mode zip ...] pretrain_gpt.py ARGUMENT...

"gloo" stays Gloo. At the end, rank 0 says what was sent. Any other script that makes its groups over "nccl" runs too.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zipccl import options
from zipccl.backend import BACKEND
from zipccl.integrations.summary import summary

_MODULE = "zipccl.integrations.megatron"
# What takes a backend's name and makes groups.
_MAKERS = ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration")
_QUEUES = f"""\
{_MODULE}: with CUDA_DEVICE_MAX_CONNECTIONS=1, zipccl hands all calls on CUDA tensors to NCCL, uncompressed.
Leave it unset, or set it to 8 or more. Megatron insists on 1 only for tensor or context parallelism on GPUs older than
Blackwell; compression then needs data, expert or pipeline parallelism in place of these."""


def _help_of_options() -> dict[str, str]:
    """Of each option, what the documentation of `Options` says."""
    arguments = inspect.cleandoc(options.Options.__doc__ or "").partition("Args:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", re.sub(r":\w+:|``?", "", text)).replace("%", "%%") for name, text in found}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"torchrun ... -m {_MODULE}",
        usage="%(prog)s [--zipccl-OPTION VALUE ...] SCRIPT [ARGUMENT ...]",
        description=(__doc__ or "").partition("\n")[0],
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, such as pretrain_gpt.py")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own")
    group = parser.add_argument_group("zipccl's options", "Each is also an environment variable: ZIPCCL_MODE, ...")
    explained = _help_of_options()
    for name, (default, _) in options._DEFAULTS.items():
        flag = f"--zipccl-{name.replace('_', '-')}"
        group.add_argument(flag, dest=name, metavar="VALUE", help=f"{explained[name]} (default: {default!r})")
    return parser


def _renamed(backend: str) -> str:
    """As it was asked for, with zipccl for nccl: "nccl" or, by device, "cpu:gloo,cuda:nccl"."""
    return re.sub(r"(?i)(?<![^:,])nccl(?![^,])", BACKEND, backend)


def _over_zipccl(maker: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(maker)

    @functools.wraps(maker)
    def made(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        if isinstance(bound.arguments.get("backend"), str):
            bound.arguments["backend"] = _renamed(bound.arguments["backend"])
        return maker(*bound.args, **bound.kwargs)

    return made


def _replace() -> None:
    """In `torch.distributed`, where scripts find them; PyTorch's own modules keep theirs."""
    for name in _MAKERS:
        setattr(dist, name, _over_zipccl(getattr(dist, name)))
    get_backend, destroy = dist.get_backend, dist.destroy_process_group

    # Megatron asks it where tensors for collectives have to be.
    @functools.wraps(get_backend)
    def get_backend_as_asked_for(*arguments: Any, **named: Any) -> str:
        backend = get_backend(*arguments, **named)
        return dist.Backend.NCCL if backend == BACKEND else backend

    @functools.wraps(destroy)
    def destroy_with_summary(group: Any = None) -> None:
        if group is None or group is dist.GroupMember.WORLD:
            _say_summary()
        destroy(group)

    dist.get_backend = get_backend_as_asked_for
    dist.destroy_process_group = destroy_with_summary


def _say_summary() -> None:
    if dist.is_initialized() and dist.get_rank() == 0:
        print(f"zipccl, on rank 0: {summary()}", flush=True)


def main(arguments: list[str]) -> None:
    """Runs a script as ``__main__``, with its own ``sys.argv``.

    Args:
        arguments: As on the command line: zipccl's options, the script's path and the script's arguments.

    Raises:
        SystemExit: As the script; with code 2 if an option or its value is not allowed.
    """
    parser = _parser()
    parsed = parser.parse_args(arguments)
    for name in options._DEFAULTS:
        if getattr(parsed, name) is not None:
            os.environ[f"ZIPCCL_{name.upper()}"] = getattr(parsed, name)
    try:
        options.Options()  # checks them
    except ValueError as error:
        parser.error(str(error))
    if not Path(parsed.script).is_file():
        parser.error(f"there is no file {parsed.script}")
    first = os.environ.get("RANK", "0") == "0"
    if first and {"-h", "--help"} & set(parsed.arguments):
        parser.print_help()
        print()
    if first and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        print(_QUEUES, file=sys.stderr, flush=True)
    _replace()
    sys.argv = [parsed.script, *parsed.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(parsed.script).resolve().parent)  # as `python SCRIPT`
    try:
        runpy.run_path(parsed.script, run_name="__main__")
    finally:
        _say_summary()


if __name__ == "__main__":
    main(sys.argv[1:])
