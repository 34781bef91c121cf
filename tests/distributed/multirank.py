"""Runs the body of a test on several ranks, without paying for new processes in every test.

    @ranks(2, 3, 4)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_sum(rank, world_size, dtype):
        x = torch.full((8,), float(rank), dtype=dtype)
        dist.all_reduce(x, group=group(mode="zip", min_bytes=0))

A pool of `MAX_RANKS` processes lives as long as the session. They are forked from a server that has imported torch
once; a test at W ranks uses the first W of them. Any failure, hang or crash ends the pool, and the next test starts a
new one: ranks that disagree about what was sent must not meet again. A hang is reported with the stacks of all ranks.

Tests that end processes, or that need a process of their own, use `launch`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# The reference of the tests themselves can be checked by running them over Gloo.
BACKEND = os.environ.get("ZIPCCL_TEST_BACKEND", "zipccl")
MAX_RANKS = 4
GROUP_TIMEOUT = 30.0  # of every group: a collective that hangs becomes an exception ...
RUN_TIMEOUT = 60.0  # ... before the harness ends the process
GRACE = 12.0  # how long the other ranks may take after one has failed

only_zipccl = pytest.mark.skipif(BACKEND != "zipccl", reason="about ZipCCL's own behaviour")

_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.fsdp", "pytest", "hypothesis", "zipccl"])


# ---------------------------------------------------------------------------------------------- what a test body sees


@dataclass
class _World:
    """The default process group of this process, and the groups that tests have made in it."""

    key: Any
    rank: int
    size: int
    groups: dict[Any, dist.ProcessGroup]


_world: _World | None = None


def pg_options(options: dict[str, Any]) -> Any:
    """Options for `init_process_group` and `new_group`; none when the tests run over Gloo."""
    if BACKEND != "zipccl":
        return None
    import zipccl

    return zipccl.Options(**options) if options else None


def seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def init(rank: int, world_size: int, store: dist.Store, timeout: float = GROUP_TIMEOUT, **options: Any) -> None:
    """The default group, over the backend under test."""
    if BACKEND == "zipccl":
        import zipccl  # noqa: F401  (registers the backend)
    dist.init_process_group(
        BACKEND,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=seconds(timeout),
        pg_options=pg_options(options),
    )


def group(ranks: list[int] | None = None, *, backend: str | None = None, **options: Any) -> dist.ProcessGroup:
    """A group with these options, made at its first use and kept. All ranks must ask for the same groups."""
    assert _world is not None, "only inside the body of a test"
    backend = backend or BACKEND
    key = (backend, tuple(ranks or ()), tuple(sorted(options.items())))
    if key not in _world.groups:
        opts = pg_options(options) if backend == "zipccl" else None
        _world.groups[key] = dist.new_group(ranks, backend=backend, timeout=seconds(GROUP_TIMEOUT), pg_options=opts)
    return _world.groups[key]


@contextlib.contextmanager
def fresh_group(ranks: list[int] | None = None, **options: Any) -> Iterator[dist.ProcessGroup]:
    """A group of its own, destroyed afterwards."""
    made = dist.new_group(ranks, backend=BACKEND, timeout=seconds(GROUP_TIMEOUT), pg_options=pg_options(options))
    yield made
    dist.destroy_process_group(made)


# ------------------------------------------------------------------------------------------------------- the decorator


def ranks(*world_sizes: int, timeout: float = RUN_TIMEOUT, **options: Any) -> Callable[[Callable], Callable]:
    """Runs the body on every rank of a world of each of these sizes. `options` are those of the default group."""

    def decorate(body: Callable) -> Callable:
        parameters = [p for p in inspect.signature(body).parameters.values() if p.name != "rank"]

        def test(world_size: int, **kwargs: Any) -> None:
            pool().run(world_size, body, kwargs, options, timeout)

        test.__dict__.update(body.__dict__)  # the marks below this decorator
        test.__name__, test.__qualname__ = body.__name__, body.__qualname__
        test.__module__, test.__doc__ = body.__module__, body.__doc__
        test.__wrapped__ = body  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes, ids=lambda w: f"W{w}")(test)

    return decorate


def _find(module: str, name: str) -> Callable:
    function = getattr(importlib.import_module(module), name)
    return getattr(function, "__wrapped__", function)


# ------------------------------------------------------------------------------------------------------------ the pool


def _store(host: bool, port: int = 0) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=host, wait_for_workers=False, timeout=seconds(GROUP_TIMEOUT))


_server: dist.TCPStore | None = None
_prefixes = 0


def _new_rendezvous() -> tuple[int, str]:
    """The port of a store that outlives every rank, and a prefix nobody has used."""
    global _server, _prefixes
    if _server is None:
        _server = _store(host=True)
    _prefixes += 1
    return _server.port, f"world{_prefixes}"


def _prepare_process(log: str) -> None:
    """Output of a rank goes to its own log; SIGUSR1 writes the stacks of all its threads there."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)


