"""PyTorch's own tests of a distributed backend, from the installed wheel, over zipccl or over Gloo.

    BACKEND=zipccl python pytorch_suite.py test_all_gather test_broadcast ...
    BACKEND=gloo SHADOW=1 python pytorch_suite.py

Many of these tests are skipped by the backend's name. In shadow mode the name is "gloo", and what bears it is zipccl.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest
from types import SimpleNamespace

os.environ.setdefault("BACKEND", "zipccl")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
for folder in ("barrier", "test_dir", "init_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)

import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

import zipccl  # noqa: E402, F401  (registers the backend)

for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add("zipccl")

if os.environ.get("SHADOW") == "1":
    gloo = c10d.ProcessGroupGloo
    create = dist.Backend._plugins["ZIPCCL"].creator_fn
    made = [0]

    class _Shadow(type):
        def __instancecheck__(cls, backend: object) -> bool:
            return isinstance(backend, gloo) or getattr(backend, "name", lambda: "")() == "zipccl"

        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta | None = None, **_):
            made[0] += 1
            options = SimpleNamespace(
                store=store,
                group_rank=rank,
                group_size=size,
                timeout=timeout or datetime.timedelta(seconds=60),
                group_id=f"shadow{made[0]}",
                global_ranks_in_group=[],
            )
            return create(options, None)

        def __getattr__(cls, name: str):
            return getattr(gloo, name)

    class ShadowGloo(metaclass=_Shadow):
        pass

    c10d.ProcessGroupGloo = ShadowGloo

from torch.testing._internal.distributed import distributed_test  # noqa: E402

if os.environ.get("SHADOW") == "1":
    profiling_event = distributed_test.get_profiling_event

    def get_profiling_event(name: str, *args: object, **kwargs: object) -> list:
        """The events bear zipccl's name; what is handed on may bear Gloo's."""
        return profiling_event(name.replace("gloo:", "zipccl:"), *args, **kwargs) or profiling_event(
            name, *args, **kwargs
        )

    distributed_test.get_profiling_event = get_profiling_event


class TestDistBackendWithFork(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        # Forked, not spawned: PyTorch is imported once for all tests. This process has no threads of its own.
        self._start_processes(multiprocessing.get_context("fork").Process)


def main(names: list[str]) -> None:
    """Runs these tests, or all. The result goes as JSON to the file that RESULT names."""
    seconds: dict[str, float] = {}

    class Result(unittest.TextTestResult):
        def startTest(self, test: unittest.TestCase) -> None:
            super().startTest(test)
            seconds[test._testMethodName] = time.monotonic()

        def stopTest(self, test: unittest.TestCase) -> None:
            super().stopTest(test)
            seconds[test._testMethodName] = time.monotonic() - seconds[test._testMethodName]

    available = unittest.defaultTestLoader.getTestCaseNames(TestDistBackendWithFork)
    suite = unittest.TestSuite(TestDistBackendWithFork(n) for n in available if n in names or not names)
    result = unittest.TextTestRunner(verbosity=2, resultclass=Result).run(suite)
    failed = {test._testMethodName: text for test, text in result.failures + result.errors}
    skipped = {test._testMethodName: reason for test, reason in result.skipped}
    summary = {"failed": failed, "skipped": skipped, "seconds": seconds}
    with open(os.environ.get("RESULT", os.devnull), "w") as f:
        json.dump(summary, f)


if __name__ == "__main__":
    main(sys.argv[1:])
