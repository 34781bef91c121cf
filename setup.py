"""Builds zipccl._C, the C++ extension, against the PyTorch of this environment.

With the CUDA part if that PyTorch has CUDA and nvcc is found. ZIPCCL_CUDA=0 leaves it out, ZIPCCL_CUDA=1 fails without;
TORCH_CUDA_ARCH_LIST chooses the GPUs. Everything else about the package is in pyproject.toml.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import setup

MINIMUM_TORCH = (2, 11)
# From A100 to RTX 50; newer GPUs compile the PTX of the last.
GPUS = ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
SUFFIXES = (".h", ".cuh", ".cpp", ".cu")
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


@dataclass
class Toolkit:
    """Where nvcc belongs to."""

    home: Path
    version: str
    include_dirs: list[str]
    library_dirs: list[str]

    def gpus(self) -> str:
        """What to compile for, as in TORCH_CUDA_ARCH_LIST: all of GPUS that this nvcc knows."""
        nvcc = self.home / "bin" / "nvcc"
        known = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
        gpus = [gpu for gpu in GPUS if f"compute_{gpu.replace('.', '')}" in known]
        return ";".join(gpus) + "+PTX"


def folders_in(plan: str, name: str) -> list[str]:
    """The folders in a line of `nvcc --dryrun`."""
    (line,) = re.findall(rf"^#\$ {name}=(.*)$", plan, re.MULTILINE) or [""]
    return [str(Path(folder).resolve()) for folder in re.findall(r'"(?:-[IL])?(/[^"]*)"', line)]


def find_toolkit() -> Toolkit | None:
    places = [Path(os.environ[name], "bin", "nvcc") for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += [Path(shutil.which("nvcc") or ""), Path("/usr/local/cuda/bin/nvcc")]
    for nvcc in filter(Path.is_file, places):
        # It may be a script that calls nvcc, as package managers install: only nvcc itself knows where its files are.
        plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True).stderr
        about = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        home = re.search(r"^#\$ TOP=(.*)$", plan, re.MULTILINE)
        version = re.search(r"release (\d+\.\d+)", about)
        if home and version:
            return Toolkit(
                Path(home[1].strip()).resolve(),
                version[1],
                folders_in(plan, "INCLUDES") + folders_in(plan, "SYSTEM_INCLUDES"),
                # The stubs stand in for the driver, which the extension does not link.
                [folder for folder in folders_in(plan, "LIBRARIES") if Path(folder).name != "stubs"],
            )
    return None


def choose_cuda() -> tuple[Toolkit | None, str]:
    """The toolkit to build the CUDA part with, or None and why there is none."""
    wish = os.environ.get("ZIPCCL_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"zipccl: ZIPCCL_CUDA={wish} means nothing: set it to 0 (without CUDA) or 1 (with CUDA).")
    if wish == "0":
        return None, "ZIPCCL_CUDA=0"
    toolkit = find_toolkit() if torch.version.cuda else None
    if not torch.version.cuda:
        reason = f"torch {torch.__version__} has no CUDA"
    elif toolkit is None:
        reason = f"nvcc is not found (install the CUDA {torch.version.cuda} toolkit or set CUDA_HOME)"
    elif toolkit.version.split(".")[0] != torch.version.cuda.split(".")[0]:
        reason = f"nvcc in {toolkit.home} is CUDA {toolkit.version}, but torch is built with CUDA {torch.version.cuda}"
    else:
        return toolkit, ""
    if wish == "1":
        raise SystemExit(f"zipccl: ZIPCCL_CUDA=1, but {reason}.")
    return None, reason


torch = check_torch()
compiler = check_compiler()
toolkit, why_no_cuda = choose_cuda()
if toolkit:
    # torch looks for nvcc too, but takes a script for the real one. It reads both when it is imported below.
    os.environ["CUDA_HOME"] = str(toolkit.home)
    if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = toolkit.gpus()
# In an environment that is not activated, ninja is beside the interpreter but not on the PATH.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402

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
        if toolkit:
            gpus = os.environ["TORCH_CUDA_ARCH_LIST"].replace(";", " ")
            print(f"zipccl:   for CPU and CUDA tensors, with nvcc {toolkit.version} in {toolkit.home}, for GPUs {gpus}")
            print("zipccl:   (ZIPCCL_CUDA=0 leaves the CUDA part out, TORCH_CUDA_ARCH_LIST chooses GPUs)", flush=True)
        else:
            print(f"zipccl:   for CPU tensors only: {why_no_cuda}", flush=True)
        super().build_extensions()


def sources() -> list[str]:
    files = [file for file in sorted((ROOT / "csrc").rglob("*.*")) if file.suffix in (".cpp", ".cu")]
    return [str(file.relative_to(ROOT)) for file in files if toolkit or file.parent.name != "cuda"]


def pip_include_dirs() -> list[str]:
    """The headers of the CUDA libraries that torch's wheels depend on and that a toolkit may lack, as cusparse.h."""
    spec = importlib.util.find_spec("nvidia")
    packages = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    return [str(folder) for package in packages for folder in sorted(package.glob("*/include"))]


def extension():
    # No fused multiply-add: reductions are defined as separately rounded products and sums on every path.
    # No debug information: with torch's headers it is most of the compile time's memory and of the library.
    flags = {
        "cxx": ["-O3", "-ffp-contract=off", "-g0", "-fvisibility=hidden"],
        "nvcc": ["-O3", "--fmad=false", "-Xcompiler=-fvisibility=hidden"],
    }
    # All files, also those that are not compiled here: a source distribution has to hold them.
    depends = [str(file.relative_to(ROOT)) for file in sorted((ROOT / "csrc").rglob("*.*")) if file.suffix in SUFFIXES]
    include_dirs = [str(ROOT / "csrc")]
    if not toolkit:
        return CppExtension(
            "zipccl._C", sources(), include_dirs=include_dirs, depends=depends, extra_compile_args=flags
        )
    return CUDAExtension(
        "zipccl._C",
        sources(),
        # The toolkit's own headers first: they must fit nvcc.
        include_dirs=include_dirs + toolkit.include_dirs + pip_include_dirs(),
        library_dirs=toolkit.library_dirs,
        define_macros=[("ZIPCCL_CUDA", None)],
        depends=depends,
        extra_compile_args=flags,
    )


setup(
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt},
    options={"build": {"build_base": build_base}},
)
