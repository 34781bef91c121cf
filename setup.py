"""Builds zipccl._C, the C++ extension, against the PyTorch of this environment.

Everything else about the package is in pyproject.toml.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

MINIMUM_TORCH = (2, 11)
ROOT = Path(__file__).resolve().parent


def check_compiler() -> str:
    """The C++ compiler's own description; ends the build when there is none."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    if not command or shutil.which(command[0]) is None:
        raise SystemExit(
            f"zipccl: no C++ compiler: {' '.join(command)!r} cannot be run; install g++ or clang, or set CXX to one."
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise SystemExit(f"zipccl: {header} is missing; install the Python development headers (python3-dev).")
    version = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout
    return (version.splitlines() or [" ".join(command)])[0]


def check_torch():
    """The installed torch; ends the build when it is missing or too old."""
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            "zipccl: PyTorch is needed to build: install torch>=2.11 first, then build with --no-build-isolation "
            f"({error})."
        ) from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and tuple(map(int, found.groups())) < MINIMUM_TORCH:
        raise SystemExit(f"zipccl: torch {torch.__version__} is too old: install torch>=2.11 first.")
    return torch


torch = check_torch()
compiler = check_compiler()
# In an environment that is not activated, ninja is beside the interpreter but not on the PATH.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

from torch.utils.cpp_extension import BuildExtension, CppExtension  # noqa: E402

# c10d's C++ interface changes between releases: each torch has its own objects and libraries.
build_base = f"build/torch-{torch.__version__}"


class BuildExt(BuildExtension):
    def initialize_options(self) -> None:
        super().initialize_options()
        # Also for editable installs and wheels, for which setuptools would choose a new folder and compile everything.
        self.build_temp = f"{build_base}/{sysconfig.get_platform()}-{sys.implementation.cache_tag}"

    def build_extensions(self) -> None:
        kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
        how = "ninja, in parallel" if self.use_ninja else "one file at a time, as ninja is not installed"
        print(f"zipccl: building zipccl._C from {len(self.extensions[0].sources)} files ({how})")
        print(f"zipccl:   for torch {torch.__version__} ({kind}), Python {sys.version.split()[0]}")
        print(f"zipccl:   with {compiler}")
        print("zipccl:   CPU tensors are compressed; there is no CUDA part yet", flush=True)
        super().build_extensions()


def sources() -> list[str]:
    files = [ROOT / "csrc" / "bindings.cpp"]
    for folder in ("codec/cpu", "collectives", "process_group"):
        files += sorted((ROOT / "csrc" / folder).glob("*.cpp"))
    return [str(file.relative_to(ROOT)) for file in files]


setup(
    ext_modules=[
        CppExtension(
            "zipccl._C",
            sources(),
            include_dirs=[str(ROOT / "csrc")],
            depends=[str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").rglob("*.h"))],
            # No fused multiply-add: reductions are defined as separately rounded products and sums on every path.
            # No debug information: with torch's headers it is most of the compile time's memory and of the library.
            extra_compile_args=["-O3", "-ffp-contract=off", "-g0", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": build_base}},
)
