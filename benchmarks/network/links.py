"""Network namespaces, the veth pairs between them, and what limits those: thin wrappers around `ip` and `tc`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

UNLIMITED = None
PREFIX = "zipccl-"
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkError(RuntimeError):
    """The network cannot be made as asked."""


def tool(*arguments: str) -> str:
    process = subprocess.run(arguments, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if process.returncode != 0:
        reason = (process.stderr or process.stdout).strip() or f"exit code {process.returncode}"
        raise NetworkError(f"`{' '.join(arguments)}` failed: {reason}")
    return process.stdout


def missing_tools() -> str | None:
    if os.geteuid() != 0:
        return "the test network needs root, to make network namespaces: run it with sudo"
    if not all(map(shutil.which, ("ip", "tc"))):
        return "the test network needs `ip` and `tc`: install the package iproute2 (Fedora: iproute and iproute-tc)"
    if not all(map(shutil.which, ("setpriv", "unshare"))):
        return "the test network needs `setpriv` and `unshare`: install the package util-linux"
    return None


# ---- Rates, in bits per second


def parse_rate(rate: str | int | None) -> int | None:
    """`"200mbit"` as tc writes it, a number of bits per second, or `"unlimited"`."""
    if rate is None or isinstance(rate, int):
        bits = rate
    elif rate == "unlimited":
        return UNLIMITED
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
        if match is None:
            raise ValueError(f"{rate!r} is no rate: expected one like 200mbit, 1gbit, 2.5gbit, or unlimited")
        bits = round(float(match[1]) * _UNITS[match[2]])
    if bits is not None and bits < 10**6:
        raise ValueError(f"{rate!r} is too slow a rate: expected 1mbit or more")
    return bits


def rate_name(bits: int | None) -> str:
    if bits is None:
        return "unlimited"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 10**9 else f"{bits / 1e6:g} Mbit/s"


# ---- Namespaces


def _started(pid: int) -> str:
    """When a process started, which tells it from a later one with the same number; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def own_prefix() -> str:
    """Names that start so belong to this process."""
    return f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-"


def namespaces() -> list[str]:
    """All namespaces of test networks, of any process."""
    names = (line.split()[0] for line in tool("ip", "netns", "list").splitlines() if line.strip())
    return [name for name in names if name.startswith(PREFIX)]


def processes(namespace: str) -> list[int]:
    try:
        return [int(pid) for pid in tool("ip", "netns", "pids", namespace).split()]
    except NetworkError:  # it is gone
        return []


def remove(namespace: str) -> None:
    """Ends what runs in a namespace, and the namespace with all its devices."""
    # What was forked while the list was read is in the next one. A namespace whose processes stay loses its name only.
    deadline = time.monotonic() + 5
    while (pids := processes(namespace)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(NetworkError):  # another process may have been quicker
        tool("ip", "netns", "delete", namespace)


def hosts_file(prefix: str) -> Path:
    return Path(tempfile.gettempdir()) / f"{prefix}hosts"


def remove_leftovers() -> None:
    """Removes what belongs to processes that are gone, and were killed before they could do it."""
    for name in namespaces():
        if _abandoned(name):
            remove(name)
    for file in hosts_file(PREFIX).parent.glob(f"{PREFIX}*-hosts"):
        if _abandoned(file.name):
            file.unlink(missing_ok=True)


def _abandoned(name: str) -> bool:
    match = re.match(rf"{PREFIX}(\d+)-(\d+)-", name)
    return match is not None and _started(int(match[1])) != match[2]


def add_route(namespace: str, device: str, address: str, network: str, congestion_control: str) -> None:
    """To the other hosts, and to the host itself. Its TCP must not be what the machine happens to have chosen: figures
    could not be compared. It belongs to the route, as a namespace may not choose every algorithm for all its own."""
    ip = ("ip", "-n", namespace, "route")
    chosen = ("src", address, "congctl", congestion_control)
    try:
        tool(*ip, "replace", network, "dev", device, *chosen)
        tool(*ip, "replace", "local", address, "dev", device, "table", "local", "scope", "host", *chosen)
    except NetworkError as error:
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
        raise NetworkError(
            f"{error} (TCP's congestion control is to be {congestion_control}; this kernel has {', '.join(available)})"
        ) from None


# ---- Limits


# A link sends and queues whole packets of TCP's, which devices here take in up to 64 KiB. For slow links they are made
# smaller: what is less than a burst passes at once.
SLOW = 2 * 10**9
SLOW_PACKET_BYTES, PACKET_BYTES = 16 << 10, 64 << 10
BURST_SECONDS = 200e-6  # what a late timer may cost
QUEUE_BYTES, QUEUE_SECONDS = 512 << 10, 10e-3  # as a switch has for a port


def packet_bytes(bits: int | None) -> int:
    return SLOW_PACKET_BYTES if bits is not None and bits <= SLOW else PACKET_BYTES


def limit(namespace: str, device: str, bits: int | None, packet: int, delay_ms: float = 0.0) -> None:
    """Limits what leaves through a device; also one that is limited already, without loss of what is queued."""
    tc = ("tc", "-n", namespace, "qdisc")
    if bits is None:
        with contextlib.suppress(NetworkError):  # there is none to delete
            tool(*tc, "delete", "dev", device, "root")
        parent = ["root"]
    else:
        # A packet that is larger than the burst would be cut up, at a great cost. Its headers count too.
        burst = max(packet * 5 // 4, round(bits / 8 * BURST_SECONDS))
        queue = max(QUEUE_BYTES, round(bits / 8 * QUEUE_SECONDS))
        shape = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
        tool(*tc, "replace", "dev", device, "root", "handle", "1:", *shape)
        parent = ["parent", "1:1"]
    if delay_ms:
        try:
            tool(*tc, "replace", "dev", device, *parent, "netem", "delay", f"{delay_ms}ms", "limit", "100000")
        except NetworkError as error:
            raise NetworkError(f"a delay needs netem, which this kernel does not have: {error}") from None
