from __future__ import annotations

from pathlib import Path

import pytest
from multirank import pool

_here = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_here) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(120))
    # one world after another within a module: a change of world costs a new rendezvous
    modules = {m: n for n, m in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(key=lambda i: (modules[i.path], _world_size(i)))


def _world_size(item: pytest.Item) -> int:
    if not item.path.is_relative_to(_here) or not hasattr(item, "callspec"):
        return 0
    return item.callspec.params.get("world_size", 0)


def pytest_sessionfinish() -> None:
    pool().close(politely=True)
