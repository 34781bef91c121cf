from __future__ import annotations

from pathlib import Path

import pytest
from multirank import pool

_here = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: the subset that also runs against other versions of PyTorch")
    config.addinivalue_line("markers", "slow: takes minutes; deselected unless asked for with -m")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.getoption("markexpr"):
        slow = [i for i in items if i.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [i for i in items if i not in slow]
    for item in items:
        if item.path.is_relative_to(_here) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(120))
    # one world after another within a module: a change of world costs a new rendezvous
    modules = {m: n for n, m in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda i: (modules[i.path], _world_size(i)))


def _world_size(item: pytest.Item) -> int:
    return getattr(item, "callspec", None) and item.callspec.params.get("world_size", 0) or 0


def pytest_sessionfinish() -> None:
    pool().close(politely=True)
