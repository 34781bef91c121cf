"""What the CUDA kernels cost, read from their machine code: no GPU is needed.

Compiles csrc/codec/cuda/codec.cu, disassembles it, and reports for each kernel registers, spills and shared memory, the
instructions per element on the path that nearly all data takes, and what share of the time that memory takes anyway the
instructions take on several GPUs.

    python benchmarks/sass.py [--arch all] [--blocks KERNEL] [--json FILE]

It exits with 1 if a kernel spills, or needs more instructions per element than BUDGETS allow.

The path is found in the control flow graph of the machine code, with the help of comments in the sources:

    if (!aligned) {  // cold: why           the lines up to the closing brace, but not this one with its condition
    } else {  // cold                       likewise; also behind the opening brace of a function
    if (count == 0) return;  // cold        the statement that ends here, with all that is inlined into it
    {  // cold: begin ... }  // cold: end   the lines between
    while (escapes) {  // loop: 3.0         how often the body runs, on average, up to the closing brace
    if (threadIdx.x == 0) {  // loop: 0.125 the share of the warps that come here

Instructions count where the compiler has put them, not where they were written: a piece of straight code is cold if
more than half of it comes from cold lines, also by way of a cold call of an inlined function, or if it makes a cold
call. Where the code branches,
the path takes the sides that are not cold; where both are not, both count. If that leads nowhere, because the compiler
lets cold code and the path share an end, it takes the fewest cold instructions that lead on. Every loop on the path
needs a "loop", and must not be unrolled in part: each turn of the machine code's loop counts as one of the source's. A
loop with a mark that is not on the path is an error.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import heapq
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "csrc" / "codec" / "cuda" / "codec.cu"
FORMAT = ROOT / "csrc" / "codec" / "format.h"
ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
MAIN_ARCH = "sm_90"
# As in setup.py. The line information does not change the code.
FLAGS = ["-O3", "--fmad=false", "-std=c++20", "-lineinfo", "-Xptxas=-v", "-I", str(ROOT / "csrc")]


@dataclass(frozen=True)
class Budget:
    """What a kernel that codes chunks may cost per element."""

    kernel: str  # a pattern
    bytes: float  # read and written in GPU memory
    instructions: dict[str, float] = field(default_factory=dict)  # by architecture; of others, any number


# A bf16 element is 1.4 bytes on the wire, a dense fp32 element 3.4. Reductions are counted for one message.
# Before sm_90 nothing adds and takes the minimum at once; encode_chunks<..., true> also samples the chunk.
BUDGETS = [
    Budget("encode_chunks<kBFloat16, false>", 2 + 1.4, {"sm_80": 10, MAIN_ARCH: 8, "sm_100": 8.5, "sm_120": 8.75}),
    Budget("encode_chunks<kBFloat16, true>", 2 + 1.4, {"sm_80": 12, MAIN_ARCH: 10.5, "sm_100": 10.75, "sm_120": 11}),
    Budget("decode_chunks<kBFloat16>", 2 + 1.4, {"sm_80": 9.75, MAIN_ARCH: 8, "sm_100": 8.5, "sm_120": 8.5}),
    Budget("reduce_chunks<kBFloat16, *>", 2 + 1.4, {MAIN_ARCH: 24}),
    Budget("encode_chunks<kFloat32*", 4 + 3.4),
    Budget("decode_chunks<kFloat32>", 4 + 3.4),
    Budget("reduce_chunks<kFloat32, *>", 4 + 3.4),
]


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str
    processors: int
    gigahertz: float
    gigabytes_per_second: float


# Boost clock and memory bandwidth of the data sheets. A GPU under load is somewhat slower in both.
GPUS = [
    Gpu("A100 80GB SXM", "sm_80", 108, 1.41, 2039),
    Gpu("RTX 3090", "sm_86", 82, 1.695, 936),
    Gpu("RTX 4090", "sm_89", 128, 2.52, 1008),
    Gpu("H100 SXM", "sm_90", 132, 1.98, 3350),
    Gpu("H200 SXM", "sm_90", 132, 1.98, 4800),
    Gpu("B200", "sm_100", 148, 1.965, 8000),
    Gpu("RTX 5090", "sm_120", 170, 2.407, 1792),
    Gpu("RTX PRO 6000", "sm_120", 188, 2.617, 1792),
]

# Threads per clock and processor. "alu", "fma", "slow" and "shuffle" are the rates of 32-bit integer addition and
# logic, integer multiplication, population count and warp shuffle in the CUDA programming guide's table of arithmetic
# throughput for compute capability 8.x and 9.0, from memory. Assumed to hold on 10.0 and 12.0, where integers may be
# faster; floating-point multiplications and additions are, from 8.6 on. Each of four schedulers issues one instruction
# of 32 threads.
RATES = {"issue": 128, "alu": 64, "fma": 64, "slow": 16, "shuffle": 32}
# Bytes per clock and processor between the registers and shared memory or the L1 cache, which are one memory.
L1_BYTES = 128
REGISTERS = 65536
SHARED_KIB = {"sm_80": 164, "sm_90": 228, "sm_100": 228}  # on the others 100
WARPS = {"sm_80": 64, "sm_90": 64, "sm_100": 64}  # on the others 48

# By the first word of the instruction. What is not listed is "other".
CLASSES = {
    "alu": """BMSK CS2R F2FP FMNMX FMNMX3 FSEL FSET FSETP HMNMX2 HSET2 HSETP2 I2FP I2IP IABS IADD IADD3 IMNMX ISETP LEA
        LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT SHF VABSDIFF VABSDIFF4 VIADD VIADDMNMX VIMNMX VIMNMX3 VOTE""",
    "fma": "FADD FADD2 FFMA FFMA2 FMUL FMUL2 HADD2 HFMA2 HMUL2 IDP IMAD IMUL",
    "slow": "BREV F2F F2I FCHK FLO FRND I2F MATCH MUFU POPC REDUX S2R",
    "uniform": """CREDUX LDC LDCU R2UR S2UR UBMSK UFLO UIADD3 UIMAD UIMNMX UISETP ULDC ULEA ULOP3 UMOV UP2UR UPLOP3
        UPOPC UPRMT UR2UP USEL USGXT USHF UVIADD UVIMNMX VOTEU""",
    "global": "ATOM ATOMG CCTL LD LDG LDGSTS RED REDG ST STG UBLKCP",
    "local": "LDL STL",
    "shared": "ATOMS LDS LDSM STS STSM",
    "shuffle": "SHFL",
    "branch": """B2R BAR BMOV BPT BRA BREAK BRX BSSY BSYNC CALL CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT FENCE JMP
        LDGDEPBAR MEMBAR NANOSLEEP NOP RET SYNCS WARPSYNC YIELD""",
}
CLASS_OF = {opcode: name for name, opcodes in CLASSES.items() for opcode in opcodes.split()}


# ---- Markers in the sources


@dataclass
class Markers:
    cold: list[range] = field(default_factory=list)
    loops: list[tuple[range, float]] = field(default_factory=list)


def without_comments(text: str) -> list[str]:
    """The lines with blanks instead of comments and literals, so that braces and semicolons can be counted."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text).split("\n")