def _enter_world(rank: int, key: Any) -> None:
    global _world
    if _world is not None and _world.key == key:
        return
    if _world is not None:
        dist.destroy_process_group()
        _world = None
    size, options, port, prefix = key
    init(rank, size, dist.PrefixStore(prefix, _store(False, port)), **dict(options))
    _world = _World(key, rank, size, {})


def _worker(rank: int, conn: Connection, log: str, path: list[str]) -> None:
    _prepare_process(log)
    sys.path[:] = path
    while True:
        try:
            order = conn.recv()
        except EOFError:
            return
        if order is None:
            os._exit(0)
        key, module, name, kwargs = order
        try:
            _enter_world(rank, key)
            result = _find(module, name)(rank=rank, **kwargs)
            try:
                conn.send(("ok", result))
            except (pickle.PicklingError, TypeError, AttributeError):
                conn.send(("ok", None))
        except pytest.skip.Exception as skipped:
            conn.send(("skip", str(skipped)))
        except BaseException:
            conn.send(("failed", traceback.format_exc()))


@dataclass
class Process:
    rank: int
    handle: Any
    conn: Connection
    log: str

    def output(self, limit: int = 6000) -> str:
        try:
            return Path(self.log).read_text(errors="replace")[-limit:]
        except OSError:
            return ""

    def stacks(self) -> None:
        """Has the process write its stacks to its log."""
        if self.handle.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.handle.pid, signal.SIGUSR1)

    def end(self) -> None:
        if self.handle.is_alive():
            self.handle.kill()
        self.handle.join()
        self.conn.close()


def _start(target: Callable, rank: int, args: tuple, folder: str) -> Process:
    here, there = _fork.Pipe()
    log = str(Path(folder) / f"rank{rank}.log")
    handle = _fork.Process(target=target, args=(rank, there, log, sys.path, *args), daemon=True)
    handle.start()
    there.close()
    return Process(rank, handle, here, log)


