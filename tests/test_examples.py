"""examples/ as a user runs them, over Gloo and over zipccl."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLAIN = EXAMPLES / "plain.py"
STEPS = 4


def train(folder: Path, program: list[str], ranks: int, backend: str) -> tuple[list[float], str]:
    """The losses, and what zipccl did."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.run(
        [*torchrun, *program, "--backend", backend, "--steps", str(STEPS)],
        cwd=folder,
        env=os.environ | {"ZIPCCL_MODE": "zip", "ZIPCCL_MIN_BYTES": "1024", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", process.stdout)], process.stdout


@pytest.mark.parametrize(
    "way, ranks, sent",
    [
        # Of each group and collective: the part of the bytes that may be sent.
        ("ddp", 2, {"world: all_reduce": 0.76}),
        ("fsdp2", 2, {"shard: all_gather": 0.72, "shard: reduce_scatter": 0.40}),
        ("hsdp", 4, {"shard: all_gather": 0.72, "shard: reduce_scatter": 0.40, "replicate: all_reduce": 0.88}),
        ("tp", 2, {"tensor: all_reduce": 0.74}),
        ("device_mesh", 2, {"data: all_gather": 0.73, "data: reduce_scatter": 0.76}),
    ],
)
def test_same_losses(tmp_path, way, ranks, sent):
    expected, _ = train(tmp_path, [str(PLAIN), way], ranks, "gloo")
    losses, output = train(tmp_path, [str(PLAIN), way], ranks, "zipccl")
    assert len(losses) == STEPS and losses[-1] < losses[0]
    assert losses == (expected if ranks == 2 else pytest.approx(expected, rel=1e-4))  # sums of four depend on the order
    for call, most in sent.items():
        found = re.search(rf"^{call} \d+ calls, (\d+) zipped, ([\d.]+) of the bytes sent$", output, re.MULTILINE)
        assert found and int(found[1]) >= STEPS, output
        assert float(found[2]) < most, output


def test_one_line_tells_the_backend():
    assert len(re.findall(r"^.*init_process_group\(", PLAIN.read_text(), re.MULTILINE)) == 1


def test_mixture_of_experts(tmp_path):
    program = [str(EXAMPLES / "train_moe.py"), "--imbalance", "hot_rank", "--blocks", "1"]
    expected, _ = train(tmp_path, program, 2, "gloo")
    losses, output = train(tmp_path, program, 2, "zipccl")
    assert losses == expected and len(losses) == STEPS
    for collective, most in {"all_gather": 0.72, "all_to_all": 0.76, "reduce_scatter": 0.40}.items():
        found = re.search(rf"^{collective}: \d+ calls, (\d+) zipped, ([\d.]+) of the bytes$", output, re.MULTILINE)
        assert found and int(found[1]) >= STEPS and float(found[2]) < most, output
    assert re.search(r"^blocks\.0\.moe\.experts\.up +\S+ +\d+\.\.\d+ +2\.\d+% +2\.\d+%$", output, re.MULTILINE), output