def closing_line(code: Sequence[str], first: int) -> int | None:
    """The line that closes the last brace that is left open in line `first`, or None if it leaves none open."""
    opened = 0
    for character in reversed(code[first]):
        opened += (character == "{") - (character == "}")
        if opened > 0:
            break
    else:
        return None
    for number in range(first + 1, len(code)):
        for character in code[number]:
            opened += (character == "{") - (character == "}")
            if opened == 0:
                return number
    raise ValueError(f"line {first + 1}: the brace is never closed")


def statement(code: Sequence[str], last: int) -> range:
    """The lines of the statement that ends in line `last`."""
    first = last
    while first > 0 and code[first - 1].strip() and not re.search(r"[;{}:]\s*$|^\s*#", code[first - 1]):
        first -= 1
    return range(first, last + 1)


def find_markers(text: str) -> Markers:
    code = without_comments(text)
    markers = Markers()
    begin = None
    for index, line in enumerate(text.split("\n")):
        match = re.search(r"//\s*(cold|loop)(?:: (\S+)|:?$)", line.rstrip())
        if not match or match.groups() == ("loop", "end"):
            continue
        kind, word = match[1], match[2]
        if kind == "cold" and word == "begin":
            begin = index
        elif kind == "cold" and word == "end":
            if begin is None:
                raise ValueError(f"line {index + 1}: 'cold: end' without a 'cold: begin'")
            markers.cold.append(range(begin + 2, index + 1))
            begin = None
        else:
            end = closing_line(code, index)
            if kind == "cold":
                # The line of the brace also has the condition, which is always evaluated.
                lines = statement(code, index) if end is None else range(index + 1, end + 1)
                markers.cold.append(range(lines.start + 1, lines.stop + 1))
            elif end is None or not re.fullmatch(r"\d+(\.\d+)?", word or ""):
                raise ValueError(f"line {index + 1}: 'loop' needs a number, and to stand behind an opening brace")
            else:
                markers.loops.append((range(index + 1, end + 2), float(word)))
    if begin is not None:
        raise ValueError(f"line {begin + 1}: 'cold: begin' without a 'cold: end'")
    return markers