def _collect(processes: list[Process], timeout: float, grace: float) -> dict[int, tuple[str, Any]]:
    """One answer per rank. Ends early, `grace` seconds after a rank has failed; a dead rank answers "died"."""
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(answers) < len(processes):
        missing = [p for p in processes if p.rank not in answers]
        ready = wait([p.conn for p in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            for p in missing:
                p.stacks()
            time.sleep(0.5)
            for p in missing:
                answers[p.rank] = ("hung", None)
            break
        for p in missing:
            if p.conn in ready:
                try:
                    answers[p.rank] = p.conn.recv()
                except (EOFError, ConnectionResetError):
                    p.handle.join(5)
                    answers[p.rank] = ("died", p.handle.exitcode)
                if answers[p.rank][0] in ("failed", "died"):
                    deadline = min(deadline, time.monotonic() + grace)
    return answers


def _report(processes: list[Process], answers: dict[int, tuple[str, Any]]) -> str:
    parts = []
    for p in processes:
        state, detail = answers[p.rank]
        if state == "failed":
            parts.append(f"--- rank {p.rank} failed\n{detail}")
        elif state in ("hung", "died"):
            what = f"exit code {detail}" if state == "died" else "no answer in time"
            parts.append(f"--- rank {p.rank} {state} ({what}); its log ends:\n{p.output()}")
        else:
            parts.append(f"--- rank {p.rank}: {state}")
    return "\n".join(parts)


class Pool:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zipccl-ranks-")
        self._processes: list[Process] = []
        self._worlds: dict[Any, Any] = {}

    def run(
        self,
        world_size: int,
        body: Callable,
        kwargs: dict[str, Any],
        options: dict[str, Any] | None = None,
        timeout: float = RUN_TIMEOUT,
    ) -> list[Any]:
        """`body(rank, world_size, **kwargs)` on each rank; what each returned, or a failure that shows every rank."""
        names = inspect.signature(body).parameters
        kwargs = dict(kwargs, world_size=world_size) if "world_size" in names else kwargs
        if not self._processes:
            self._processes = [_start(_worker, r, (), self._folder.name) for r in range(MAX_RANKS)]
        wanted = (world_size, tuple(sorted((options or {}).items())))
        if self._worlds.get("current") != wanted:
            self._worlds = {"current": wanted, "rendezvous": _new_rendezvous()}
        key = (*wanted, *self._worlds["rendezvous"])
        active = self._processes[:world_size]
        for p in active:
            p.conn.send((key, body.__module__, body.__name__, kwargs))
        answers = _collect(active, timeout, GRACE)
        states = {state for state, _ in answers.values()}
        if states == {"skip"}:
            pytest.skip(answers[0][1])
        if states != {"ok"}:
            report = _report(active, answers)
            self.close()
            pytest.fail(report, pytrace=False)
        return [answers[r][1] for r in range(world_size)]

    def close(self, politely: bool = False) -> None:
        if politely:
            for p in self._processes:
                with contextlib.suppress(OSError):
                    p.conn.send(None)
        for p in self._processes:
            if politely:
                p.handle.join(5)
            p.end()
        self._processes, self._worlds = [], {}


_pool: Pool | None = None


def pool() -> Pool:
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(_pool.close)
    return _pool


# ------------------------------------------------------------------------------------------- processes of one test only


@dataclass
class Ended:
    """How one rank of `launch` ended."""

    state: str  # "ok", "failed" (an exception left the body), "died" or "hung"
    value: Any  # what the body returned, or the traceback
    exitcode: int | None
    seconds: float
    log: str


def _single(rank: int, conn: Connection, log: str, path: list[str], *args: Any) -> None:
    _prepare_process(log)
    sys.path[:] = path
    module, name, world_size, port, prefix, kwargs = args
    store = dist.PrefixStore(prefix, _store(False, port))
    try:
        result = _find(module, name)(rank=rank, world_size=world_size, store=store, **kwargs)
        conn.send(("ok", result))
    except BaseException:
        conn.send(("failed", traceback.format_exc()))
        raise


def launch(world_size: int, body: Callable, timeout: float = 45.0, **kwargs: Any) -> list[Ended]:
    """`body(rank, world_size, store, **kwargs)` in new processes, each with an end of its own."""
    port, prefix = _new_rendezvous()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zipccl-launch-") as folder:
        args = (body.__module__, body.__name__, world_size, port, prefix, kwargs)
        processes = [_start(_single, r, args, folder) for r in range(world_size)]
        answers = _collect(processes, timeout, timeout)
        ended = []
        for p in processes:
            p.handle.join(max(1.0, started + timeout - time.monotonic()))
            if p.handle.is_alive():  # the body is done, the process is not
                p.stacks()
                time.sleep(0.5)
                answers[p.rank] = ("hung", answers[p.rank][1])
            spent = time.monotonic() - started
            p_end = p.handle.exitcode
            p.end()
            ended.append(Ended(*answers[p.rank], p_end, spent, p.output()))
    return ended


def explain(ended: list[Ended]) -> str:
    """For the message of an assertion; the log only where the process could not tell by itself."""
    return "\n".join(
        f"--- rank {r}: {e.state}, exit code {e.exitcode}, {e.seconds:.1f} s\n{e.value}\n"
        + (e.log if e.state in ("died", "hung") else "")
        for r, e in enumerate(ended)
    )
