"""The GPU codec's kernels on the emulator: codec.cpp's sets in all builds, and that they notice faults put in."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulator as simt

pytestmark = pytest.mark.skipif(simt.cuda_include() is None, reason="needs CUDA's headers")

CSRC = simt.FOLDER.parents[1] / "csrc"
KERNELS = CSRC / "codec" / "cuda" / "kernels.cuh"
CODEC = CSRC / "codec" / "cuda" / "codec.cu"
SOURCES = [*sorted((CSRC / "codec" / "cpu").glob("*.cpp")), simt.FOLDER / "codec.cpp"]

# "before-sm90": what GPUs before sm_90 run.
BUILDS = {kind: (kind, ()) for kind in simt.KINDS} | {"before-sm90": ("plain", ("ZIPCCL_ADD_MIN=0",))}
SETS = "gpu-to-cpu-small cpu-to-gpu-small reduce-small gpu-to-cpu-large cpu-to-gpu-large reduce-large".split()
SETS += ["reduce-many", "corrupt", "settle"]
FORWARD, REVERSE = 0, 1
SCHEDULES = {"plain": range(10), "address": [FORWARD, 5], "race": [FORWARD, REVERSE, 7], "before-sm90": [3]}
MORE_SCHEDULES = {"plain": range(10, 40), "address": [REVERSE, 6, 7, 8], "race": range(8, 14), "before-sm90": range(8)}


@cache
def cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"zipccl-simt-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compiled(build: str, name: str, codec: Path = CODEC) -> Path:
    """The program; its caller removes it, but objects stay for the next time."""
    kind, defines = BUILDS[build]
    output = cache_folder() / kind / f"{build}-{os.getpid()}-{name}"
    flags = ["-fno-strict-aliasing", "-g1", *(["-O1"] if kind == "address" else [])]  # compiled in half the time
    return simt.build(kind, [codec, *SOURCES], output, [CSRC], defines, flags=flags)


class Run(NamedTuple):
    """A set of codec.cpp under a schedule."""

    build: str
    set: str
    schedule: int

    def result(self, programs: dict[str, Path]) -> str:
        result = simt.run(programs[self.build], self.schedule, self.set)
        return (
            "" if result.returncode == 0 else f"exit code {result.returncode}\n{result.stdout.decode()}{result.stderr}"
        )


def runs(schedules: dict[str, Sequence[int]], marks: Sequence[pytest.MarkDecorator] = ()) -> Iterator:
    names = {FORWARD: "forward", REVERSE: "reverse"}
    for build in BUILDS:
        for schedule in schedules[build]:
            for name in SETS:
                yield pytest.param(
                    Run(build, name, schedule), id=f"{build}-{name}-{names.get(schedule, schedule)}", marks=marks
                )


# ----------------------------------------------------------------------------------------------------------------------
# Faults

TEXT = KERNELS.read_text()
USUAL = ("gpu-to-cpu-small", "cpu-to-gpu-small", "reduce-small", "gpu-to-cpu-large", "cpu-to-gpu-large", "reduce-large")


class Fault(NamedTuple):
    """Another text in the kernels, and what should notice it: some of these sets, by build.

    It takes the place of the first `old` behind the only `after` or, without that, of the only `old`.
    """

    old: str
    new: str
    noticed_by: dict[str, Sequence[str]]
    after: str = ""
    at: int | None = None

    def place(self) -> int:
        if self.at is not None:
            return self.at
        unique = self.after or self.old
        assert TEXT.count(unique) == 1, f"the kernels have {TEXT.count(unique)} times: {unique}"
        return TEXT.index(self.old, TEXT.index(unique))

    def result(self, programs: dict[str, Path]) -> str:
        """What noticed it, if anything."""
        at = self.place()
        for build, sets in self.noticed_by.items():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                # codec.cu finds the kernels beside itself before those of the include path.
                name = Path(folder).name
                codec, kernels = Path(folder) / f"{name}.cu", Path(folder) / "codec" / "cuda" / "kernels.cuh"
                kernels.parent.mkdir(parents=True)
                codec.write_bytes(CODEC.read_bytes())
                kernels.write_text(TEXT[:at] + self.new + TEXT[at + len(self.old) :])
                program = compiled(build, name, codec)
                for objects in (program.parent / "objects").glob(f"{name}.*"):
                    objects.unlink()
            try:
                for schedule in (FORWARD,) if build == "address" else (FORWARD, REVERSE, 5):
                    result = simt.run(program, schedule, *sets)
                    if result.returncode != 0:
                        text = f"{result.stdout.decode()}{result.stderr}"
                        return f"{build}, schedule {schedule}: exit code {result.returncode}\n{text}"
            finally:
                program.unlink()
        return ""


def function_at(at: int) -> str:
    return re.findall(r"^[\w_].* (\w+)\([^;]*$", TEXT[:at], re.M)[-1]


def missing_barriers() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for match in re.finditer(r"__sync(?:threads|warp)\(\);|__syncthreads_or(?=\()|__pipeline_wait_prior\(0\);", TEXT):
        name = f"no {match[0].split('(')[0].strip('_')} in {function_at(match.start())}"
        number = 1 + sum(other.startswith(name) for other in found)
        found[f"{name} {number}"] = Fault(match[0], "", {"race": USUAL}, at=match.start())
    return found


SMALL_IN, SMALL_OUT = ["cpu-to-gpu-small"], ["gpu-to-cpu-small"]
CORRUPT = {"address": ["corrupt"]}
WRONG_OUT, WRONG_IN = {"plain": SMALL_OUT}, {"plain": SMALL_IN}

FAULTS = {
    # Reads and writes behind the end of short sub-blocks.
    "full loads of a short sub-block": Fault(
        "count == kSubBlockElements && ", "", {"address": SMALL_OUT}, "__device__ __forceinline__ void fill_tile("
    ),
    "full stores of a short sub-block": Fault(
        "count == kSubBlockElements && ", "", {"address": SMALL_IN}, "__device__ __forceinline__ void empty_tile("
    ),
    "four own values where there are fewer": Fault(
        "4 * q + 4 <= count && ", "", {"address": ["reduce-small"]}, "load_four("
    ),
    "four results where there are fewer": Fault(
        "count == kSubBlockElements && ",
        "",
        {"address": ["reduce-small"]},
        "static_cast<uint8_t*>(reducing.output) +",
    ),
    "low halves behind the end of a chunk": Fault("if (offset < slot) ", "", {"address": SMALL_OUT}),
    "accumulators behind the end of a chunk": Fault(
        "if (i < count) ", "", {"address": ["reduce-many"]}, "if (!batch.last) {"
    ),
    # Alignment.
    "16-byte loads of any alignment": Fault(
        " && is_aligned(values, 16)",
        "",
        {"address": [*SMALL_OUT, "gpu-to-cpu-large"]},
        "__device__ __forceinline__ void fill_tile(",
    ),
    "16-byte stores of any alignment": Fault(
        " && is_aligned(output, 16)",
        "",
        {"address": [*SMALL_IN, "cpu-to-gpu-large"]},
        "__device__ __forceinline__ void empty_tile(",
    ),
    "16-byte copies from any alignment": Fault(" && is_aligned(from, 16)", "", {"address": SMALL_OUT}),
    "16-byte copies to any alignment": Fault("is_aligned(to, 16) && ", "", {"address": SMALL_IN}),
    "own values of any alignment": Fault(
        " && is_aligned(values, 4 * element_bytes(dtype))", "", {"address": ["reduce-small"]}
    ),
    "results of any alignment": Fault(
        "is_aligned(output, 4 * element_bytes(output_dtype))", "true", {"address": ["reduce-small"]}
    ),
    # Divergence.
    "shuffle by some lanes": Fault(
        "const uint32_t other = __shfl_up_sync(kAllLanes, value, distance);\n    if (lane >= distance) value += other;",
        "if (lane >= distance) value += __shfl_up_sync(kAllLanes, value, distance);",
        WRONG_OUT,
    ),
    "reduction by some lanes": Fault(
        "__reduce_max_sync(kAllLanes, t < 6 ? 0u : key)", "t < 6 ? 0u : __reduce_max_sync(kAllLanes, key)", WRONG_OUT
    ),
    "vote by some lanes": Fault(
        "open = __any_sync(kAllLanes, open);", "open = open || __any_sync(kAllLanes, open);", {"plain": ["settle"]}
    ),
    "barrier for some threads": Fault(
        "__syncthreads();",
        "if (threadIdx.x != 7) __syncthreads();",
        WRONG_IN,
        "__device__ __forceinline__ void decode_chunk(",
    ),
    # Who does what, and how often.
    "pool taken by two lanes": Fault(
        "if (lane == 0) {",
        "if (lane < 2) {",
        {"race": SMALL_OUT, "plain": SMALL_OUT},
        "if (raw) total = raw_pool_bytes(elements);",
    ),
    "low halves taken by a warp": Fault(
        "if (threadIdx.x == 0) shared.low_offset", "if (warp == 0) shared.low_offset", WRONG_OUT
    ),
    "totals without atomics": Fault(
        "return atomicAdd(reinterpret_cast<unsigned long long*>(&total), static_cast<unsigned long long>(count));",
        "const uint64_t before = total;\n  total = before + count;\n  return before;",
        {"race": ["gpu-to-cpu-large"]},
    ),
    "samples counted without atomics": Fault(
        "if (first < count) atomicAdd(counts + (pair >> 7 & 0xff) * 4, 1u);",
        "if (first < count) counts[(pair >> 7 & 0xff) * 4]++;",
        {"race": SMALL_OUT},
    ),
    # The format.
    "escapes stored one further": Fault(
        "listed = shared.listed[warp] + sum", "listed = shared.listed[warp] + sum + 1", WRONG_OUT
    ),
    "escapes of other lanes": Fault(
        "end = shared.listed[warp] + sum", "end = shared.listed[warp] + sum - lane % 2", WRONG_IN
    ),
    "rare escapes loaded one before": Fault("pool[--i];", "pool[--i - 1];", {"address": SMALL_IN, "plain": SMALL_IN}),
    "rare escapes stored one before": Fault(
        "pool[--i] =", "pool[--i - 1] =", {"address": SMALL_OUT, "plain": SMALL_OUT}
    ),
    "escapes beyond the list": Fault("if (of_warp <= kListed) ", "", {"address": SMALL_OUT, "plain": SMALL_OUT}),
    "escapes of absent elements": Fault(
        "if (!full && warp * kSubBlockElements >= elements) escaped = 0;",
        "if (!full && warp * kSubBlockElements >= elements) escaped += 0;",
        WRONG_IN,
    ),
    "another place on one side": Fault("places.granule(j);", "places.granule(j ^ 1);", WRONG_IN),
    "zeros not exchanged": Fault("exchange_zeros(pairs, window.top - 6u);", "", WRONG_OUT),
    "window one lower when sampling": Fault("shared.bins[8 + t - 6]", "shared.bins[8 + t - 7]", WRONG_OUT),
    "window one lower when encoding": Fault("window.top - 6u", "window.top - 5u", WRONG_OUT),
    "window one lower when decoding": Fault(": top - 6;", ": top - 7;", WRONG_IN),
    "zeros as in a plain window": Fault("own.mode == Mode::kWindowAndZero ? 0 :", "false ? 0 :", WRONG_IN),
    "padding that is an escape": Fault("static_cast<uint16_t>(window.top << 7)", "0", WRONG_OUT),
    "no low halves": Fault("low[j].x | low[j].y", "low[j].x", WRONG_OUT),
    # Reducing.
    "half rounded up": Fault("(bits >> 16 & 1)", "1", {"plain": ["reduce-small", "reduce-large"]}),
    "product and sum in one": Fault(
        "__fadd_rn(values[j][k], __fmul_rn(__uint_as_float(four[k]), scale))",
        "__fmaf_rn(__uint_as_float(four[k]), scale, values[j][k])",
        {"plain": ["reduce-small"]},
    ),
    "NaN is no minimum": Fault(" || value != value", "", {"plain": ["reduce-small", "reduce-large"]}),
    "reduced after a launch that failed": Fault(
        "follows && (batch.findings->deferred | batch.findings->fault) != 0",
        "follows && false",
        {"plain": ["reduce-many"]},
    ),
    # What is found.
    "put off without a word": Fault("atomicOr(&findings->deferred, 1u);", "", WRONG_IN),
    "pool that has not arrived": Fault(
        "header.pool_bytes - message.inline_bytes > message.pool_room", "false", {"address": SMALL_IN}
    ),
    "low halves that have not arrived": Fault("header.low_bytes > message.low_room", "false", WRONG_IN),
    "sum of a pool that is not there": Fault(
        "header.pool_bytes < room ? header.pool_bytes : room", "room * 0 + header.pool_bytes", CORRUPT
    ),
    "sum of low halves that are not there": Fault(
        "header.low_bytes < message.low_room ? header.low_bytes : message.low_room", "header.low_bytes", CORRUPT
    ),
    "no check of the pool's range": Fault(
        "own.pool_offset > header.pool_bytes || escapes > header.pool_bytes - own.pool_offset", "false", CORRUPT
    ),
    "pool's range checked in a sum that wraps": Fault(
        "own.pool_offset > header.pool_bytes || escapes > header.pool_bytes - own.pool_offset",
        "uint32_t(own.pool_offset + escapes) > header.pool_bytes",
        CORRUPT,
    ),
    "no check of the low halves' begin": Fault("uint64_t{own.low} * kAlignment >= header.low_bytes", "false", CORRUPT),
    "no check of the low halves' end": Fault(
        "low_slot_bytes(elements) > header.low_bytes - uint64_t{own.low} * kAlignment", "false", CORRUPT
    ),
    "counts that fall": Fault("end >= before && ", "", CORRUPT),
    "counts behind the end": Fault("end == escapes", "end <= escapes", CORRUPT),
    "too many escapes": Fault(" && escapes <= raw_pool_bytes(elements)", "", CORRUPT),
    "too few bytes of a raw chunk": Fault(" && escapes == raw_pool_bytes(elements)", "", CORRUPT),
    "counts of a raw chunk": Fault(
        "raw && block < kSubBlocks - 1 ? end == 0 :", "raw && block < kSubBlocks - 1 ? true :", CORRUPT
    ),
    "top of a raw chunk": Fault("own.top == 0 && ", "", CORRUPT),
    "unknown mode": Fault(" && own.mode <= Mode::kRaw", "", CORRUPT),
    "elements of a chunk": Fault("own.elements == elements && ", "", CORRUPT),
    "codes that do not match": Fault("!= of_warp.x) return false;", "!= of_warp.x && false) return false;", CORRUPT),
    "codes that do not match, rarely": Fault(
        "!= plan.escapes_of[warp].x) return false;", "!= plan.escapes_of[warp].x && false) return false;", CORRUPT
    ),
    "size of the pool": Fault("header.pool_bytes > (plain ? 0 : pool_bound(message.elements))", "false", CORRUPT),
    "size of the low halves": Fault(
        "header.low_bytes > (plain ? 0 : low_bound(message.elements, dtype))", "false", CORRUPT
    ),
    "alignment of the low halves": Fault("header.low_bytes % kAlignment != 0", "false", CORRUPT),
    "inline bytes": Fault("fault = Fault::kOtherInline;", "{\n  }", CORRUPT),
    "elements": Fault("fault = Fault::kOtherCount;", "{\n  }", CORRUPT),
    "dtype": Fault("fault = Fault::kOtherDType;", "{\n  }", CORRUPT),
    "magic": Fault("header.magic != kMagic || ", "", CORRUPT),
    "version": Fault("header.version != kVersion || ", "", CORRUPT),
    "flags": Fault("(header.flags & ~(kPlain | kChecksum)) != 0 ||", "", CORRUPT),
    "plain or not": Fault("((header.flags & kPlain) != 0) != plain || ", "", CORRUPT),
    "reserved fields": Fault("header.reserved0 != 0 || ", "", CORRUPT),
    "checksum": Fault("fault = Fault::kChecksum;", "{\n    }", CORRUPT),
    "checksum without its flag": Fault("((header.flags & kChecksum) == 0 && header.checksum != 0)", "false", CORRUPT),
}

# One for each kind of fault; the others with -m slow.
DEFAULT_FAULTS = {
    "no pipeline_wait_prior in fill_tile 1",
    "no syncthreads in sample_window 1",
    "no syncwarp in decode_chunk 1",
    "full loads of a short sub-block",
    "16-byte stores of any alignment",
    "shuffle by some lanes",
    "barrier for some threads",
    "pool taken by two lanes",
    "another place on one side",
    "put off without a word",
    "no check of the pool's range",
    "counts that fall",
}

# They save registers: the next barrier would do.
SPARE_BARRIERS = {"no syncthreads in encode_rare_chunk 1", "no syncwarp in reduce_chunks 1"}


def faults() -> Iterator:
    every = missing_barriers() | FAULTS
    assert every.keys() >= DEFAULT_FAULTS, DEFAULT_FAULTS - every.keys()
    for name, fault in every.items():
        marks = [] if name in DEFAULT_FAULTS else [pytest.mark.slow]
        if name in SPARE_BARRIERS:
            marks.append(pytest.mark.xfail(strict=True))
        yield pytest.param(fault, id=name, marks=marks)


# ----------------------------------------------------------------------------------------------------------------------
# Tests


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, Path]]:
    built = {build: compiled(build, "sound") for build in BUILDS}
    yield built
    for program in built.values():
        program.unlink()


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, programs: dict[str, Path]) -> Iterator[dict[str, Future]]:
    """Of all tests here that were asked for, two at a time while others wait."""
    mine = [item for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(2) as pool:
        yield {item.name: pool.submit(item.callspec.params["job"].result, programs) for item in mine}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("job", [*runs(SCHEDULES), *runs(MORE_SCHEDULES, [pytest.mark.slow])])
def test_set(job: Run, results: dict[str, Future], request: pytest.FixtureRequest) -> None:
    text = results[request.node.name].result()
    assert not text, text


@pytest.mark.parametrize("job", [*faults()])
def test_fault_is_noticed(job: Fault, results: dict[str, Future], request: pytest.FixtureRequest) -> None:
    assert results[request.node.name].result()
