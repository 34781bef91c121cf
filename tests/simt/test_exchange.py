"""Zipped collectives on streams, on the emulator with some ranks in one process; exchange.cpp says what must hold.

Schedules choose among threads, blocks and streams. The bugs below are put into a copy of the sources: each must be
caught by a set, or that set is worth nothing.
"""

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import emulator as simt

pytestmark = pytest.mark.skipif(simt.cuda_include() is None, reason="needs CUDA's headers")

CSRC = simt.FOLDER.parent.parent / "csrc"
EXCHANGE = CSRC / "collectives/cuda/stream_exchange.cpp"
SOURCES = [
    CSRC / "codec/cuda/codec.cu",
    EXCHANGE,
    *(CSRC / f"collectives/{name}.cpp" for name in ("collectives", "exchange")),
    *(CSRC / f"codec/cpu/{name}.cpp" for name in ("codec", "portable", "avx2", "avx512")),
    simt.FOLDER / "exchange.cpp",
]

WRONG, STUCK, SANITIZER = 1, 71, 99

SETS = "collectives in-place checksum splits segments windows hosts segments-by-hosts pipeline reuse slow".split()
SETS += "other-streams abort-static abort-dynamic corrupt after-corrupt failing-transport".split()

# Schedules and the policy by which streams are chosen.
SOME = {"plain": [(2, "random"), (1, "starve")], "address": [(5, "random")], "race": [(1, "round-robin")]}
MORE = {
    "plain": [(seed, policy) for seed in range(12) for policy in ("random", "round-robin", "starve")],
    "address": [(0, "round-robin"), (3, "random"), (4, "starve"), (6, "starve")],
    "race": [(1, "round-robin"), (2, "random"), (3, "starve"), (4, "random")],
}


class Bug(NamedTuple):
    """How a set of a build catches what is wrong: by what exit codes and text; and what the change is."""

    kind: str
    set: str
    codes: int | tuple[int, ...]
    text: str
    old: str
    new: str


WAIT = "address(ticket.flag), ticket.value, CU_STREAM_WAIT_VALUE_GEQ"
NO_WAIT = WAIT.replace("ticket.value", "0")
SET_FLAG = "write_value()(stream_, address(ticket.flag), ticket.value, CU_STREAM_WRITE_VALUE_DEFAULT);\n"
WAITS = "    const CUresult waits ="
ROOM = "message.inline_bytes = segments_.inline_bytes(k, elements);"
UNTIL_SETTLED = "  if (std::string error = wait(ticket.settled, ticket); !error.empty()) return error;\n"
EXCHANGE_POOLS = "  if (pools) transport_->exchange(pool_sends, pool_receives, stream_);\n"
EXCHANGE_LOWS = "  if (lows) transport_->exchange(low_sends, low_receives, stream_);\n"
SUM_AGAIN = "      cuda::sum_messages(ticket.incoming, dtype, const_cast"
NEXT = "    auto ticket = std::move(queue_.front());\n"
MOVE = "    move(ticket, k);\n"
RELEASE_RECEIVED = "    gathered_.reset();\n    receives_.assign(size_, nullptr);\n"
FREE_DYNAMIC = "[this](void* data) { cudaFreeAsync(data, stream_); }"
FAILED = "      ticket.release();  // see Ticket\n    }\n    in_flight_--"
THROWN = "      ticket.release();  // see Ticket\n      throw"
ALL_PEERS = "ticket.outgoing_peers.push_back({peer, (peer + 1) % size_});"
FINISH = "    error = finish_dynamic(ticket);"

