"""The cost of the CUDA kernels in machine instructions, and that benchmarks/sass.py would notice if it rose."""

import pytest
from programs import load

sass = load("sass.py")

needs_nvcc = pytest.mark.skipif(
    sass.nvcc() is None, reason="nvcc is not installed: the CUDA kernels cannot be compiled"
)

FIXTURE = """
#include <cstdint>

#include "codec/format.h"

namespace zipccl::cuda {

// 64 values a thread across a barrier, but only 32 registers.
__global__ void __launch_bounds__(1024, 2) spills(const float* in, float* out) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; i++) values[i] = in[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) out[i * 1024 + threadIdx.x] = values[i] * values[63 - i];
}

__global__ void indexes_locally(const int* in, int* out) {
  int values[64] = {};
  for (int i = 0; i < 1000; i++) values[in[i] & 63] += i;
  for (int i = 0; i < 64; i++) out[i * 1024 + threadIdx.x] = values[i];
}

// 40 multiplications or so that nothing removes.
__device__ __forceinline__ uint32_t mixed(uint32_t x) {
#pragma unroll
  for (int i = 0; i < 40; i++) x = x * 0x9e3779b1u ^ (x >> 15);
  return x;
}

template <DType dtype>
__global__ void loops(const uint32_t* in, uint32_t* out) {
  uint32_t rest = in[threadIdx.x], sum = 0;
#pragma unroll 1
  while (rest != 0) {  // loop: 20
    sum += in[__ffs(rest)];
    rest &= rest - 1;
  }
  out[threadIdx.x] = sum;
}

__global__ void loops_without_a_mark(const uint32_t* in, uint32_t* out, uint32_t count) {
  uint32_t sum = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < count; i++) sum += in[i];
  out[threadIdx.x] = sum;
}

__global__ void branches(const uint32_t* in, uint32_t* out, uint32_t count) {
  if (threadIdx.x >= count) return;  // cold
  uint32_t x = in[threadIdx.x];
  if (x < 1000) {  // cold: rare
    x = mixed(x);
    for (uint32_t i = 0; i < x; i++) out[i] = mixed(i);
  }
  __syncthreads();
  out[threadIdx.x] = x + 1;
}

__global__ void branches_without_a_mark(const uint32_t* in, uint32_t* out) {
  uint32_t x = in[threadIdx.x];
  if (x < 1000) {
    x = mixed(x);
    out[x] = x;
    __threadfence();
  }
  __syncthreads();
  out[threadIdx.x] = x + 1;
}

template __global__ void loops<DType::kBFloat16>(const uint32_t*, uint32_t*);

}  // namespace zipccl::cuda
"""


@pytest.fixture(scope="module")
def fixture(tmp_path_factory):
    source = tmp_path_factory.mktemp("sass") / "fixture.cu"
    source.write_text(FIXTURE)
    return {cost.kernel.name: cost for cost in sass.analyze(source, ["sm_90"], elements=1)}


# sm_80 is the oldest and has no addition with minimum; 100 and 120 have another instruction set.
@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_kernels_keep_their_budgets_and_use_no_local_memory(arch):
    costs = sass.analyze(sass.SOURCE, [arch])
    assert sass.check(costs) == []


def test_a_missing_kernel_is_an_error():
    wrong = sass.check([])
    assert len(wrong) == len(sass.BUDGETS)
    assert "there is no kernel encode_chunks<kBFloat16" in wrong[0]


@needs_nvcc
def test_spills_and_local_arrays_are_errors(fixture):
    wrong = sass.check(list(fixture.values()), [])
    assert [sentence.split(" on ")[0] for sentence in sorted(wrong)] == ["indexes_locally", "spills"]
    assert fixture["spills"].kernel.spill_bytes > 0 and fixture["spills"].local > 0
    assert fixture["indexes_locally"].kernel.stack_bytes == 256


@needs_nvcc
def test_a_loop_counts_as_often_as_it_runs(fixture):
    cost = fixture["loops<kBFloat16>"]
    assert cost.problems == []
    body = round(cost.looped / 20)
    assert 5 <= body <= 12 and cost.looped == 20 * body
    budget = sass.Budget("loops<kBFloat16*", 8, {cost.arch: cost.instructions - 1})
    (sentence,) = sass.check([cost], [budget])
    assert "instructions per element" in sentence
    assert sass.check([cost], [sass.Budget("loops<*", 8, {cost.arch: cost.instructions})]) == []


