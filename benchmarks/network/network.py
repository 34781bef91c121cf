"""Hosts on this machine, joined by links of a chosen rate.

    host 0 ── eth0 ═══ port0 ─┐
    host 1 ── eth0 ═══ port1 ─┤ bridge        each host and the bridge: a network namespace
    host 2 ── eth0 ═══ port2 ─┘               ═══: a veth pair, limited at both ends

The machine's own network is not touched. What a link limits, and shares among the connections over it, is what leaves
the host (at eth0) and what arrives for it (at the bridge's port), each for itself. Processes on one host reach each
other without a limit, as they do on a real one.

    with Network(hosts=2, rate="1gbit") as network:
        print(network.measure())
        network.run([sys.executable, "train.py"], ranks_per_host=2)

        program = network.start([sys.executable, "train.py"])
        network.set_rate("100mbit")  # while it runs
        program.wait()

The namespaces are named zipccl-PID-START-...; those of a process that was killed are removed by the next one.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import links
from .links import NetworkError, parse_rate, rate_name, tool
from .program import Program, command_on

DEVICE = "eth0"
NETWORK = "10.77.0.0/24"
MAX_HOSTS = 200
# A frame of 1514 bytes holds 1448 of what TCP carries.
PAYLOAD = 1448 / 1514
_numbers = itertools.count()


def missing() -> str | None:
    """Why there can be no network here, in a sentence; None if there can."""
    reason = links.missing_tools()
    if reason is None:
        trial = f"{links.own_prefix()}trial"
        try:
            tool("ip", "netns", "add", trial)
        except NetworkError as error:
            reason = f"the test network needs the right to make network namespaces: {error}"
        else:
            links.remove(trial)
    return reason


@dataclass(frozen=True)
class Rates:
    """What TCP got from the links, in Mbit/s: to each host from the one before it, all at once."""

    asked: tuple[int | None, ...]  # bits per second
    received: tuple[float, ...]

    @property
    def as_asked(self) -> bool:
        """False where the machine, and not the limit, decides: the links are faster than asked, or a tenth slower."""
        expected = ((bits / 1e6 * PAYLOAD, rate) for bits, rate in zip(self.asked, self.received, strict=True) if bits)
        return all(0.9 * most <= rate <= 1.02 * most for most, rate in expected)

    def __str__(self) -> str:
        low, high = (f"{rate:.0f}" for rate in (min(self.received), max(self.received)))
        of = ", ".join(dict.fromkeys(f"{bits / 1e6:g}" for bits in self.asked if bits))
        where = "in each direction at once" if len(self.received) > 1 else "within the host"
        return f"TCP gets {low if low == high else f'{low} to {high}'}{f' of {of}' if of else ''} Mbit/s {where}"


class Network:
    """Hosts and their links, from `with` to its end. `rate` is that of each link: "1gbit", bits per second, or None.

    `delay_ms` is added to what travels in each direction, and needs a kernel with netem.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | int | None = links.UNLIMITED,
        *,
        delay_ms: float = 0.0,
        congestion_control: str = "cubic",
    ):
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"{hosts} hosts: expected 1 to {MAX_HOSTS}")
        self.hosts = hosts
        self.rates = [parse_rate(rate)] * hosts
        self._packet = links.packet_bytes(self.rates[0])
        self.delay_ms = delay_ms
        self.congestion_control = congestion_control
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        prefix = f"{links.own_prefix()}{next(_numbers)}-"
        self._bridge = f"{prefix}bridge"
        self._hosts = [f"{prefix}host{host}" for host in range(hosts)]
        self._hosts_file = links.hosts_file(prefix)
        self._programs: list[Program] = []
        self._ports = itertools.count(29500)  # a port may stay in use for a while after a program has ended

    # ---- Up and down

    def __enter__(self) -> Network:
        reason = missing()
        if reason is not None:
            raise NetworkError(reason)
        links.remove_leftovers()
        try:
            # Names to look up, as hosts have: torch and torchrun do it, and warn or wait where they find none.
            names = "".join(
                f"{address} host{host}\n::ffff:{address} host{host}\n" for host, address in enumerate(self.addresses)
            )
            self._hosts_file.write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}")
            tool("ip", "netns", "add", self._bridge)
            self._prepare(self._bridge)
            tool("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            tool("ip", "-n", self._bridge, "link", "set", "bridge", "up")
            for host in range(self.hosts):
                self._add(host)
            self.set_rate(self.rates[0])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, namespace: str) -> None:
        # The detection of duplicate addresses of IPv6, which nobody uses here, would delay the links by a second.
        no_ipv6 = "if [ -e /proc/sys/net/ipv6 ]; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi"
        tool("ip", "netns", "exec", namespace, "sh", "-c", no_ipv6)
        tool("ip", "-n", namespace, "link", "set", "lo", "up")

    def _add(self, host: int) -> None:
        name, port = self._hosts[host], f"port{host}"
        tool("ip", "netns", "add", name)
        self._prepare(name)
        # Both ends are made where they belong, so that no device ever appears in the machine's own network.
        pair = ("type", "veth", "peer", "name", DEVICE, "netns", name)
        tool("ip", "-n", self._bridge, "link", "add", port, *pair)
        tool("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
        address = self.addresses[host]
        tool("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE, "noprefixroute")
        tool("ip", "-n", name, "link", "set", DEVICE, "gso_max_size", str(self._packet), "up")
        links.add_route(name, DEVICE, address, NETWORK, self.congestion_control)

    def close(self) -> None:
        """Ends the programs and removes the network."""
        with _uninterrupted():
            for program in self._programs:
                program.stop()
            for name in (*self._hosts, self._bridge):
                links.remove(name)
            self._hosts_file.unlink(missing_ok=True)

    # ---- Links

    def set_rate(self, rate: str | int | None, hosts: Iterable[int] | None = None) -> None:
        """Changes the links of some hosts, or of all; also while a program runs.

        Links that are to be faster than 2 Gbit/s at some time must be so when the network is made, or unlimited.
        """
        bits = parse_rate(rate)
        for host in range(self.hosts) if hosts is None else hosts:
            links.limit(self._hosts[host], DEVICE, bits, self._packet)
            links.limit(self._bridge, f"port{host}", bits, self._packet, self.delay_ms)
            self.rates[host] = bits

    def measure(self, seconds: float = 1.0) -> Rates:
        """What TCP gets from the links now. With one host: from itself to itself."""
        port = next(self._ports)
        script = str(Path(__file__).parent / "transfer.py")
        command = [sys.executable, "-I", "-S", script, str(seconds), str(port), *self.addresses]
        outputs = self.start(command, capture=True).wait(timeout=seconds + 20)
        # What arrives at a host has passed two links.
        passed = zip(self.rates, self.rates[-1:] + self.rates[:-1], strict=True)
        asked = tuple(min((bits for bits in pair if bits), default=None) for pair in passed)
        return Rates(asked if self.hosts > 1 else (None,), tuple(map(float, outputs)))

    # ---- Programs

    def start(
        self,
        command: Sequence[str],
        ranks_per_host: int = 1,
        *,
        environment: Mapping[str, str] | None = None,
        capture: bool = False,
        torchrun: bool = False,
    ) -> Program:
        """Starts a command on every host: once a rank, with what torchrun would tell it, or by torchrun itself.

        The processes end with the thread that calls this.
        """
        port = next(self._ports)
        names, commands, environments = [], [], []
        common = {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": DEVICE}
        common |= {"NCCL_SOCKET_IFNAME": DEVICE, **(environment or {})}
        for host in range(self.hosts):
            if torchrun:
                names.append(f"torchrun of host {host}")
                commands.append(self._on(host, self._torchrun(host, ranks_per_host, common, command)))
                environments.append(os.environ | common)
                continue
            for local_rank in range(ranks_per_host):
                rank = host * ranks_per_host + local_rank
                names.append(f"rank {rank}")
                commands.append(self._on(host, command))
                own = {
                    "RANK": rank,
                    "WORLD_SIZE": self.hosts * ranks_per_host,
                    "LOCAL_RANK": local_rank,
                    "LOCAL_WORLD_SIZE": ranks_per_host,
                    "GROUP_RANK": host,
                    "GROUP_WORLD_SIZE": self.hosts,
                }
                threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}  # as torchrun does
                environments.append(os.environ | threads | {key: str(value) for key, value in own.items()} | common)
        program = Program(names, commands, environments, capture)
        self._programs.append(program)
        return program

    def run(
        self,
        command: Sequence[str],
        ranks_per_host: int = 1,
        *,
        environment: Mapping[str, str] | None = None,
        capture: bool = False,
        torchrun: bool = False,
        timeout: float | None = None,
    ) -> list[str]:
        """As `start`, until the program ends; see Program.wait."""
        program = self.start(command, ranks_per_host, environment=environment, capture=capture, torchrun=torchrun)
        return program.wait(timeout)

    def _on(self, host: int, command: Sequence[str]) -> list[str]:
        return command_on(self._hosts[host], f"host{host}", str(self._hosts_file), command)

    def _torchrun(self, host: int, ranks_per_host: int, common: Mapping[str, str], command: Sequence[str]) -> list[str]:
        if command[0] == sys.executable:
            program = list(command[1:])
        else:
            program = ["--no-python", *command]
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.hosts), "--node-rank", str(host), "--nproc-per-node", str(ranks_per_host)),
            *("--master-addr", common["MASTER_ADDR"], "--master-port", common["MASTER_PORT"]),
            *program,
        ]

    def __str__(self) -> str:
        return (
            f"{self.hosts} host{'s' * (self.hosts > 1)}, links {', '.join(dict.fromkeys(map(rate_name, self.rates)))}"
        )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave half a network."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
