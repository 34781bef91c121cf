"""torchtitan from pip, trained over zipccl and over what it takes without: the same losses and gradient norms."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from titan_on_cpu import make_assets
from torchrun import torchrun
from torchtitan.config import ConfigManager
from torchtitan.trainer import Trainer

from zipccl.integrations import torchtitan as integration

PROGRAM = Path(__file__).with_name("titan_on_cpu.py")
MODULE = "zipccl.integrations.torchtitan"
SMALL = "--training.seq_len 128 --training.local_batch_size 2 --debug.seed 7 --training.disable_cuda_graphs"

pytestmark = pytest.mark.timeout(600)


# ---- Running titan


@pytest.fixture(scope="module")
def titan():
    """Runs titan on CPU processes: `titan(ranks, arguments)` is what each rank saw, and what all printed."""
    with tempfile.TemporaryDirectory(prefix="zipccl-titan-") as name:
        folder = Path(name)
        make_assets(folder)
        environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}

        @functools.cache
        def run(ranks: int, arguments: str) -> tuple[list[dict[str, Any]], str]:
            seen = Path(tempfile.mkdtemp(dir=folder))
            text = torchrun(ranks, [str(PROGRAM), str(seen), *arguments.split()], folder, environment, seen / "output")
            return [json.loads((seen / f"{rank}.json").read_text()) for rank in range(ranks)], text

        yield run


@dataclass
class Case:
    ranks: int
    config: str
    parallel: str
    # The most bytes on the wire per raw byte, of each collective that must have been zipped.
    ratios: dict[str, float]
    reference: str = "stock"  # titan without zipccl, or a mode of zipccl where Gloo lacks something
    steps: int = 3


def parallel(**degrees: int) -> str:
    return " ".join(f"--parallelism.{name}_degree {degree}" for name, degree in degrees.items())


FSDP = {"all_gather": 0.72, "reduce_scatter": 0.42}  # the embedding's gradients are mostly zeros
ONE_BY_ONE = "--parallelism.pipeline_parallel_schedule 1F1B"
CASES = {
    "FSDP": Case(2, "llama3_debugmodel", "", FSDP),
    "TP": Case(2, "llama3_debugmodel", parallel(tensor_parallel=2), {"all_gather": 0.73, "reduce_scatter": 0.73}),
    # Its sends are handed on.
    "PP": Case(2, "llama3_debugmodel", f"{parallel(pipeline_parallel=2)} {ONE_BY_ONE}", {}),
    "HSDP": Case(
        4,
        "llama3_debugmodel",
        parallel(data_parallel_replicate=2, data_parallel_shard=2),
        FSDP | {"all_reduce": 0.87},
    ),
    # Gloo cannot exchange lists of tensors of different sizes.
    "EP": Case(
        2, "qwen3_moe_debug", parallel(expert_parallel=2), FSDP | {"all_to_all": 0.73}, reference="raw", steps=2
    ),
}
LONGER = {
    "FSDP on four": Case(4, "llama3_debugmodel", "", FSDP),
    "TP and FSDP": Case(4, "llama3_debugmodel", parallel(tensor_parallel=2), FSDP | {"reduce_scatter": 0.6}),
    "TP without sequence parallelism": Case(
        2,
        "llama3_debugmodel",
        f"{parallel(tensor_parallel=2)} --parallelism.no-enable_sequence_parallel",
        {"all_reduce": 0.9},
    ),
    # Gradients of two microbatches are summed in fp32, and are no bf16 values.
    "PP and FSDP": Case(
        4,
        "llama3_debugmodel",
        f"{parallel(pipeline_parallel=2)} --parallelism.pipeline_parallel_schedule Interleaved1F1B",
        FSDP | {"reduce_scatter": 0.86},
    ),
    "partial DTensor": Case(2, "llama3_debugmodel", "--parallelism.spmd_backend partial_dtensor", FSDP),
    "dense qwen3": Case(2, "qwen3_debugmodel", "", FSDP),
    "EP and FSDP": Case(
        4, "qwen3_moe_debug", parallel(expert_parallel=2), FSDP | {"all_to_all": 0.73}, reference="raw", steps=2
    ),
}


def arguments_of(case: Case, backend: str) -> str:
    """`backend`: "stock", or a mode of zipccl."""
    stock = case.config.split("_")[0]
    module = stock if backend == "stock" else f"{MODULE} --zipccl.mode {backend} --zipccl.min_bytes 4096"
    return f"--module {module} --config {case.config} {SMALL} --training.steps {case.steps} {case.parallel}"


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in LONGER.items()),
    ],
)
def test_same_training(titan, case):
    reference, _ = titan(case.ranks, arguments_of(case, case.reference))
    zipped, output = titan(case.ranks, arguments_of(case, "zip"))
    for mine, theirs in zip(zipped, reference, strict=True):
        assert len(mine["losses"]) == case.steps
        # Sums of four values depend on their order, unless both sides add in zipccl's.
        exact = case.ranks == 2 or case.reference != "stock"
        for what in ("losses", "norms"):
            assert mine[what] == (theirs[what] if exact else pytest.approx(theirs[what], rel=1e-4)), what
        for collective, most in case.ratios.items():
            counted = mine["stats"][collective]
            assert counted["zipped"] > counted["raw"]  # what is small, and nothing that Gloo can do, goes raw
            assert counted["wire_bytes"] / counted["raw_bytes"] < most, (collective, counted)
    if case.reference == "stock":
        assert not any(theirs["stats"] for theirs in reference)
    else:
        for theirs in reference:
            for collective in case.ratios:
                counted = theirs["stats"][collective]
                assert counted["raw"] > 0 and counted["zipped"] == 0
    assert "zipccl, on rank 0: " in output and "CUDA graphs are off" in output


def test_what_titan_takes_without(titan):
    """The section is there, and nothing else has changed."""
    case = CASES["FSDP"]
    reference, _ = titan(case.ranks, arguments_of(case, "stock"))
    same, output = titan(case.ranks, f"{arguments_of(case, 'zip')} --zipccl.backend default")
    assert [one["losses"] for one in same] == [one["losses"] for one in reference]
    assert not any(one["stats"] for one in same) and "zipccl, on rank 0" not in output


def test_layers_are_attached(titan):
    """So that the codes of gathered parameters need no samples."""
    case = CASES["FSDP"]
    for one in titan(case.ranks, arguments_of(case, "zip"))[0]:
        assert one["stats"]["all_gather"]["sampled_chunks"] == 0
        assert one["stats"]["reduce_scatter"]["sampled_chunks"] > 0  # of gradients, nothing is known


# ---- Flags


def parse(*flags: str) -> Any:
    return ConfigManager().parse_args(["--module", MODULE, "--config", "llama3_debugmodel", *flags])


def test_help_shows_the_options():
    command = [sys.executable, "-m", "torchtitan.train", "--module", MODULE, "--config", "llama3_debugmodel", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "--zipccl.backend {zipccl,default}" in text
    assert "--zipccl.mode {auto,zip,raw,native,hierarchical}" in text
    assert "compresses every eligible message" in " ".join(text.replace("│", " ").split())
    for name in integration.options._DEFAULTS:
        assert f"--zipccl.{name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    "flags, allowed",
    [
        ("--zipccl.mode fast", "('auto', 'zip', 'raw', 'native', 'hierarchical')"),
        ("--zipccl.backend nccl", "('zipccl', 'default')"),
        ("--zipccl.cuda_over mpi", "('nccl', 'gloo')"),
        ("--zipccl.min_bytes=-1", "min_bytes=-1 is not allowed: expected a whole number of bytes, 0 or more"),
        ("--zipccl.inline_fraction 2", "expected a number from 0 to 1"),
        ("--zipccl.min_byte 1", "--zipccl.min-bytes INT"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(capsys, flags, allowed):
    with pytest.raises(SystemExit) as end:
        parse(*flags.split())
    assert end.value.code == 2
    assert allowed in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_environment_is_what_flags_leave_open(monkeypatch):
    monkeypatch.setenv("ZIPCCL_MODE", "raw")
    monkeypatch.setenv("ZIPCCL_MIN_BYTES", "123")
    section = parse("--zipccl.mode", "zip").zipccl
    assert (section.mode, section.min_bytes) == ("zip", 123)
    monkeypatch.setenv("ZIPCCL_MODE", "fast")
    with pytest.raises(ValueError, match="'auto', 'zip'"):
        parse()


# ---- Configs


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:  # some need packages or a GPU
        return type(error)


def test_every_stock_config():
    trained = {name: module for name, module in integration._stock().items() if ".rl." not in module}
    same = set()
    for name, module in trained.items():
        stock = outcome(lambda name=name, module=module: getattr(importlib.import_module(module), name)())
        config = outcome(getattr(integration, name))
        if isinstance(stock, type):
            assert config is stock, name
            continue
        same.add(name)
        assert isinstance(config, type(stock)) and config.zipccl.backend == "zipccl"
        assert config.training.disable_cuda_graphs
        assert issubclass(config._owner, type(stock)._owner) and config._owner is not type(stock)._owner
        for field in dataclasses.fields(stock):
            if field.name != "training":
                assert type(getattr(config, field.name)) is type(getattr(stock, field.name)), (name, field.name)
    assert len(same) > 50
    assert {"llama3_8b", "qwen3_30b_a3b", "deepseek_v3_16b", "gpt_oss_20b", "flux_dev"} <= same
    assert {"graph_trainer_llama3_8b", "transformers_modeling_backend_full"} <= same


def test_names_are_those_of_titan():
    names = dir(integration)
    assert {"llama3_8b", "qwen3_moe_debug", "deepseek_v3_16b", "flux_dev", "graph_trainer_llama3_8b"} <= set(names)
    with pytest.raises(AttributeError, match="llama4_8b"):
        integration.llama4_8b  # noqa: B018
    with pytest.raises(ValueError, match="llama3_8b"):
        ConfigManager().parse_args(["--module", MODULE, "--config", "llama4_8b"])
    with pytest.raises(TypeError, match="Profiler"):
        integration.with_zipccl(parse().profiler)


# ---- What cannot go together


def trainer(*flags: str) -> Trainer:
    """Not built, as that would train."""
    config = parse(*flags)
    made = config._owner.__new__(config._owner)
    made.config = config
    return made


def test_a_group_made_before_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="over 'gloo'"):
            trainer().init_distributed()
    finally:
        dist.destroy_process_group()


def test_torchcomms_is_refused():
    with pytest.raises(ValueError, match="--comm.mode torchcomms"):
        trainer("--comm.mode", "torchcomms").init_distributed()
