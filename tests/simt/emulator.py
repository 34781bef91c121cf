"""Builds CUDA sources with g++ over the emulator of this folder.

`build("race", [kernels], folder / "program", include_dirs)` gives an executable; run() starts it. Kinds of builds:

plain    fast; wrong results, deadlocks, divergence
address  and AddressSanitizer and UndefinedBehaviorSanitizer
race     and races between threads; .cu files are instrumented, .cpp files are not
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ENGINE = [FOLDER / "simt.cpp", FOLDER / "runtime.cpp"]
KINDS = ("plain", "address", "race")
SUFFIXES = {".h", ".hpp", ".cuh", ".cu", ".cpp", ".inc"}

FLAGS = [
    "-std=c++17",
    "-O2",
    "-g",
    "-pthread",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Werror",
]
ADDRESS = ["-fsanitize=address", "-fno-omit-frame-pointer"]
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]
# The engine stands in for ThreadSanitizer's runtime.
INSTRUMENT = ["-fsanitize=thread", "-Wno-tsan"]
INSTRUMENT += ["--param", "tsan-distinguish-volatile=1", "--param", "tsan-instrument-func-entry-exit=0"]

Replacement = tuple[Path | str, str, str]


class BuildError(Exception):
    pass


@functools.cache
def cuda_include() -> Path | None:
    """The CUDA headers, of the toolkit that nvcc belongs to or else of a package; None without either."""
    found = []
    if nvcc := shutil.which("nvcc"):
        command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
        lines = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
        found += [Path(line.removeprefix("#$ TOP=")) / "include" for line in lines if line.startswith("#$ TOP=")]
    for folder in sys.path:
        found += [*sorted(Path(folder).glob("nvidia/cu1*/include")), Path(folder) / "nvidia/cuda_runtime/include"]
    return next((folder.resolve() for folder in found if (folder / "cuda_runtime_api.h").exists()), None)


def build(
    kind: str,
    sources: Iterable[Path],
    output: Path,
    include_dirs: Iterable[Path] = (),
    defines: Sequence[str] = (),
    replacements: Sequence[Replacement] = (),
    flags: Sequence[str] = (),
) -> Path:
    """Compiles and links `sources` and the emulator to `output`; objects go to a folder beside it, for the next time.

    A replacement (file, old, new) changes a copy of the sources and the include_dirs: `old` must be there exactly once.
    """
    if kind not in KINDS:
        raise ValueError(kind)
    sources = [Path(source).resolve() for source in sources]
    include_dirs = [Path(folder).resolve() for folder in include_dirs]
    output.parent.mkdir(parents=True, exist_ok=True)
    objects = output.parent / "objects"
    objects.mkdir(exist_ok=True)
    tree = None
    try:
        if replacements:
            tree = Path(tempfile.mkdtemp(prefix=output.name + ".", dir=output.parent))
            sources, include_dirs = _copy(sources, include_dirs, replacements, tree)
        own = [f"-D{define}" for define in defines] + list(flags)
        jobs = [(source, include_dirs, own + _sanitizers(kind, source)) for source in sources]
        engine = {"plain": [], "address": ADDRESS, "race": ["-DSIMT_RACE"]}[kind]
        jobs += [(source, [], list(engine)) for source in ENGINE]
        with ThreadPoolExecutor(2) as pool:
            files = list(pool.map(lambda job: _compile(*job, objects), jobs))
        link = ADDRESS + UNDEFINED if kind == "address" else []
        _run(["g++", "-pthread", *link, *map(str, files), "-o", str(output)])
    finally:
        if tree:
            shutil.rmtree(tree)
    return output


def run(program: Path, *arguments: object, timeout: float = 120, stdin: bytes | None = None):
    """Runs a program; its stdout and stderr are bytes and text."""
    command = [str(program), *map(str, arguments)]
    # ASan reports what it finds by an exit code of its own, unlike a wrong result's.
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "exitcode=99:abort_on_error=0",
        "UBSAN_OPTIONS": "exitcode=99:print_stacktrace=1",
    }
    result = subprocess.run(command, capture_output=True, input=stdin, timeout=timeout, env=environment)
    result.stderr = result.stderr.decode(errors="replace")
    return result


def _sanitizers(kind: str, source: Path) -> list[str]:
    if kind == "address":
        return ADDRESS + UNDEFINED
    return INSTRUMENT if kind == "race" and source.suffix == ".cu" else []


def _compile(source: Path, include_dirs: Sequence[Path], flags: Sequence[str], objects: Path) -> Path:
    cuda = cuda_include()
    if cuda is None:
        raise BuildError("no CUDA headers")
    folders = [*include_dirs, FOLDER]
    command = ["g++", *FLAGS, *flags, "-isystem", str(cuda)]
    digest = hashlib.sha256(repr([command, source.name, _compiler()]).encode())
    digest.update(source.read_bytes())
    for folder in dict.fromkeys([source.parent, *folders]):
        for file in sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file()):
            if file.suffix not in (".cpp", ".cu"):
                digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    result = objects / f"{source.stem}.{digest.hexdigest()[:24]}.o"
    if not result.exists():
        partial = result.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
        includes = [flag for folder in folders for flag in ("-I", str(folder))]
        _run([*command, *includes, "-x", "c++", "-c", str(source), "-o", str(partial)])
        partial.replace(result)
    return result


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def _copy(sources, include_dirs, replacements, tree):
    """Copies the folders to `tree` at their places under a common one, so that relative includes stay right."""
    folders = {source.parent for source in sources} | set(include_dirs)
    top = [folder for folder in folders if not any(other in folder.parents for other in folders)]
    root = Path(os.path.commonpath(top))

    def moved(path: Path) -> Path:
        return tree / path.relative_to(root)

    for folder in top:
        for file in folder.rglob("*"):
            if file.suffix in SUFFIXES and file.is_file():
                moved(file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, moved(file))
    for name, old, new in replacements:
        file = moved(Path(name).resolve())
        text = file.read_text()
        if text.count(old) != 1:
            raise BuildError(f"{name} has {text.count(old)} times: {old}")
        file.write_text(text.replace(old, new))
    return [moved(source) for source in sources], [moved(folder) for folder in include_dirs]


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(" ".join(command) + "\n" + result.stderr)
