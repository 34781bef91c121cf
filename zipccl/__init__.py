"""Lossless compressed collectives for PyTorch.

Importing this package registers the backend ``"zipccl"`` with :mod:`torch.distributed`::

    import torch.distributed as dist, zipccl
    dist.init_process_group("zipccl")
"""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (loads the libraries that the extension links to)
import torch.distributed as dist

from zipccl import backend as _backend
from zipccl.codec import decode, encode, window
from zipccl.options import Options

__all__ = ["Options", "decode", "encode", "reset_stats", "stats", "window"]
__version__ = "0.1.0"


def stats(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """What this rank's calls of a group did, per collective, since its start or :func:`reset_stats`.

    Per collective: ``calls``; how many of them were ``zipped`` (sent at least one coded message), ``raw`` (went over
    zipccl's exchange uncoded) and ``native`` (handed to the wrapped backend). For zipped and raw calls, of what this
    rank sent: ``raw_bytes`` (uncoded), ``wire_bytes`` (as sent, headers included), ``elements`` (coded), ``escapes``
    (bytes in the escape pool), ``dynamic_bytes`` (sent in a second phase). ``seconds`` of this rank's worker, by
    stage: ``encode``, ``exchange`` (waiting for peers and the wire), ``decode``, ``total``.
    """
    return _backend.backend_of(group).stats()


def reset_stats(group: dist.ProcessGroup | None = None) -> None:
    """Sets the statistics of a group back to nothing."""
    _backend.backend_of(group).reset_stats()


_backend.register()
