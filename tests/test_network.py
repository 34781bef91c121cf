"""The test network: its links give what was asked, collectives run over it, and however it ends, nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import BENCHMARKS, load

ROOT = Path(__file__).resolve().parents[1]

networks = load("network/__init__.py")
Network, links = networks.Network, networks.links

_missing = networks.missing()
needs_network = pytest.mark.skipif(_missing is not None, reason=_missing or "")

SETTLE = 5.0  # seconds that a process may take to start or to end

ALL_GATHER = """
import torch, torch.distributed as dist, zipccl
dist.init_process_group("zipccl", pg_options=zipccl.Options(mode="zip"))
rank, size = dist.get_rank(), dist.get_world_size()
def values(rank):
    return (torch.randn(200_000, generator=torch.Generator().manual_seed(rank)) * 0.02).bfloat16()
output = torch.empty(size * 200_000, dtype=torch.bfloat16)
dist.all_gather_into_tensor(output, values(rank))
expected = torch.cat([values(other) for other in range(size)])
assert torch.equal(output.view(torch.int16), expected.view(torch.int16))
entry = zipccl.stats()["all_gather"]
assert entry["zipped"] == 1 and entry["wire_bytes"] < 0.75 * entry["raw_bytes"]
print(rank, "of", size, "is right")
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    if _missing is None:
        assert own_namespaces() == []


def own_namespaces() -> list[str]:
    return [name for name in links.namespaces() if name.startswith(links.own_prefix())]


def of_process(pid: int) -> list[str]:
    return [name for name in links.namespaces() if name.startswith(f"{links.PREFIX}{pid}-")]