@functools.cache
def markers_of(file: str) -> Markers:
    path = Path(file)
    try:
        return find_markers(path.read_text()) if path.is_file() else Markers()
    except ValueError as error:
        raise SystemExit(f"sass.py: {path}, {error}.") from None


# ---- Machine code


@dataclass
class Instruction:
    address: int
    guard: str
    opcode: str
    operands: str
    places: list[tuple[str, int]]  # file and line, then where that was inlined, and so on

    @property
    def kind(self) -> str:
        return CLASS_OF.get(self.opcode.split(".")[0], "other")

    @property
    def is_cold(self) -> bool:
        return any(line in lines for file, line in self.places for lines in markers_of(file).cold)

    @property
    def l1_bytes(self) -> int:
        """What a warp moves between registers and L1 or shared memory, if its addresses are consecutive."""
        if self.kind not in ("global", "shared"):
            return 0
        width = re.search(r"\.(?:[US])?(8|16|64|128|256)\b", self.opcode)
        return max(L1_BYTES, 32 * int(width[1]) // 8) if width else L1_BYTES


@dataclass
class Kernel:
    """A kernel's code and what ptxas said about it."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int = 0  # in a block, 0 if the source does not limit it
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0

    def warps(self, arch: str) -> int:
        """That a processor can hold at a time. Dynamic shared memory, which the code does not tell, is not counted."""
        per_block = -(-self.threads // 32)
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32)
        by_shared = SHARED_KIB.get(arch, 100) * 1024 // (self.shared_bytes + 1024) * per_block
        return min(by_registers, by_shared, WARPS.get(arch, 48)) // per_block * per_block if per_block else by_registers


def nvcc() -> str | None:
    folders = [f"{os.environ.get('CUDA_HOME')}/bin", os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def nvdisasm() -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = [f"{folder}/cu13/bin" for folder in (spec.submodule_search_locations or [] if spec else [])]
    found = shutil.which("nvdisasm", path=os.pathsep.join(folders)) or shutil.which("nvdisasm")
    if not found:
        raise SystemExit("sass.py: nvdisasm is missing: pip install 'nvidia-cuda-nvdisasm==13.2.*'.")
    return found


def compile_cubins(source: Path, archs: Iterable[str], folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Architecture, cubin, and what ptxas said about its kernels."""
    compiler = nvcc()
    if not compiler:
        raise SystemExit("sass.py: nvcc is missing: install the CUDA toolkit or set CUDA_HOME.")
    for arch in archs:
        cubin = folder / f"{source.stem}.{arch}.cubin"
        command = [compiler, "-cubin", f"-arch={arch}", *FLAGS, str(source), "-o", str(cubin)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode != 0:
            raise SystemExit(f"sass.py: {source} does not compile for {arch}:\n{process.stdout}{process.stderr}")
        yield arch, cubin, process.stdout + process.stderr


@functools.cache
def dtype_names() -> dict[str, str]:
    text = FORMAT.read_text()
    members = re.search(r"enum class DType[^{]*{(.*?)}", text, re.DOTALL)
    assert members, f"{FORMAT} has no DType"
    return {value: name for name, value in re.findall(r"(\w+) = (\d+)", members[1])}


def readable(mangled: str) -> str:
    """`encode_chunks<kBFloat16, true>` for what nvcc calls it."""
    if not shutil.which("c++filt"):
        return mangled
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True).stdout.strip()
    name = re.sub(r"\(zipccl::DType\)(\d+)", lambda match: dtype_names().get(match[1], match[0]), name)
    name = re.sub(r"^void ", "", name)
    depth = 0
    for position, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0 and not name.startswith("(anonymous", position):
            name = name[:position]
            break
    return re.sub(r"\(anonymous namespace\)::|zipccl::|cuda::", "", name)


def parse(listing: str, remarks: str) -> dict[str, Kernel]:
    """Kernels by mangled name, from nvdisasm's listing and ptxas's remarks."""
    kernels: dict[str, Kernel] = {}
    threads: dict[str, int] = {}
    section = kernel_name = ""
    places: list[tuple[str, int]] = []
    fresh = True
    wants_threads = False
    for line in listing.splitlines():
        if match := re.match(r"//-+ (\S+)", line):
            section, kernel_name = match[1], ""
            if section.startswith(".text."):
                kernel_name = section.removeprefix(".text.")
                kernels[kernel_name] = Kernel(readable(kernel_name))
                places = []
        elif section.startswith(".nv.info."):
            if "EIATTR_MAX_THREADS" in line:
                wants_threads = True
            elif wants_threads and (match := re.search(r"\.word\s+(0x[0-9a-f]+)", line)):
                threads[section.removeprefix(".nv.info.")] = int(match[1], 16)
                wants_threads = False
        elif kernel_name:
            kernel = kernels[kernel_name]
            if match := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
                places = [] if fresh else places
                places = [*places, (match[1], int(match[2]))]
                fresh = False
            elif match := re.match(r"(\.L\w+):", line):
                kernel.labels[match[1]] = len(kernel.instructions)
            elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(\S+)\s+)?(\S+?)(?:\s+(.*?))?\s*;", line):
                kernel.instructions.append(
                    Instruction(int(match[1], 16), match[2] or "", match[3], match[4] or "", places)
                )
                fresh = True
    for entry in re.split(r"Compiling entry function '", remarks)[1:]:
        kernel = kernels[entry[: entry.index("'")]]
        numbers = {
            name: int(match[1]) if (match := re.search(pattern, entry)) else 0
            for name, pattern in {
                "registers": r"Used (\d+) registers",
                "shared_bytes": r"(\d+) bytes smem",
                "stack_bytes": r"(\d+) bytes stack frame",
                "stores": r"(\d+) bytes spill stores",
                "loads": r"(\d+) bytes spill loads",
            }.items()
        }
        kernel.registers, kernel.shared_bytes = numbers["registers"], numbers["shared_bytes"]
        kernel.stack_bytes, kernel.spill_bytes = numbers["stack_bytes"], numbers["stores"] + numbers["loads"]
    for name, kernel in kernels.items():
        kernel.threads = threads.get(name, 0)
    return kernels


