"""torchtitan.train on CPU processes: `torchrun titan_on_cpu.py FOLDER ARGUMENT...` is `-m torchtitan.train ARGUMENT...`

torchtitan 0.3.0 takes an accelerator for granted in a few places; this program fills them in and changes nothing else.
Each rank writes what it saw to FOLDER/RANK.json: of each logged step the loss and the gradient norm as they are, of
each step its seconds, and of zipccl what it sent. Started in a folder that `make_assets` has filled.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def make_assets(folder: Path) -> None:
    """What the debug models take from titan's repository: a tokenizer and a text, here of this project's documents."""
    from tokenizers import ByteLevelBPETokenizer

    documents = [file.read_text() for file in sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))]
    paragraphs = [paragraph for document in documents for paragraph in document.split("\n\n")]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(paragraphs, vocab_size=2000, special_tokens=["<s>", "</s>"], show_progress=False)
    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    specials = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(specials))
    lines = [json.dumps({"text": document}) for document in documents]
    (assets / "c4_test" / "data.json").write_text("\n".join(lines) + "\n")


def fill_in() -> None:
    """Before anything of torchtitan is imported, as its modules look at the device when they are."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch.cpu.get_device_name = lambda device=None: "cpu"
    torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=memory)
    torch.cpu.reset_peak_memory_stats = lambda device=None: None
    torch.cpu.empty_cache = lambda: None
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.current_device = lambda: 0

    # FlexAttention has no backward on CPUs. With SDPA, attention does not stop at the documents' ends.
    from torchtitan.models.common import attention, config_utils

    config_utils.get_attention_config = lambda backend: attention.ScaledDotProductAttention.Config()

    # titan multiplies gradients by 1 in the collective (PREMUL_SUM), which Gloo cannot do; SUM is the same.
    from torch.distributed import get_backend
    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(get_backend() == "gloo")

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


def record(file: Path) -> None:
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    seen: dict[str, Any] = {"losses": [], "norms": [], "seconds": [], "stats": {}}
    log, step, close = MetricsProcessor.log, Trainer.train_step, Trainer.close

    def recorded_log(self: Any, number: int, loss: float, max_loss: float, norm: float, **others: Any) -> None:
        seen["losses"].append(loss)
        seen["norms"].append(norm)
        log(self, number, loss, max_loss, norm, **others)

    def timed_step(self: Any, iterator: Any) -> None:
        begin = time.perf_counter()
        step(self, iterator)
        seen["seconds"].append(time.perf_counter() - begin)

    def recorded_close(self: Any) -> None:
        if "zipccl" in sys.modules:
            from zipccl.integrations.summary import totals

            seen["stats"] = totals()
        file.write_text(json.dumps(seen))
        close(self)

    MetricsProcessor.log, Trainer.train_step, Trainer.close = recorded_log, timed_step, recorded_close


def main() -> None:
    folder = Path(sys.argv.pop(1))
    fill_in()
    record(folder / f"{os.environ['RANK']}.json")
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