@needs_nvcc
def test_a_loop_without_a_mark_is_an_error(fixture):
    cost = fixture["loops_without_a_mark"]
    (sentence,) = sass.check([cost], [sass.Budget(cost.kernel.name, 8)])
    assert "has no 'loop'" in sentence and "fixture.cu" in sentence


@needs_nvcc
def test_cold_code_does_not_count(fixture):
    marked, unmarked = fixture["branches"], fixture["branches_without_a_mark"]
    assert marked.problems == [] and marked.looped == 0
    assert 10 <= marked.instructions <= 30
    assert unmarked.instructions >= marked.instructions + 40


@needs_nvcc
def test_kinds_of_instructions(fixture):
    for cost in fixture.values():
        assert sum(cost.classes.values()) == pytest.approx(cost.instructions)
        assert cost.classes["global"] >= 2
        assert "other" not in cost.classes


def test_marks():
    markers = sass.find_markers(
        "\n".join(
            [
                "void f() {",  # 1
                "  if (a) {  // cold: a brace in a comment {",
                '    g("{");',
                "  } else {  // cold",
                "    h();",
                "  }",
                "  long_call(with,",
                "            arguments);  // cold",
                "  while (b) {  // loop: 2.5",
                "    { i(); }",  # 10
                "  }",
                "  if (lane == 0) {  // loop: 0.125",
                "    j();",
                "  }  // loop: end",
                "  // cold: begin",
                "  k();",
                "  // cold: end",
                "  l();  // coldest",
                "}",
            ]
        )
    )
    assert [list(lines) for lines in markers.cold] == [[3, 4], [5, 6], [7, 8], [16]]
    assert [(list(lines), times) for lines, times in markers.loops] == [([9, 10, 11], 2.5), ([12, 13, 14], 0.125)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("f();  // loop: 3", "behind an opening brace"),
        ("{  // loop: often\n}", "needs a number"),
        ("{  // cold", "never closed"),
        ("// cold: end", "without a 'cold: begin'"),
        ("// cold: begin", "without a 'cold: end'"),
    ],
)
def test_a_bad_mark_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        sass.find_markers(text)


def kernel(*code: str):
    """A kernel from lines of machine code; `label:` stands for itself, `!` before an instruction for a cold line."""
    places = {True: [("cold.cuh", 1)], False: [("hot.cuh", 1)]}
    result = sass.Kernel("kernel")
    for line in code:
        if line.endswith(":"):
            result.labels[line[:-1]] = len(result.instructions)
            continue
        guard, _, rest = (
            line.lstrip("!").rpartition("@")[2].partition(" ") if "@" in line else ("", "", line.lstrip("!"))
        )
        opcode, _, operands = rest.partition(" ")
        address = 16 * len(result.instructions)
        result.instructions.append(sass.Instruction(address, guard, opcode, operands, places[line.startswith("!")]))
    return result


@pytest.fixture
def cold_file(monkeypatch):
    cold = sass.Markers(cold=[range(1, 2)])
    monkeypatch.setattr(sass, "markers_of", lambda file: cold if file == "cold.cuh" else sass.Markers())


def test_an_end_that_cold_code_shares_counts(cold_file):
    # The store at .L_end is written in cold code only, but the path has to pass it too.
    cost = sass.measure(
        kernel(
            "ISETP P0",
            "@P0 BRA .L_cold",
            "LDG R1",
            "BRA .L_end",
            ".L_cold:",
            "!IMAD R1",
            "!IMAD R2",
            ".L_end:",
            "!STG R1",
            "!EXIT",
        ),
        "sm_90",
        1,
    )
    assert cost.problems == [] and cost.instructions == 6


def test_where_both_sides_are_cold_the_shorter_counts(cold_file):
    cost = sass.measure(
        kernel(
            "ISETP P0",
            "@P0 BRA .L_long",
            "!IMAD R1",
            "!BRA .L_end",
            ".L_long:",
            "!IMAD R1",
            "!IMAD R2",
            "!IMAD R3",
            ".L_end:",
            "STG R1",
            "EXIT",
        ),
        "sm_90",
        1,
    )
    assert cost.instructions == 6


def test_slow_ways_that_the_compiler_adds_do_not_count(cold_file):
    # It provides for warps whose threads have diverged before a shuffle.
    cost = sass.measure(
        kernel(
            "BRA.DIV UR4, .L_diverged",
            "SHFL R1",
            ".L_back:",
            "STG R1",
            "EXIT",
            ".L_diverged:",
            "IMAD R1",
            "BRA .L_back",
        ),
        "sm_90",
        1,
    )
    assert cost.instructions == 4