# ---- Control flow


@dataclass
class Block:
    instructions: list[Instruction]
    successors: list[int]
    leaves: bool  # ends the kernel, at least for some threads


def blocks_of(kernel: Kernel) -> list[Block]:
    code = kernel.instructions
    jumps = ("BRA", "BRX", "JMP", "CALL", "EXIT", "RET")
    starts = {0, *kernel.labels.values()}
    starts |= {index + 1 for index, instruction in enumerate(code) if instruction.opcode.split(".")[0] in jumps}
    order = sorted(start for start in starts if start < len(code))
    number = {start: position for position, start in enumerate(order)}
    blocks = []
    for position, start in enumerate(order):
        end = order[position + 1] if position + 1 < len(order) else len(code)
        last = code[end - 1]
        operation = last.opcode.split(".")[0]
        targets = [
            number[kernel.labels[label]] for label in re.findall(r"\.L\w+", last.operands) if label in kernel.labels
        ]
        conditional = last.guard not in ("", "PT") or re.match(r"!?U?P\d", last.operands) is not None
        successors: list[int] = []
        if operation in ("BRA", "BRX", "JMP", "CALL") and ".DIV" not in last.opcode:
            # BRA.DIV leads to what the compiler provides for warps that have diverged before a shuffle or vote.
            successors += targets
        falls_through = operation not in ("BRA", "BRX", "JMP", "EXIT", "RET") or conditional or ".DIV" in last.opcode
        if falls_through and end in number:
            successors.append(number[end])
        blocks.append(Block(code[start:end], successors, operation in ("EXIT", "RET")))
    return blocks


