"""Files of what a group has measured, so that a later program need not measure again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_FORMAT = "zipccl profile 1"
_KEY = ("layout", "collective", "dtype", "device", "part_bytes")


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What `save` has written."""
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT!r}")
        return list(content["points"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"zipccl: {os.fspath(path)!r} is no profile that zipccl.save_profile wrote: {error}") from None


def save(path: str | os.PathLike[str], points: list[dict[str, Any]]) -> None:
    """Adds to what is in the file already, of other groups; nobody sees it half written."""
    known = load(path) if os.path.exists(path) else []
    merged = {tuple(point[name] for name in _KEY): point for point in [*known, *points]}
    temporary = Path(f"{os.fspath(path)}.{os.getpid()}")
    temporary.write_text(json.dumps({"format": _FORMAT, "points": list(merged.values())}, indent=1) + "\n")
    os.replace(temporary, path)
