"""The emulator's own tests: it runs right kernels right, and catches each kind of bug in the builds that should."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import emulator as simt
import pytest

pytestmark = pytest.mark.skipif(simt.cuda_include() is None, reason="needs CUDA's headers")

SEEDS = range(8)
WRONG, KERNEL_ERROR, STUCK, SANITIZER = 1, 70, 71, 99

CLEAN = "primitives rotate warp warp-vote pipeline fill vote publish chain count parameters".split()
CLEAN += "events gate concurrent exchange errors".split()

# Of each bug: the builds that must catch it, and how. What a build may miss is left out.
BUGS = {
    "rotate-no-barrier-before-read": {
        "plain": (WRONG, "wrong result"),
        "race": (KERNEL_ERROR, r"data race .* on shared memory\+\d+: rotate .*kernels.cuh:\d+, .*kernels.cuh:\d+"),
    },
    "rotate-no-barrier-before-write": {
        "race": (KERNEL_ERROR, r"data race \(write after read\) on shared memory"),
    },
    "rotate-shared-index": {
        "address": (SANITIZER, r"heap-buffer-overflow(.|\n)*#0 .*selftest::rotate.*kernels.cuh:\d+"),
    },
    "rotate-too-little-shared": {
        kind: (KERNEL_ERROR, "384 bytes of shared memory, launched with 380") for kind in simt.KINDS
    },
    "warp-no-sync": {
        "plain": (WRONG, "wrong result"),
        "race": (KERNEL_ERROR, "data race .* on shared memory"),
    },
    "warp-vote-strict": {"race": (KERNEL_ERROR, "data race .* on shared memory")},
    "pipeline-no-wait": {kind: (WRONG, "wrong result") for kind in simt.KINDS},
    "pipeline-no-barrier": {
        "plain": (WRONG, "wrong result"),
        "race": (KERNEL_ERROR, r"data race \(read after write\) on shared memory"),
    },
    "pipeline-tail": {
        "address": (SANITIZER, r"heap-buffer-overflow(.|\n)*READ(.|\n)*#1 .*selftest::stage.*kernels.cuh:\d+"),
    },
    "pipeline-in-flight": {kind: (KERNEL_ERROR, "exits with asynchronous copies in flight") for kind in simt.KINDS},
    "fill-misaligned": {"address": (SANITIZER, "kernels.cuh:.* store to misaligned address")},
    "fill-behind-end": {"address": (SANITIZER, r"heap-buffer-overflow(.|\n)*WRITE of size 16")},
    "vote-divergent": {kind: (KERNEL_ERROR, "divergent warp collective|deadlock") for kind in simt.KINDS},
    "vote-mask-without-caller": {kind: (KERNEL_ERROR, "mask 0000ffff lacks the lane") for kind in simt.KINDS},
    "vote-overlapping-masks": {kind: (KERNEL_ERROR, "deadlock|meets mask") for kind in simt.KINDS},
    "vote-barrier-divergence": {
        kind: (KERNEL_ERROR, "barrier divergence: .*:[0-9]+, others at") for kind in simt.KINDS
    },
    "vote-deadlock": {
        kind: (KERNEL_ERROR, "deadlock(.|\n)*95 threads at the barrier(.|\n)*1 threads at the warp collective")
        for kind in simt.KINDS
    },
    "publish-early-flag": {
        "plain": (WRONG, "wrong result"),
        "race": (KERNEL_ERROR, "data race"),
    },
    "publish-no-fence": {"race": (KERNEL_ERROR, r"data race \(read after write\) on cudaMalloc")},
    "publish-no-flag": {kind: (STUCK, "no stream can go on(.|\n)*kernel publish") for kind in simt.KINDS},
    "count-plain": {"race": (KERNEL_ERROR, "data race .* on cudaMalloc.*: count block")},
    "events-no-wait": {
        "plain": (WRONG, "wrong result"),
        "race": (KERNEL_ERROR, "data race|wrong result"),
    },
    "exchange-one-connection": {kind: (STUCK, "no stream can go on(.|\n)*exchange") for kind in simt.KINDS},
    "use-after-free": {"address": (SANITIZER, "heap-use-after-free")},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("simt")


@pytest.fixture(scope="session")
def programs(folder: Path) -> dict[str, Path]:
    def build(kind: str) -> Path:
        return simt.build(kind, [simt.FOLDER / "selftest.cu"], folder / kind / "selftest")

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(simt.KINDS, pool.map(build, simt.KINDS), strict=True))


@pytest.mark.parametrize("kind", simt.KINDS)
@pytest.mark.parametrize("case", CLEAN)
def test_right_kernel_passes(programs: dict[str, Path], case: str, kind: str) -> None:
    result = simt.run(programs[kind], case, *SEEDS)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("bug", "kind"), [(bug, kind) for bug, kinds in BUGS.items() for kind in kinds])
def test_bug_is_caught(programs: dict[str, Path], bug: str, kind: str) -> None:
    code, message = BUGS[bug][kind]
    result = simt.run(programs[kind], bug, *SEEDS)
    assert re.search(message, result.stderr), result.stderr
    assert result.returncode == code, result.stderr


@pytest.mark.parametrize("bug", ["rotate-no-barrier-before-read", "rotate-no-barrier-before-write", "warp-no-sync"])
def test_races_do_not_depend_on_the_schedule(programs: dict[str, Path], bug: str) -> None:
    for seed in SEEDS:
        assert simt.run(programs["race"], bug, seed).returncode == KERNEL_ERROR


def test_replacement_changes_a_copy(programs: dict[str, Path], folder: Path) -> None:
    kernels = simt.FOLDER / "selftest_kernels.cuh"
    before = kernels.read_text()
    wrong = [(kernels, "sum += parameters.values[i];", "sum += parameters.values[i] + 1;")]
    source = simt.FOLDER / "selftest.cu"
    program = simt.build("plain", [source], folder / "plain" / "mutant", replacements=wrong)
    assert simt.run(program, "parameters", 0).returncode == WRONG
    assert simt.run(programs["plain"], "parameters", 0).returncode == 0
    assert kernels.read_text() == before
    for old in ("__syncthreads();", "is nowhere"):
        with pytest.raises(simt.BuildError, match="times"):
            simt.build("plain", [source], folder / "plain" / "mutant", replacements=[(kernels, old, "")])


def test_objects_are_reused(programs: dict[str, Path], folder: Path) -> None:
    before = set((folder / "plain" / "objects").iterdir())
    simt.build("plain", [simt.FOLDER / "selftest.cu"], folder / "plain" / "again")
    assert set((folder / "plain" / "objects").iterdir()) == before