def reachable(blocks: Sequence[Block], allowed: set[int]) -> set[int]:
    found: set[int] = set()
    open_ = [0]
    while open_:
        block = open_.pop()
        if block in allowed and block not in found:
            found.add(block)
            open_ += blocks[block].successors
    return found


def predecessors(blocks: Sequence[Block], nodes: set[int]) -> dict[int, set[int]]:
    before: dict[int, set[int]] = {block: set() for block in nodes}
    for block in nodes:
        for successor in blocks[block].successors:
            if successor in nodes:
                before[successor].add(block)
    return before


def dominators_of(blocks: Sequence[Block], nodes: set[int]) -> dict[int, set[int]]:
    """The blocks that every way to a block passes, itself included."""
    before = predecessors(blocks, nodes)
    dominators = {block: nodes for block in nodes}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(nodes - {0}):
            new = {block} | set.intersection(*(dominators[previous] for previous in before[block]))
            changed |= len(new) != len(dominators[block])
            dominators[block] = new
    return dominators


def pieces_of(blocks: Sequence[Block], nodes: set[int]) -> list[list[int]]:
    """Blocks in one piece: each leads to the next only, and the next is entered from there only, but for loops."""
    before, dominators = predecessors(blocks, nodes), dominators_of(blocks, nodes)
    pieces: dict[int, list[int]] = {}
    for block in sorted(nodes):
        entered = [previous for previous in before[block] if block not in dominators[previous]]
        # Where some threads end, the rest goes on as after a branch.
        leads_here = (
            len(entered) == 1
            and entered[0] in pieces
            and len(set(blocks[entered[0]].successors)) == 1
            and not blocks[entered[0]].leaves
        )
        pieces[block] = pieces[entered[0]] if leads_here else []
        pieces[block].append(block)
    return list({id(piece): piece for piece in pieces.values()}.values())


def mostly(instructions: Sequence[Instruction], holds: Callable[[Instruction], bool]) -> bool:
    # Branches and barriers stand at the seams: they say little about which side they belong to.
    voters = [instruction for instruction in instructions if instruction.kind != "branch"] or instructions
    return 2 * sum(map(holds, voters)) > len(voters)


def way_on(blocks: Sequence[Block], stuck: set[int], cold: set[int]) -> set[int]:
    """The cold blocks with the fewest instructions through which the path gets from `stuck` to elsewhere, or out."""
    queue: list[tuple[int, tuple[int, ...]]] = [(0, (block,)) for block in stuck]
    seen: set[int] = set()
    while queue:
        cost, way = heapq.heappop(queue)
        block = way[-1]
        if block in seen:
            continue
        seen.add(block)
        if (block not in cold and block not in stuck) or blocks[block].leaves:
            return set(way) & cold
        for successor in blocks[block].successors:
            extra = len(blocks[successor].instructions) if successor in cold else 0
            heapq.heappush(queue, (cost + extra, (*way, successor)))
    return set()


def path_of(blocks: Sequence[Block], nodes: set[int], cold: set[int]) -> set[int]:
    cold = set(cold)
    while True:
        path = reachable(blocks, nodes - cold)
        # Where there is no choice, the path goes on whatever the lines say.
        forced = {
            successor
            for block in path
            if len(set(blocks[block].successors)) == 1 and not blocks[block].leaves
            for successor in blocks[block].successors
        }
        if not forced & cold:
            ends = {block for block in path if blocks[block].leaves}
            before = predecessors(blocks, path)
            open_ = list(ends)
            while open_:
                new = before[open_.pop()] - ends
                ends |= new
                open_ += new
            forced = way_on(blocks, path - ends, cold) if path - ends else set()
            if not forced:
                return path
        cold -= forced


def loops_of(blocks: Sequence[Block], nodes: set[int]) -> dict[int, set[int]]:
    """The blocks of every loop, by the block that it is entered through."""
    before, dominators = predecessors(blocks, nodes), dominators_of(blocks, nodes)
    loops: dict[int, set[int]] = {}
    for block in nodes:
        for head in blocks[block].successors:
            if head in dominators[block]:
                body, open_ = loops.setdefault(head, {head}), [block]
                while open_:
                    inner = open_.pop()
                    if inner not in body:
                        body.add(inner)
                        open_ += before[inner]
    return loops


# ---- Counting