def until(condition, what: str, seconds: float = SETTLE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def running(pid: int) -> bool:
    """False also of one that has ended and waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def shell(text: str) -> list[str]:
    return ["sh", "-c", text]


# ---- What needs no network


@pytest.mark.parametrize(
    "text, bits", [("200mbit", 200 * 10**6), ("2.5gbit", 2_500_000_000), ("unlimited", None), (10**6, 10**6)]
)
def test_rates(text, bits):
    assert networks.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "10", "1 gbit", "-1mbit", "0mbit", "1tbit", 1000])
def test_what_is_no_rate(text):
    with pytest.raises(ValueError, match="rate"):
        networks.parse_rate(text)


@pytest.mark.parametrize("received, as_asked", [((190, 95), True), ((190, 80), False), ((199, 95), False)])
def test_whether_links_give_what_was_asked(received, as_asked):
    rates = networks.Rates((200 * 10**6, 100 * 10**6), received)
    assert rates.as_asked is as_asked
    assert str(rates).startswith(f"TCP gets {min(received)} to {max(received)} of 200, 100 Mbit/s")


def test_without_root_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(networks.NetworkError, match=r"^the test network needs root, [^.]*$"), Network(2):
        pass


def test_without_iproute2_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(networks.NetworkError, match=r"install the package iproute2 [^.]*$"), Network(2):
        pass


# ---- Links and programs


@needs_network
def test_links_and_a_collective_over_them():
    before = set(os.listdir("/sys/class/net"))
    with Network(hosts=2, rate="200mbit") as network:
        assert set(os.listdir("/sys/class/net")) == before  # nothing appears in the machine's own network
        assert network.measure(0.5).received == pytest.approx([200, 200], rel=0.15)
        outputs = network.run([sys.executable, "-c", ALL_GATHER], capture=True, timeout=60)
        assert outputs == ["0 of 2 is right\n", "1 of 2 is right\n"]
    assert set(os.listdir("/sys/class/net")) == before


@needs_network
def test_set_rate_while_a_program_runs(tmp_path):
    # The receiver says what it got in each tenth of a second.
    receive = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[2])
from transfer import connect, send
if os.environ["RANK"] == "1":
    send(connect(os.environ["MASTER_ADDR"], 5000))
else:
    with socket.create_server((os.environ["MASTER_ADDR"], 5000)) as server, open(sys.argv[1], "w", 1) as file:
        connection, _ = server.accept()
        count, begin = 0, time.perf_counter()
        while True:
            count += len(connection.recv(1 << 18))
            if (seconds := time.perf_counter() - begin) >= 0.1:
                file.write(f"{count * 8 / seconds / 1e6}\\n")
                count, begin = 0, time.perf_counter()
"""
    file = tmp_path / "rates"
    file.touch()

    def received() -> list[float]:
        return [float(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]

    with Network(hosts=2, rate="50mbit") as network:
        program = network.start([sys.executable, "-c", receive, str(file), str(BENCHMARKS / "network")])
        for rate in (50, 200, 20):
            network.set_rate(f"{rate}mbit")
            seen = len(received())
            # What was queued before still comes at first.
            until(
                lambda rate=rate, seen=seen: received()[seen:][-3:] == pytest.approx([rate] * 3, rel=0.15),
                f"{received()[seen:]} Mbit/s with a limit of {rate}",
            )
        program.stop()


@needs_network
def test_the_switcher_follows_the_link(tmp_path):
    """A link that becomes slower, and faster again, under a job: all ranks change their way, within 256 calls."""
    job = """
import sys, time, torch, torch.distributed as dist, zipccl
dist.init_process_group("zipccl")
rank, size, n = dist.get_rank(), dist.get_world_size(), 1 << 18
sent = (torch.randn(size * n, generator=torch.Generator().manual_seed(rank)) * 0.02).bfloat16()
output = torch.empty_like(sent)
with open(f"{sys.argv[1]}{rank}", "w", 1) as file:
    while True:
        zipccl.reset_stats()
        dist.all_to_all_single(output, sent)
        (decision,) = zipccl.stats()["all_to_all"]["decisions"]
        file.write(decision["route"] + "\\n")
"""
    files = [tmp_path / f"routes{rank}" for rank in range(2)]

    def routes(rank: int = 0) -> list[str]:
        return files[rank].read_text().split() if files[rank].exists() else []

    with Network(hosts=2) as network:
        network.set_rate("200mbit")
        program = network.start([sys.executable, "-c", job, str(tmp_path / "routes")])
        seen = 0
        for rate, expected in (("200mbit", "zip"), (None, "native"), ("200mbit", "zip")):
            network.set_rate(rate)
            seen = len(routes())
            until(lambda seen=seen: len(routes()) > seen + 256 + 2, "no calls", 60)
            changed = routes()[seen:]
            assert expected in changed[:258] and set(changed[258:]) <= {expected}, (rate, changed)
        program.stop()
    calls = min(len(routes(0)), len(routes(1)))
    assert routes(0)[:calls] == routes(1)[:calls]


@needs_network
def test_a_host_with_a_slower_link():
    with Network(hosts=3, rate="200mbit") as network:
        network.set_rate("50mbit", hosts=[1])
        rates = network.measure(0.5)
        # To host 1 and from it; from host 2 to host 0 nothing is slower.
        assert rates.asked == (200 * 10**6, 50 * 10**6, 50 * 10**6)
        to_0, to_1, to_2 = rates.received
        assert to_0 == pytest.approx(200, rel=0.15)
        # TCP does not fill links of different rates evenly in so short a time, on busy processors.
        assert 10 < to_1 < 51 and 10 < to_2 < 51


@needs_network
def test_ranks_know_their_place():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    with Network(hosts=2) as network:
        outputs = network.run(shell(f"echo ${' $'.join(names)} $(cat /proc/sys/kernel/hostname)"), 2, capture=True)
        assert outputs == [f"{rank} 4 {rank % 2} 2 {rank // 2} 10.77.0.1 eth0 host{rank // 2}\n" for rank in range(4)]


# ---- Its end


@needs_network
@pytest.mark.parametrize("how, code", [("exit 3", 3), ("kill -KILL $$", -signal.SIGKILL)])
def test_a_program_that_fails(how, code, tmp_path):
    # The other rank would go on, and has a child that ignores SIGTERM.
    other = f"sh -c 'trap \"\" TERM; echo $$ > {tmp_path}/child; exec sleep 60' & exec sleep 60"
    with pytest.raises(networks.ProgramError, match="rank 1") as caught, Network(hosts=2) as network:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(networks.program, "GRACE", 0.2)
            network.run(shell(f"if [ $RANK = 1 ]; then sleep 0.2; {how}; fi; {other}"))
    assert caught.value.code == code
    assert not running(int((tmp_path / "child").read_text()))
    assert own_namespaces() == []


@needs_network
def test_a_program_that_does_not_end():
    with Network(hosts=2) as network, pytest.raises(TimeoutError, match="rank 0, rank 1 did not end"):
        network.run(["sleep", "60"], timeout=0.2)


def start_command(tmp_path: Path) -> tuple[subprocess.Popen, list[int]]:
    """`python -m benchmarks.network` with a program that would go on, and the processes of that."""
    program = shell(f"echo $$ > {tmp_path}/$RANK.new; mv {tmp_path}/$RANK.new {tmp_path}/$RANK; exec sleep 60")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.network", "--hosts", "2", "--no-check", "--", *program],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(file.exists() for file in files), "the program did not start")
    return process, [int(file.read_text()) for file in files]


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_is_ended(number, tmp_path):
    process, ranks = start_command(tmp_path)
    assert len(of_process(process.pid)) == 3
    process.send_signal(number)
    assert process.wait(SETTLE) == 128 + number
    assert of_process(process.pid) == []
    assert not any(map(running, ranks))


@needs_network
def test_the_command_is_killed(tmp_path):
    process, ranks = start_command(tmp_path)
    process.kill()
    process.wait(SETTLE)
    until(lambda: not any(map(running, ranks)), "ranks go on without the command")
    assert len(of_process(process.pid)) == 3
    with Network(hosts=1):
        assert of_process(process.pid) == []
        assert not links.hosts_file(f"{links.PREFIX}{process.pid}-").exists()


@needs_network
def test_the_exit_code_is_the_programs():
    command = [sys.executable, "-m", "benchmarks.network", "--no-check", "--", "sh", "-c", "exit $((RANK * 7))"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert process.returncode == 7, process.stderr
    assert "rank 1 ended with exit code 7" in process.stderr


@needs_network
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("collectives", "--worlds 2x1 --links 1gbit --sizes 64K --collectives all-gather --seconds .2".split()),
        ("train", "--width 64 --blocks 1 --tokens 8 --rounds 2".split()),
    ],
)
def test_benchmarks(program, arguments, tmp_path):
    """That they run; both compare what the ways compute."""
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), *arguments, "--json", str(tmp_path / "figures")]
    if program == "collectives":
        command += ["--plot", str(tmp_path / "plot.png")]
    subprocess.run(command, check=True, timeout=90, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "figures").read_text())["processors"] > 0