BUGS = {
    # The gate: nothing on the stream goes on before the outputs are whole.
    "the stream does not wait": Bug("address", "reuse", SANITIZER, "use-after-free", WAIT, NO_WAIT),
    "the flag of an earlier call opens": Bug(
        "address", "reuse", SANITIZER, "use-after-free", "ticket.value++", "ticket.value = 1"
    ),
    "the flag is set whatever is open": Bug("address", "reuse", SANITIZER, "use-after-free", WAITS, SET_FLAG + WAITS),
    "the flag is set before the last decoding": Bug(
        "address", "reuse", SANITIZER, "use-after-free", EXCHANGE_POOLS, SET_FLAG + EXCHANGE_POOLS
    ),
    "a failed call leaves the stream waiting": Bug(
        "plain", "abort-static", STUCK, "WaitValue", "if (!error.empty()) {\n      // Let", "if (false) {\n      // Let"
    ),
    # The dynamic phase.
    "the worker does not wait for the static phase": Bug("plain", "checksum", STUCK, "WaitValue", UNTIL_SETTLED, ""),
    "a ticket is used again before it has settled": Bug(
        "plain", "checksum", STUCK, "WaitValue", UNTIL_SETTLED, UNTIL_SETTLED.replace("settled", "exchanged")
    ),
    "nothing is decoded again": Bug(
        "plain", "checksum", WRONG, "other values", "    StreamCall::decode(ticket, stream_);\n", ""
    ),
    "no sums of whole messages": Bug(
        "plain", "checksum", WRONG, "the checksum does not match", SUM_AGAIN, "if (false) " + SUM_AGAIN
    ),
    "low halves are not exchanged": Bug("plain", "checksum", WRONG, "other values", EXCHANGE_LOWS, ""),
    "one rank takes calls in another order": Bug(
        "plain",
        "pipeline",
        *((WRONG, STUCK), "workers' transport|other values"),
        *(NEXT, "if (transport_->rank() == 1) std::swap(queue_.front(), queue_.back());\n" + NEXT),
    ),
    "a poll's answer is taken for a launch's error": Bug(
        "plain", "checksum", WRONG, "could not be launched", "    cudaGetLastError();  // the state", "    // the state"
    ),
    # Memory.
    "received messages go before they are decoded": Bug(
        "address", "checksum", SANITIZER, "use-after-free", MOVE, MOVE + RELEASE_RECEIVED
    ),
    "pools go before the worker sends them": Bug(
        "address", "checksum", SANITIZER, "use-after-free", WAITS, "    outgoing_memory_.clear();\n" + WAITS
    ),
    "dynamic parts go before they are decoded": Bug(
        "address", "checksum", SANITIZER, "use-after-free", EXCHANGE_POOLS, EXCHANGE_POOLS + "  allocated.clear();\n"
    ),
    "dynamic parts stay": Bug("plain", "checksum", WRONG, "memory was not released", FREE_DYNAMIC, "[](void*) {}"),
    "a failed ticket is freed": Bug(
        "address", "abort-static", SANITIZER, "use-after-free", FAILED, FAILED.replace("release()", "reset()")
    ),
    "a ticket that could not be queued is freed": Bug(
        "address", "failing-transport", SANITIZER, "use-after-free", THROWN, "      throw"
    ),
    # Order among ranks and streams.
    "all segments have the first one's outputs": Bug(
        "plain", "segments", WRONG, "other values", "offset = k * segments_.elements();", "offset = 0 * k;"
    ),
    "run() waits for the default stream": Bug(
        "plain",
        "other-streams",
        *(STUCK, "gate"),
        *("cudaMemsetAsync(flag, 0, sizeof(uint32_t), setup)", "cudaMemset(flag, 0, sizeof(uint32_t))"),
    ),
    # Windows.
    "every segment has the first one's windows": Bug(
        "plain", "windows", WRONG, "overflowed", " + k * segments_.elements() / kChunkElements;", ";"
    ),
    "a message has less room than was agreed": Bug(
        "plain", "windows", (WRONG, STUCK), ".", ROOM, ROOM.replace(";", " / 256 * 128;")
    ),
    # Hosts.
    "the last sum is written before it is whole": Bug(
        "plain", "hosts", WRONG, "other values", "reducing.after_findings = true;", ""
    ),
    "every host has the first one's sum": Bug(
        "plain", "hosts", WRONG, "other values", "sum.values = ticket.sums[i];", "sum.values = ticket.sums[0];"
    ),
    "all take part in what is of some": Bug(
        "plain", "hosts", (WRONG, STUCK), ".", "ticket.outgoing_peers.push_back({peer});", ALL_PEERS
    ),
    "after a fault nothing is exchanged": Bug(
        "plain", "corrupt", STUCK, "workers' transport", FINISH, "if (ticket.report->findings.fault == 0) " + FINISH
    ),
    "after a failure later calls are exchanged": Bug(
        "plain",
        "after-corrupt",
        *(WRONG, "workers' transport: rank 0 sends"),
        *("    if (!aborted_.empty()) return aborted_;\n  }\n  if", "  }\n  if"),
    ),
}
# The others take their time.
QUICK = ["the stream does not wait", "nothing is decoded again"]

Build = Callable[..., Path]


@pytest.fixture(scope="session")
def build_program(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder = tmp_path_factory.mktemp("exchange")

    def build(kind: str, name: str = "exchange", changes: Sequence[tuple[Path, str, str]] = ()) -> Path:
        flags = ["-fno-strict-aliasing", "-g1", *(["-O1"] if kind == "address" else [])]  # compiled in half the time
        return simt.build(kind, SOURCES, folder / kind / name, [CSRC], replacements=changes, flags=flags)

    return build


def passes(program: Path, schedule: int, policy: str) -> None:
    def run(sets: list[str]):
        return simt.run(program, schedule, policy, *sets, timeout=240)

    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(run, (SETS[::2], SETS[1::2])):
            assert result.returncode == 0, result.stdout.decode() + result.stderr


def of(schedules: dict[str, list[tuple[int, str]]]):
    return [(kind, seed, policy) for kind, some in schedules.items() for seed, policy in some]


@pytest.mark.parametrize(("kind", "schedule", "policy"), of(SOME))
def test_results_are_exact(build_program: Build, kind: str, schedule: int, policy: str) -> None:
    passes(build_program(kind), schedule, policy)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "schedule", "policy"), of(MORE))
def test_results_are_exact_under_more_schedules(build_program: Build, kind: str, schedule: int, policy: str) -> None:
    passes(build_program(kind), schedule, policy)


def test_one_hardware_queue_stands_still(build_program: Build) -> None:
    result = simt.run(build_program("plain"), 2, "round-robin", "one-queue")
    assert result.returncode == STUCK, result.stderr
    assert "no stream can go on" in result.stderr


@pytest.mark.parametrize("variable", ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"])
def test_streams_cannot_wait_in_one_queue(build_program: Build, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    program = build_program("plain")
    for value, code in (("0", 0), ("8", 0), ("1", WRONG)):
        monkeypatch.setenv(variable, value)
        assert simt.run(program, 0, "random", "can-wait").returncode == code


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BUGS]
)
def test_bug_is_caught(build_program: Build, name: str) -> None:
    bug = BUGS[name]
    program = build_program(bug.kind, re.sub(r"\W+", "-", name), [(EXCHANGE, bug.old, bug.new)])
    result = simt.run(program, 2, "random", bug.set)
    said = result.stdout.decode() + result.stderr
    codes = bug.codes if isinstance(bug.codes, tuple) else (bug.codes,)
    assert result.returncode in codes, said
    assert re.search(bug.text, said), said