@dataclass
class Cost:
    """A kernel on one architecture. Counts are per element if `elements` is known, else per thread."""

    kernel: Kernel
    arch: str
    elements: float
    straight: float  # instructions outside of loops
    looped: float
    classes: dict[str, float]
    l1_bytes: float
    local: int  # accesses to local memory anywhere in the kernel
    loops: list[str]
    problems: list[str]
    listing: list[str]

    @property
    def instructions(self) -> float:
        return self.straight + self.looped

    def shares(self, gpu: Gpu, bytes_per_element: float) -> dict[str, float]:
        """The time that each part of the processors is busy, in units of the time that GPU memory is."""
        clocks = {name: self.classes.get(name, 0) / rate for name, rate in RATES.items() if name != "issue"}
        clocks["issue"] = self.instructions / RATES["issue"]
        clocks["L1"] = self.l1_bytes / 32 / L1_BYTES
        memory = bytes_per_element / gpu.gigabytes_per_second * gpu.processors * gpu.gigahertz
        return {name: value / memory for name, value in clocks.items()}


def place_of(instruction: Instruction) -> str:
    return " < ".join(f"{Path(file).name}:{line}" for file, line in instruction.places) or "no line"


Mark = tuple[str, range, float]  # file, lines, and what `loop` says


def mark_of(code: Sequence[Instruction], is_loop: bool) -> Mark | None:
    """The innermost `loop` that most of the instructions come from, either of those below 1 or of the others."""
    votes: Counter[Mark] = Counter()
    depths: dict[Mark, int] = {}
    voters = [instruction for instruction in code if instruction.kind != "branch"] or code
    for instruction in voters:
        marks = {
            (file, lines, times): depth
            for depth, (file, line) in reversed(list(enumerate(instruction.places)))
            for lines, times in markers_of(file).loops
            if line in lines and (times >= 1) == is_loop
        }
        votes.update(marks.keys())
        for mark, depth in marks.items():
            depths[mark] = min(depth, depths.get(mark, depth))
    likely = [mark for mark, count in votes.items() if 2 * count > len(voters)]
    return min(likely, key=lambda mark: (depths[mark], len(mark[1])), default=None)


def own_code(blocks: Sequence[Block], loops: dict[int, set[int]], head: int) -> list[Instruction]:
    """The instructions of a loop without those of the loops in it."""
    inner = set().union(*(body for other, body in loops.items() if other != head and body < loops[head]))
    return [instruction for number in sorted(loops[head] - inner) for instruction in blocks[number].instructions]


def is_cold_call(instruction: Instruction) -> bool:
    return instruction.is_cold and instruction.opcode.startswith("CALL")


