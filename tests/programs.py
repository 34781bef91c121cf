"""The programs in benchmarks/, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(path: str) -> ModuleType:
    """benchmarks/`path`. Not by a path to the folder, whose other names tests have too."""
    name = Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem
    spec = importlib.util.spec_from_file_location(f"zipccl_{name}", BENCHMARKS / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
