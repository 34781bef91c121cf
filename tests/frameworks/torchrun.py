"""A program of a framework on several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(ranks: int, arguments: list[str], folder: Path, environment: dict[str, str], output: Path) -> str:
    """Runs it in `folder`; returns what all ranks printed, which is also in `output`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            process.wait(timeout=280)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    text = output.read_text()
    assert process.returncode == 0, text[-8000:]
    return text
