"""megatron-core from pip, trained over zipccl and over Gloo: the same losses and gradient norms."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torchrun import torchrun

from zipccl.options import _DEFAULTS

HERE = Path(__file__).parent
PROGRAM = HERE / "megatron_on_cpu.py"
LAUNCHER = "zipccl.integrations.megatron"
PATCH = HERE.parents[1] / "examples" / "megatron" / "zipccl.patch"
CORE = importlib.util.find_spec("megatron.core")
assert CORE and CORE.origin
PACKAGES = Path(CORE.origin).parents[2]

# A small GPT in bf16, without what needs a GPU.
SMALL = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 512 --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --bf16 --hidden-dropout 0 "
    "--attention-dropout 0 --normalization RMSNorm --transformer-impl local --no-persist-layer-norm "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --dataloader-type external --log-interval 1 "
    "--eval-iters 0 --eval-interval 100"
)
STEPS = 3

pytestmark = pytest.mark.timeout(600)


# ---- Running Megatron


@dataclass
class Run:
    ranks: list[dict[str, Any]]  # what each saw
    output: str
    folder: Path


def pretrain(folder: Path, ranks: int, over: str, arguments: str, **environment: str) -> Run:
    """`over`: "gloo"; a mode, with the launcher; or "patched", for a Megatron that knows zipccl."""
    command = [str(PROGRAM), str(folder), *SMALL.split(), "--train-iters", str(STEPS), *arguments.split()]
    if over in ("gloo", "patched"):
        command += ["--distributed-backend", "gloo" if over == "gloo" else "zipccl"]
    else:
        command = ["-m", LAUNCHER, "--zipccl-mode", over, "--zipccl-min-bytes", "1024", *command]
    output = torchrun(ranks, command, folder, environment, folder / "output")
    return Run([json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)], output, folder)


@pytest.fixture(scope="module")
def train():
    """Pretrains on CPU processes, once for the same arguments."""
    with tempfile.TemporaryDirectory(prefix="zipccl-megatron-") as name:

        @functools.cache
        def run(ranks: int, over: str, arguments: str) -> Run:
            return pretrain(Path(tempfile.mkdtemp(dir=name)), ranks, over, arguments)

        yield run


@dataclass
class Case:
    ranks: int
    arguments: str
    # The most bytes on the wire per raw byte, of each collective that must have been zipped.
    ratios: dict[str, float]
    reference: str = "gloo"  # or a mode of zipccl where Gloo lacks something


TP = "--tensor-model-parallel-size 2"
SEQUENCE = f"{TP} --sequence-parallel"
OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 0.01 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall"
)
EP = f"{MOE} --expert-model-parallel-size 2"
SAVE = f"--ckpt-format torch --save checkpoints --save-interval {STEPS}"

FP32 = 0.89  # sums of several micro-batches' gradients are no bf16 values
BF16 = 0.75  # messages of a few KiB; where they are large, 0.71
CASES = {
    "DP": Case(2, "--exit-signal-handler", {"all_reduce": FP32}),
    "distributed optimizer": Case(2, f"{OPTIMIZER} {SAVE}", {"all_gather": BF16, "reduce_scatter": FP32}),
    "TP": Case(2, TP, {"all_reduce": BF16}),
    "TP with sequence parallelism": Case(2, SEQUENCE, {"all_gather": BF16, "reduce_scatter": BF16}),
    "EP": Case(2, f"{EP} {OPTIMIZER}", {"all_to_all": BF16, "all_gather": BF16, "reduce_scatter": FP32}),
    "TP and DP": Case(4, f"{SEQUENCE} {OPTIMIZER}", {"all_gather": BF16, "reduce_scatter": FP32}),
}
LONGER = {
    "DP on four": Case(4, "", {"all_reduce": FP32}),
    "PP": Case(2, "--pipeline-model-parallel-size 2", {}),  # its sends are handed on
    "PP and TP": Case(4, f"--pipeline-model-parallel-size 2 {TP}", {"all_reduce": BF16}),
    "bf16 gradients": Case(
        4, f"{OPTIMIZER} --grad-reduce-in-bf16", {"all_gather": BF16, "reduce_scatter": 0.78}, reference="raw"
    ),
    # Gloo cannot gather tensors of different sizes.
    "EP and TP": Case(
        4,
        f"{EP} {SEQUENCE} {OPTIMIZER}",
        {"all_to_all": 0.79, "all_gather": BF16, "reduce_scatter": FP32},  # with the router's fp32 probabilities
        reference="raw",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in LONGER.items()),
    ],
)
def test_same_training(train, case):
    reference = train(case.ranks, case.reference, case.arguments)
    zipped = train(case.ranks, "zip", case.arguments)
    for mine, theirs in zip(zipped.ranks, reference.ranks, strict=True):
        assert len(mine["norms"]) == STEPS
        assert mine["coalesced"] == theirs["coalesced"] >= STEPS
        assert [list(losses) for losses in mine["losses"]] == [list(losses) for losses in theirs["losses"]]
        # Sums of four values depend on their order, unless both sides add in zipccl's.
        if case.ranks == 2 or case.reference != "gloo":
            assert mine["losses"] == theirs["losses"] and mine["norms"] == theirs["norms"]
        else:
            assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
            for losses, expected in zip(mine["losses"], theirs["losses"], strict=True):
                assert losses == pytest.approx(expected, rel=1e-4)
        assert all(mine["stats"][collective]["zipped"] > 0 for collective in case.ratios)
        # Gloo where Megatron asks for it, and zipccl where it asks for NCCL and thinks that it has it.
        assert (mine["world"], mine["world as told"], mine["twin"]) == ("zipccl", "nccl", "gloo")
        if case.reference == "gloo":
            assert not theirs["stats"] and theirs["world"] == "gloo"
        else:
            assert all(theirs["stats"][collective]["raw"] > 0 for collective in case.ratios)
            assert not any(counted["zipped"] for counted in theirs["stats"].values())
    for collective, most in case.ratios.items():
        wire, raw = (
            sum(rank["stats"][collective][what] for rank in zipped.ranks) for what in ("wire_bytes", "raw_bytes")
        )
        print(f"{collective}: {raw} bytes sent as {wire / raw:.3f} of that")
        assert wire / raw < most, collective
    assert zipped.output.count("zipccl, on rank 0: ") == 1


def test_same_checkpoint(train):
    """The distributed optimizer's state, gathered over the groups' twins over Gloo."""
    case = CASES["distributed optimizer"]
    states = []
    for over in ("gloo", "zip"):
        folder = train(case.ranks, over, case.arguments).folder / "checkpoints"
        (state,) = folder.glob("iter_*/mp_rank_00/distrib_optim.pt")
        states.append(state.read_bytes())
    assert states[0] == states[1] and len(states[0]) > 1 << 20


# ---- The patch


def patched(tree: Path, folder: Path, how: str) -> Path:
    """A copy of `tree`/megatron with the patch."""
    shutil.copytree(tree / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    command = {"git": ["git", "apply", "--unidiff-zero", str(PATCH)], "patch": ["patch", "-p1", "-i", str(PATCH)]}
    # Not as a part of a repository that may be around it.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command[how], cwd=folder, env=environment, check=True, capture_output=True, timeout=60)
    return folder


def check_patched(folder: Path) -> None:
    def text(name: str) -> str:
        return (folder / "megatron" / name).read_text()

    assert re.search(
        r'class StragglerDetector(?:.*\n)+?.*get_backend\(\)\n +if backend in \("nccl", "zipccl"\):\n'
        r" +self\.dev = torch\.cuda",
        text("core/utils.py"),
    )
    assert re.search(
        r"class DistributedInitConfig(?:.*\n){1,9}? +distributed_backend: .*\"zipccl\"\]",
        text("training/config/common_config.py"),
    )
    assert re.search(
        r"get_backend\(\)\n +if backend in \('nccl', 'zipccl'\):\n.*\n +device = torch\.device\('cuda'\)",
        text("training/dist_signal_handler.py"),
    )
    assert re.search(
        r"\n( +)if args\.distributed_backend == 'zipccl':\n\1    import zipccl.*\n\1torch\.distributed\.init_process",
        text("training/initialize.py"),
    )
    for file in ("core/utils", "training/config/common_config", "training/dist_signal_handler", "training/initialize"):
        compile(text(f"{file}.py"), file, "exec")


@pytest.mark.parametrize("how", ["git", "patch"])
def test_patch_applies(tmp_path, how):
    check_patched(patched(PACKAGES, tmp_path / "tree", how))


def test_patched_megatron_trains(train, tmp_path):
    case = CASES["DP"]
    tree = patched(PACKAGES, tmp_path / "tree", "git")
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH", "")]))
    environment = {"PYTHONPATH": path, "ZIPCCL_MODE": "zip", "ZIPCCL_MIN_BYTES": "1024"}
    mine = pretrain(tmp_path, case.ranks, "patched", case.arguments, **environment).ranks
    for seen, launched in zip(mine, train(case.ranks, "zip", case.arguments).ranks, strict=True):
        assert seen["world"] == seen["world as told"] == "zipccl"
        for what in ("losses", "norms", "stats", "twin"):
            assert seen[what] == launched[what], what


def test_without_the_patch_megatron_refuses(tmp_path):
    with pytest.raises(AssertionError, match=r"--distributed-backend: invalid choice: '?zipccl"):
        pretrain(tmp_path, 1, "patched", "")


README_VERSIONS = re.findall(r"`(\d+\.\d+\.\d+)`", PATCH.with_name("README.md").read_text())


def test_readme_names_this_version():
    assert importlib.metadata.version("megatron-core") in README_VERSIONS


@pytest.mark.slow
@pytest.mark.parametrize("version", README_VERSIONS)
def test_patch_applies_to_versions(tmp_path, version):
    """Of the versions that the README names; they are downloaded."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    subprocess.run([*download, "--dest", str(tmp_path), f"megatron-core=={version}"], check=True, timeout=300)
    (archive,) = tmp_path.glob("megatron_core*.whl")
    shutil.unpack_archive(archive, tmp_path / "tree", "zip")
    for how in ("git", "patch"):
        check_patched(patched(tmp_path / "tree", tmp_path / how, how))


