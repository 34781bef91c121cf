"""Training steps of TorchTitan's models over Gloo and over zipccl, on links of one rate.

    python benchmarks/titan.py [--hosts 2] [--link 1gbit] [--models llama3 ...] [--rounds 2] [--steps 9] [--json FILE]

torchtitan itself trains, on CPUs as in tests/frameworks, one rank on each virtual host of benchmarks/network (which
needs root and the package iproute2). Its debug models are scaled to where the network is the limit:

* llama3: FSDP of 55 million parameters.
* moe: FSDP of qwen3's mixture of experts, two layers of it. The experts are gathered as all parameters are.
* moe-ep: the same, with the experts on two ranks and tokens sent to them. Gloo cannot do that; zipccl's exchange
  without compression (raw) stands for it.

Runs over each way take turns; a step is as long as its slowest rank, and the figures are medians of all rounds, without
the first steps of each run. Coded and uncoded training must have the same losses, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives import can_measure, console
from network import Network, parse_rate, rate_name
from train import Result, result_table

WARM_UP = 4  # steps; with "auto", every way is measured in the first
WIDTH, LAYERS = 1024, 4  # of llama3
MOE_LAYERS = 2
PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "frameworks" / "titan_on_cpu.py"
WAYS = ("gloo", "raw", "zip", "auto")


@dataclass
class Model:
    config: str  # a function below
    flags: str
    ways: tuple[str, ...] = WAYS


MODELS = {
    "llama3": Model("llama3", "--training.seq_len 32 --training.local_batch_size 1"),
    "moe": Model("moe", "--training.seq_len 32 --training.local_batch_size 1"),
    "moe-ep": Model(
        "moe", "--training.seq_len 128 --training.local_batch_size 1 --parallelism.expert_parallel_degree 2", WAYS[1:]
    ),
}


# ---- Configs, for titan's --config, with this file as its --module


def llama3() -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, compute_ffn_hidden_dim

    from zipccl.integrations import torchtitan

    config = torchtitan.llama3_debugmodel()
    model = config.model_spec.model
    model.dim = model.tok_embeddings.embedding_dim = model.norm.normalized_shape = model.lm_head.in_features = WIDTH
    heads = WIDTH // 64
    model.layers = llama3._build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=heads,
        hidden_dim=compute_ffn_hidden_dim(WIDTH, multiple_of=256),
        rope=ComplexRoPE.Config(dim=WIDTH // heads, max_seq_len=2048, theta=500000, scaling="llama"),
        attn_backend="flex",
    )
    return config


def moe() -> Any:
    from zipccl.integrations import torchtitan

    config = torchtitan.qwen3_moe_debug()
    config.model_spec.model.layers = config.model_spec.model.layers[:MOE_LAYERS]
    return config


# ---- Runs


def run(network: Network, model: Model, way: str, steps: int, result: Result) -> None:
    """Adds a run to the result of its way."""
    with tempfile.TemporaryDirectory(dir=".") as name:
        backend = "--zipccl.backend default" if way == "gloo" else f"--zipccl.mode {way}"
        flags = f"--module {Path(__file__).stem} --config {model.config} {model.flags} {backend}"
        flags += f" --training.steps {steps} --debug.seed 7"
        command = [sys.executable, str(PROGRAM), name, *flags.split()]
        paths = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": paths, "HF_HOME": str(Path("cache").resolve()), "HF_HUB_OFFLINE": "1"}
        environment["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
        environment["PYTHONWARNINGS"] = "ignore"  # that random numbers of CPU meshes may not be complete
        network.run(command, environment=environment, capture=True, timeout=900)
        seen = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(network.hosts)]
    result.seconds += [max(step) for step in zip(*(one["seconds"][WARM_UP:] for one in seen), strict=True)]
    if result.losses and result.losses != seen[0]["losses"]:
        raise AssertionError(f"{model.config}, {way}: two runs have different losses")
    result.losses = seen[0]["losses"]
    for collective, counted in seen[0]["stats"].items():
        if counted["raw_bytes"] and counted["zipped"]:
            result.ratios[collective] = counted["wire_bytes"] / counted["raw_bytes"]


def measure(network: Network, name: str, rounds: int, steps: int) -> dict[str, Result]:
    model = MODELS[name]
    results = {way: Result() for way in model.ways}
    order = list(model.ways)
    for number in range(rounds):
        for way in order:
            run(network, model, way, steps, results[way])
            console.print(f"  {name}, round {number + 1}, {way}: {results[way].median:.3f} s a step")
        order = order[1:] + order[:1]
    if results["zip"].losses != results["raw"].losses:
        raise AssertionError(f"{name}: losses differ between coded and uncoded training")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--link", type=parse_rate, default="1gbit", metavar="RATE")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=2, help="runs over each way (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=9, help=f"of a run; the first {WARM_UP} do not count")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args()
    if arguments.hosts < 2 or arguments.hosts % 2 or arguments.rounds < 1 or arguments.steps < WARM_UP + 2:
        parser.error(f"an even number of hosts, one round and {WARM_UP + 2} steps are the least")
    if not can_measure():
        return 2
    sys.path.insert(0, str(PROGRAM.parent))
    from titan_on_cpu import make_assets  # type: ignore[import-not-found]

    report = arguments.json.resolve() if arguments.json else None
    with Network(arguments.hosts, arguments.link) as network, tempfile.TemporaryDirectory() as folder:
        make_assets(Path(folder))
        os.chdir(folder)
        rates = network.measure(1.0)
        console.print(f"{arguments.hosts} hosts, {rate_name(arguments.link)}: {rates}")
        found = {name: measure(network, name, arguments.rounds, arguments.steps) for name in arguments.models}
        os.chdir("/")
    title = f"{arguments.hosts} hosts, {rate_name(arguments.link)} (TCP {min(rates.received):.0f} Mbit/s)"
    console.print(result_table(title, found))
    if report:
        figures = {name: {way: asdict(result) for way, result in results.items()} for name, results in found.items()}
        report.write_text(json.dumps({"received": rates.received, **figures}, indent=1) + "\n")
        console.print(f"figures: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