def measure(kernel: Kernel, arch: str, elements: float) -> Cost:
    blocks = blocks_of(kernel)
    nodes = reachable(blocks, set(range(len(blocks))))
    cold: set[int] = set()
    weights = dict.fromkeys(nodes, 1.0)
    for piece in pieces_of(blocks, nodes):
        code = [instruction for number in piece for instruction in blocks[number].instructions]
        if mostly(code, lambda instruction: instruction.is_cold) or any(map(is_cold_call, code)):
            cold |= set(piece)
        share = mark_of(code, is_loop=False)
        for number in piece:
            weights[number] = share[2] if share else 1.0
    cold -= {0}
    path = path_of(blocks, nodes, cold)
    problems, texts, found = [], [], set()
    if not any(blocks[number].leaves for number in path):
        problems.append("no way through the kernel was found")
    loops = loops_of(blocks, path)
    for head, body in sorted(loops.items()):
        own = own_code(blocks, loops, head)
        size = sum(len(blocks[number].instructions) for number in body)
        mark = mark_of(own, is_loop=True)
        if mark is None:
            problems.append(f"a loop of {size} instructions has no 'loop' in the source: {place_of(own[0])}")
            continue
        found.add(mark)
        texts.append(f"{size} instructions x {mark[2]:g} ({Path(mark[0]).name}:{mark[1].start})")
        for number in body:
            weights[number] *= mark[2]
    everywhere = loops_of(blocks, nodes)
    marks = {mark_of(own_code(blocks, everywhere, head), is_loop=True) for head in everywhere}
    problems += [
        f"the loop at {Path(mark[0]).name}:{mark[1].start} is not on the path; is a 'cold' missing or too much?"
        for mark in marks
        if mark and mark not in found
    ]
    in_loops = set().union(*loops.values())
    totals = {True: 0.0, False: 0.0}
    classes: Counter[str] = Counter()
    l1_bytes = 0.0
    listing = []
    calls: Counter[str] = Counter()
    lines: Counter[tuple[str, int]] = Counter()
    for number, block in enumerate(blocks):
        weight = weights[number] if number in path else 0.0
        side = "path" if number in path else "cold" if number in cold else "not reached"
        listing.append(f"block {number} -> {block.successors}, {side}: {len(block.instructions)} x {weight:g}")
        for instruction in block.instructions:
            totals[number in in_loops] += weight / elements
            classes[instruction.kind] += weight / elements  # type: ignore[assignment]
            l1_bytes += weight * instruction.l1_bytes / elements
            lines[instruction.places[-1] if instruction.places else ("", 0)] += weight  # type: ignore[assignment]
            text = f"{instruction.guard and '@' + instruction.guard} {instruction.opcode} {instruction.operands}"
            sign = "cold" if instruction.is_cold else "    "
            listing.append(f"    {instruction.address:05x} {sign} {text.strip():60} {place_of(instruction)}")
            if weight and instruction.opcode.startswith("CALL"):
                calls[place_of(instruction)] += 1
    problems += [f"it calls a subroutine in {count} places: {place}" for place, count in calls.items()]
    by_line = [f"{count:8.1f}  {Path(file).name}:{line}" for (file, line), count in sorted(lines.items()) if count]
    listing = ["instructions per thread by the kernel's own lines", *by_line, *listing]
    return Cost(
        kernel,
        arch,
        elements,
        totals[False],
        totals[True],
        {name: value for name, value in classes.items() if value},
        l1_bytes,
        # Functions out of the way may save registers there.
        sum(instruction.kind == "local" and not instruction.is_cold for instruction in kernel.instructions),
        texts,
        problems,
        listing,
    )


def chunk_elements() -> int:
    match = re.search(r"kChunkElements = (\d+)", FORMAT.read_text())
    assert match, f"{FORMAT} has no kChunkElements"
    return int(match[1])


def budget_of(kernel: Kernel) -> Budget | None:
    return next((budget for budget in BUDGETS if fnmatch.fnmatch(kernel.name, budget.kernel)), None)


def analyze(source: Path, archs: Iterable[str], elements: float | None = None) -> list[Cost]:
    """All kernels in `source`. A block of those with a budget codes a chunk, unless a thread's `elements` are given."""
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        for arch, cubin, remarks in compile_cubins(source, archs, Path(folder)):
            listing = subprocess.run([nvdisasm(), "-gi", str(cubin)], capture_output=True, text=True, check=True).stdout
            for kernel in sorted(parse(listing, remarks).values(), key=lambda kernel: kernel.name):
                chunked = budget_of(kernel) is not None and kernel.threads
                costs.append(measure(kernel, arch, elements or (chunk_elements() / kernel.threads if chunked else 1)))
    return costs


def check(costs: Sequence[Cost], budgets: Sequence[Budget] = BUDGETS) -> list[str]:
    """What is wrong, in sentences."""
    wrong = []
    for cost in costs:
        name = f"{cost.kernel.name} on {cost.arch}"
        if cost.kernel.spill_bytes or cost.local:
            wrong.append(
                f"{name} uses local memory: {cost.kernel.spill_bytes} bytes of spills, a stack of "
                f"{cost.kernel.stack_bytes} bytes, {cost.local} instructions"
            )
    for arch in sorted({cost.arch for cost in costs}) or ["any GPU"]:
        for budget in budgets:
            found = [cost for cost in costs if cost.arch == arch and fnmatch.fnmatch(cost.kernel.name, budget.kernel)]
            if not found:
                wrong.append(f"there is no kernel {budget.kernel} for {arch}")
            for cost in found:
                name = f"{cost.kernel.name} on {arch}"
                limit = budget.instructions.get(arch)
                # Of other architectures the table tells them: what they leave uncertain is a few instructions there.
                if arch == MAIN_ARCH:
                    wrong += [f"{name}: {problem}" for problem in cost.problems]
                if limit is not None and cost.instructions > limit:
                    wrong.append(f"{name} takes {cost.instructions:.2f} instructions per element of {limit:g} allowed")
    return wrong


# ---- Report