# ---- The launcher


@pytest.fixture
def launch(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    script = tmp_path / "script.py"

    def run(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess:
        script.write_text(text)
        return subprocess.run(
            [sys.executable, "-m", LAUNCHER, *(str(script) if a == "SCRIPT" else a for a in arguments)],
            cwd=tmp_path,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_help_shows_the_options(launch):
    text = launch("--help").stdout
    for name in _DEFAULTS:
        assert f"--zipccl-{name.replace('_', '-')} VALUE" in text
    assert "compresses every eligible message" in " ".join(text.split())


def test_help_of_a_script_begins_with_the_options(launch):
    text = launch("SCRIPT", "--help", text="import sys; print('mine:', sys.argv[1:])").stdout
    assert "--zipccl-mode VALUE" in text and text.endswith("mine: ['--help']\n")


@pytest.mark.parametrize(
    "flags, allowed",
    [
        ("--zipccl-mode fast", "one of 'auto', 'zip', 'raw', 'native', 'hierarchical'"),
        ("--zipccl-cuda-over mpi", "one of 'nccl', 'gloo'"),
        ("--zipccl-min-bytes=-1", "a whole number of bytes, 0 or more"),
        ("--zipccl-min-bytes many", "a value like 65536"),
        ("--zipccl-inline-fraction 2", "a number from 0 to 1"),
        ("--zipccl-checksum perhaps", "true or false"),
        ("--zipccl-min-byte 1", "--zipccl-OPTION"),
    ],
)
def test_a_wrong_value_is_refused_with_the_allowed_ones(launch, flags, allowed):
    done = launch(*flags.split(), "SCRIPT", text="print('it ran')")
    assert done.returncode == 2 and "it ran" not in done.stdout
    assert allowed in done.stderr


def test_no_script(launch):
    done = launch("nowhere.py")
    assert done.returncode == 2 and "there is no file nowhere.py" in done.stderr


ONE_RANK = """
import torch.distributed as dist
store = dist.HashStore()
"""


def test_script_runs_as_itself(launch, tmp_path):
    (tmp_path / "beside.py").write_text("here = 1")
    text = """
import os, sys, beside
print(__name__, __file__ == sys.argv[0], sys.argv[1:], os.environ["ZIPCCL_MIN_BYTES"], sys.modules["__main__"].beside)
sys.exit(3)
"""
    done = launch("--zipccl-min-bytes", "5", "SCRIPT", "--zipccl-mode", "zip", "x", text=text)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("__main__ True ['--zipccl-mode', 'zip', 'x'] 5 <module 'beside'")


@pytest.mark.parametrize(
    "asked, given",
    [
        ("nccl", "zipccl"),
        ("NCCL", "zipccl"),
        ("gloo", "gloo"),
        ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:zipccl"),
        ("cuda:nccl,cpu:gloo", "cuda:zipccl,cpu:gloo"),
        ("fakenccl", "fakenccl"),
        ("nccl2", "nccl2"),
    ],
)
def test_names_of_backends(asked, given):
    from zipccl.integrations.megatron import _renamed

    assert _renamed(asked) == given


def test_every_way_to_make_a_group(launch):
    text = (
        ONE_RANK
        + """
from torch.distributed import ProcessGroupNCCL, distributed_c10d as c10d
dist.init_process_group("nccl", store=store, rank=0, world_size=1)
groups = [
    None,
    dist.new_group(),
    dist.new_group([0], None, "nccl", ProcessGroupNCCL.Options(is_high_priority_stream=True)),
    dist.new_group(backend="nccl"),
    dist.new_subgroups(group_size=1, backend="nccl")[0],
    dist.new_subgroups_by_enumeration([[0]], backend="nccl")[0],
]
print({(c10d.get_backend(group), dist.get_backend(group)) for group in groups})
print({(c10d.get_backend(group), dist.get_backend(group)) for group in [dist.new_group(backend="gloo")]})
dist.destroy_process_group()
"""
    )
    done = launch("SCRIPT", text=text)
    assert done.stdout == "{('zipccl', 'nccl')}\n{('gloo', 'gloo')}\nzipccl, on rank 0: no calls\n", done.stderr


def test_summary_also_after_an_error(launch):
    text = ONE_RANK + 'dist.init_process_group("nccl", store=store, rank=0, world_size=1)\ndist.barrier()\n1 / 0'
    done = launch("SCRIPT", text=text)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert done.stdout == "zipccl, on rank 0: barrier 1 calls, 0 zipped\n"


def test_warns_of_shared_queues_once(launch):
    said = [launch("SCRIPT", CUDA_DEVICE_MAX_CONNECTIONS="1", RANK=rank).stderr for rank in ("0", "1")]
    said.append(launch("SCRIPT", CUDA_DEVICE_MAX_CONNECTIONS="32", RANK="0").stderr)
    assert ["Leave it unset" in text for text in said] == [True, False, False]
