"""Options of a zipccl process group, from arguments or ZIPCCL_* environment variables."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zipccl import _C, profile

_CHOICES = {
    "mode": ("auto", "zip", "raw", "native", "hierarchical"),
    "window": ("sigma", "sample"),
    "cuda_over": ("nccl", "gloo"),
}
_BOOLEANS = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}


def _reject(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"zipccl.Options: {name}={value!r} is not allowed: expected {allowed}")


def _choice(name: str, value: object) -> str:
    allowed = _CHOICES[name]
    if not isinstance(value, str) or value not in allowed:
        raise _reject(name, value, "one of " + ", ".join(repr(choice) for choice in allowed))
    return value


def _bytes(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise _reject(name, value, f"a whole number of bytes, {least} or more")
    return value


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or math.isnan(value):
        raise _reject(name, value, "a number from 0 to 1")
    return float(value)


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _reject(name, value, "True or False")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or "\n" in value:
        raise _reject(name, value, "a string of one line")
    return value


def _parse_boolean(text: str) -> bool:
    return _BOOLEANS[text.lower()]


_DEFAULTS: dict[str, tuple[Any, Callable[[str], Any]]] = {
    # name: the default, and how an environment variable's text becomes a value
    "mode": ("auto", str),
    "min_bytes": (64 << 10, int),
    "segment_bytes": (1 << 20, int),
    "inline_fraction": (1 / 24, float),
    "window": ("sigma", str),
    "checksum": (False, _parse_boolean),
    "two_phase": (True, _parse_boolean),
    "cuda_segment_bytes": (64 << 20, int),
    "cuda_over": ("nccl", str),
    "bf16_partial_sums": (False, _parse_boolean),
    "host": ("", str),
    "profile": ("", str),
}


def this_host() -> str:
    """The same for processes between which bytes need not cross a network."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{machine}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


class Options(_C.Options):
    """What a user can choose for a group. All ranks of a group must choose the same.

    An option that is not given is taken from its environment variable (``ZIPCCL_MODE``, ``ZIPCCL_MIN_BYTES``, ...),
    and else has its default. Unknown names, wrong types and values out of range raise :class:`ValueError`.

    Args:
        mode: ``"auto"`` measures every way and takes the fastest: the first calls of a kind and size take longer, and
            ``stats()`` says what was measured and decided. ``"zip"`` compresses every eligible message, ``"raw"`` uses
            the same exchange without coding, ``"hierarchical"`` goes uncoded inside each host and compressed between
            hosts (all-gather, reduce-scatter and all-reduce, where all hosts have as many ranks, and more than one;
            else as ``"zip"``), ``"native"`` hands everything that the wrapped backend can do to it.
        min_bytes: Messages (what one rank sends to one other) smaller than this are not compressed, and calls whose
            messages are all smaller go to the wrapped backend.
        segment_bytes: Raw bytes that a rank sends in one step of its pipeline, to all peers together; bounds the work
            memory of a call.
        inline_fraction: Room for escaped exponents in the part of a message whose size is known beforehand, in bytes
            per element. Escapes beyond it cost a second message.
        window: How code windows are chosen: ``"sigma"``, from the standard deviation where it is known
            (:func:`zipccl.attach`, :func:`zipccl.known_sigma`), else, and always with ``"sample"``, from samples of the
            data.
        checksum: Every message carries a checksum and is verified by its receivers.
        two_phase: The part of a message whose size is known beforehand goes at once, and what is beyond it, if there
            is any, follows. ``False``: first the size goes, then all of it, so that the gain can be measured. Of CPU
            tensors; with CUDA tensors it is always two phases.
        cuda_segment_bytes: As ``segment_bytes``, of calls on CUDA tensors.
        cuda_over: What carries CUDA tensors: ``"nccl"``, or ``"gloo"`` through processor memory, for tests with
            several ranks on one GPU.
        bf16_partial_sums: On the hierarchical way, sums of a host's bf16 values travel to the other hosts as bf16: a
            third of the bytes, and one more rounding for each host.
        host: What the ranks on one machine have in common and others have not, for the hierarchical way and the order
            of sums; ``""``: found out (the machine's boot and the process's network namespace). Each rank's own affair.
        profile: A file that :func:`zipccl.save_profile` wrote: what it holds for groups like this one is not measured
            again. ``""``: none.
        nccl: A ``ProcessGroupNCCL.Options`` whose ``config`` and ``is_high_priority_stream`` the wrapped NCCL groups
            take over. Not from the environment, and each rank's own affair.
    """

    def __init__(self, *, nccl: Any = None, **options: Any) -> None:
        super().__init__()
        self.nccl = nccl
        unknown = sorted(set(options) - set(_DEFAULTS))
        if unknown:
            raise ValueError(
                f"zipccl.Options: unknown option {', '.join(map(repr, unknown))}; the options are "
                + ", ".join(_DEFAULTS)
            )
        values = {name: options[name] if name in options else _from_environment(name) for name in _DEFAULTS}
        self.mode = _choice("mode", values["mode"])
        self.min_bytes = _bytes("min_bytes", values["min_bytes"], 0)
        self.segment_bytes = _bytes("segment_bytes", values["segment_bytes"], 1)
        self.inline_fraction = _fraction("inline_fraction", values["inline_fraction"])
        self.window = _choice("window", values["window"])
        self.checksum = _boolean("checksum", values["checksum"])
        self.two_phase = _boolean("two_phase", values["two_phase"])
        self.cuda_segment_bytes = _bytes("cuda_segment_bytes", values["cuda_segment_bytes"], 1)
        self.cuda_over = _choice("cuda_over", values["cuda_over"])
        self.bf16_partial_sums = _boolean("bf16_partial_sums", values["bf16_partial_sums"])
        self.host = _text("host", values["host"]) or this_host()
        self.profile = _text("profile", values["profile"])
        self.points = profile.load(self.profile) if self.profile else []

    @classmethod
    def of(cls, options: _C.Options) -> Options:
        """A copy of a group's options."""
        values = {name: getattr(options, name, default) for name, (default, _) in _DEFAULTS.items()}
        path = values.pop("profile")
        copy = cls(nccl=getattr(options, "nccl", None), profile="", **values)
        copy.profile, copy.points = path, options.points  # whatever has become of the file
        copy._timeout = options._timeout
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Options:  # by c10d's split_group
        return Options.of(self)

    def __repr__(self) -> str:
        return "zipccl.Options(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in _DEFAULTS) + ")"


def _from_environment(name: str) -> Any:
    default, parse = _DEFAULTS[name]
    text = os.environ.get(f"ZIPCCL_{name.upper()}")
    if text is None:
        return default
    try:
        return parse(text)
    except (ValueError, KeyError):
        kind = "true or false" if parse is _parse_boolean else f"a value like {default!r}"
        raise ValueError(f"ZIPCCL_{name.upper()}={text!r} is not allowed: expected {kind}") from None