def kernel_table(costs: Sequence[Cost]) -> Table:
    names = ["alu", "fma", "slow", "uniform", "global", "shared", "shuffle", "branch", "other"]
    table = Table(title="Per element, or per thread of a kernel that codes no chunks (*)", title_justify="left")
    for column in ["kernel", "on", "regs", "spill", "smem", "warps", "straight", "loops", "all", *names]:
        table.add_column(column, justify="left" if column in ("kernel", "on") else "right", no_wrap=True)
    for cost in costs:
        kernel = cost.kernel
        numbers = [cost.straight, cost.looped, cost.instructions, *(cost.classes.get(name, 0) for name in names)]
        digits = 2 if cost.elements > 1 else 0
        table.add_row(
            kernel.name + ("" if cost.elements > 1 else " *"),
            cost.arch,
            str(kernel.registers),
            str(kernel.spill_bytes + kernel.stack_bytes),
            str(kernel.shared_bytes),
            str(kernel.warps(cost.arch)),
            *(f"{number:.{digits}f}" if number else "" for number in numbers),
        )
    return table


def gpu_table(costs: Sequence[Cost]) -> Table:
    names = ["issue", "alu", "fma", "slow", "shuffle", "L1"]
    table = Table(title="Busy while GPU memory moves the data, in % of that time", title_justify="left")
    for column in ["kernel", "GPU", "memory: elements/ns", *names, "first limit"]:
        table.add_column(column, justify="left" if column in ("kernel", "GPU") else "right", no_wrap=True)
    for cost in costs:
        budget = budget_of(cost.kernel)
        for gpu in GPUS if budget else []:
            if budget and gpu.arch == cost.arch:
                shares = cost.shares(gpu, budget.bytes)
                first = max(shares, key=lambda name: shares[name])
                table.add_row(
                    cost.kernel.name,
                    gpu.name,
                    f"{gpu.gigabytes_per_second / budget.bytes:.0f}",
                    *(f"{100 * shares[name]:.0f}" for name in names),
                    f"memory, then {first}" if shares[first] < 1 else first,
                )
    return table


def as_json(cost: Cost) -> dict:
    budget = budget_of(cost.kernel)
    return {
        "kernel": cost.kernel.name,
        "arch": cost.arch,
        "registers": cost.kernel.registers,
        "spill_bytes": cost.kernel.spill_bytes,
        "stack_bytes": cost.kernel.stack_bytes,
        "local_instructions": cost.local,
        "shared_bytes": cost.kernel.shared_bytes,
        "threads": cost.kernel.threads,
        "warps": cost.kernel.warps(cost.arch),
        "elements_per_thread": cost.elements,
        "instructions": cost.instructions,
        "straight": cost.straight,
        "loops": cost.looped,
        "classes": cost.classes,
        "l1_bytes": cost.l1_bytes / 32,
        "share_of_memory_time": {
            gpu.name: cost.shares(gpu, budget.bytes) for gpu in GPUS if budget and gpu.arch == cost.arch
        },
        "problems": cost.problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, help="default: csrc/codec/cuda/codec.cu")
    parser.add_argument("--arch", default="sm_90", help="a comma-separated list of sm_80, ..., or all")
    parser.add_argument(
        "--elements", type=float, help="per thread; default: those of a chunk by the threads of a block"
    )
    parser.add_argument("--blocks", metavar="KERNEL", help="print what counts of the kernels with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    archs = ARCHS if arguments.arch == "all" else arguments.arch.split(",")
    costs = analyze(arguments.source, archs, arguments.elements)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(kernel_table(costs))
    for cost in costs:
        for text in cost.loops:
            console.print(f"  {cost.kernel.name} on {cost.arch}: loop of {text}", highlight=False)
        for problem in cost.problems:
            console.print(f"  [yellow]{cost.kernel.name} on {cost.arch}: {problem}[/]", highlight=False)
    console.print(gpu_table(costs))
    for cost in costs:
        if arguments.blocks and arguments.blocks in cost.kernel.name:
            print(f"\n{cost.kernel.name} on {cost.arch}", *cost.listing, sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps([as_json(cost) for cost in costs], indent=1) + "\n")
    wrong = check(costs, BUDGETS if arguments.source == SOURCE else [])
    for sentence in wrong:
        console.print(f"[red]{sentence}[/]", highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
