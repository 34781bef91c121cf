"""A program that runs on the hosts of a network, one process a rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

GRACE = 5.0  # seconds that the other ranks have to end, and to say why, after one has failed


def exit_on_signals() -> None:
    """Makes what ends this process from outside an exception, as Ctrl-C is one, so that `with` blocks end properly."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


class ProgramError(RuntimeError):
    """A rank ended with another exit code than 0; `code` is that code, or minus the signal that ended it."""

    def __init__(self, process: str, code: int):
        self.code = code
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        super().__init__(f"{process} ended with {how}")


# In a network namespace's own mount namespace, which `ip netns exec` makes.
_ENTER = """
echo "$0" > /proc/sys/kernel/hostname
if [ -e /etc/hosts ]; then mount --bind "$1" /etc/hosts; fi
shift
exec "$@"
"""


def command_on(namespace: str, hostname: str, hosts_file: str, command: Sequence[str]) -> list[str]:
    """What runs a command as one on a host: in its network, with its name, and no longer than this process lives.

    Each step replaces the one before, so that the process that is started becomes the command itself.
    """
    enter = ["ip", "netns", "exec", namespace, "setpriv", "--pdeathsig", "KILL", "--", "unshare", "--uts", "--"]
    return [*enter, "sh", "-ec", _ENTER, hostname, hosts_file, *command]


class Program:
    """Processes that belong together: where one fails, all end. `names` are theirs, for messages."""

    def __init__(
        self,
        names: Sequence[str],
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        capture: bool,
    ):
        self._names = names
        self._outputs: list[IO[str] | None] = []
        self.processes: list[subprocess.Popen] = []
        try:
            for command, environment in zip(commands, environments, strict=True):
                output = tempfile.TemporaryFile("w+") if capture else None
                self._outputs.append(output)
                # A session of its own: Ctrl-C on the terminal reaches this process only, which then ends the others.
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output, start_new_session=True
                )
                self.processes.append(process)
        except BaseException:
            self.stop()
            raise

    def wait(self, timeout: float | None = None) -> list[str]:
        """Until all processes have ended; what they wrote to stdout, if it was captured.

        Raises ProgramError where one failed, and TimeoutError; no process is left then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        failed = None
        try:
            while None in (codes := [process.poll() for process in self.processes]):
                if failed is None and any(codes):
                    failed = next(rank for rank, code in enumerate(codes) if code)
                    give_up = time.monotonic() + GRACE
                    deadline = give_up if deadline is None else min(deadline, give_up)
                if deadline is not None and time.monotonic() > deadline:
                    if failed is not None:
                        break
                    running = [name for name, code in zip(self._names, codes, strict=True) if code is None]
                    raise TimeoutError(f"{', '.join(running)} did not end within {timeout:g} s")
                time.sleep(0.02)
        finally:
            self.stop()
        if failed is None:
            failed = next((rank for rank, process in enumerate(self.processes) if process.returncode), None)
        if failed is not None:
            raise ProgramError(self._names[failed], self.processes[failed].returncode)
        return [_all_of(output) for output in self._outputs if output is not None]

    def stop(self) -> None:
        """Ends the processes: with SIGTERM, and what is then still there with SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self.processes if process.poll() is None]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            deadline = time.monotonic() + GRACE
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))


def _all_of(output: IO[str]) -> str:
    output.seek(0)
    return output.read()
