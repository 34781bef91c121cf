"""Lossless compressed collectives for PyTorch.

Importing this package registers the backend ``"zipccl"`` with :mod:`torch.distributed`::

    import torch.distributed as dist, zipccl
    dist.init_process_group("zipccl")
"""

from __future__ import annotations

import os
from typing import Any

import torch  # noqa: F401  (loads the libraries that the extension links to)
import torch.distributed as dist

from zipccl import backend as _backend
from zipccl import profile as _profile
from zipccl.codec import decode, encode, window
from zipccl.layers import Layer, Layers, attach, known_sigma
from zipccl.options import Options

__all__ = [
    "Layer",
    "Layers",
    "Options",
    "attach",
    "decode",
    "encode",
    "known_sigma",
    "reset_stats",
    "save_profile",
    "stats",
    "window",
]
__version__ = "0.1.0"


def stats(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """What this rank's calls of a group did, per collective, since its start or :func:`reset_stats`.

    Per collective: ``calls``; how many of them were ``zipped`` (sent at least one coded message), ``raw`` (went over
    zipccl's exchange uncoded) and ``native`` (handed to the wrapped backend). For zipped and raw calls, of what this
    rank sent: ``raw_bytes`` (uncoded), ``wire_bytes`` (as sent, headers included), ``local_bytes`` (those of them that
    went to ranks of the same host), ``elements`` (coded), ``escapes`` (bytes in the escape pool), ``dynamic_bytes``
    (sent in a second phase), ``sampled_chunks`` (runs of 8192 CPU values whose code window a sample of them chose).
    ``seconds`` of this rank's worker, by stage: ``encode``, ``exchange`` (waiting for peers and wire: ``static`` for
    what goes at once, ``dynamic`` for second phases), ``decode``, ``total``. Where pairs of an all-to-all go on by
    themselves, they are those of the pair that took longest.

    ``decisions``: why calls took their way: for each ``route`` ("native", "raw", "zip" or "hierarchical") and
    ``reason``, ``dtype`` and ``device``, how many ``calls``, and of the last one ``part_bytes`` (what a rank has for
    another; of a coalesced call all together) and the ``predicted`` seconds by route, if they were compared.
    ``measured``, with ``mode="auto"``: what these predictions come from, agreed by all ranks: at some ``part_bytes``,
    the ``seconds`` of a call by route, and of the coded one the ``ratio`` of bytes on the wire to raw ones and the
    ``encode_seconds`` and ``decode_seconds`` of a rank.
    """
    backend = _backend.backend_of(group)
    stats = backend.stats()
    for point in backend.profile():
        if point["collective"] in stats:
            stats[point["collective"]].setdefault("measured", []).append(point)
    return stats


def reset_stats(group: dist.ProcessGroup | None = None) -> None:
    """Sets the statistics of a group back to nothing."""
    _backend.backend_of(group).reset_stats()


def save_profile(path: str | os.PathLike[str], group: dist.ProcessGroup | None = None) -> None:
    """Adds what a group has measured with ``mode="auto"`` to a file, for ``Options(profile=path)`` of a later program.

    One rank does it, as all have the same figures. They serve groups whose hosts have as many ranks each.
    """
    _profile.save(path, _backend.backend_of(group).profile())


_backend.register()
