from importlib.util import find_spec

import pytest

# The frameworks have an environment of their own: make test-frameworks.
collect_ignore = [] if find_spec("torchtitan") else ["frameworks"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked slow only run when they are asked for, as in `pytest -m slow`."""
    if "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
