"""The codec on whole tensors."""

from __future__ import annotations

import math

import torch

from zipccl import _C

_DTYPES = {1: torch.bfloat16, 2: torch.float32}


def encode(tensor: torch.Tensor, *, sigma: float | None = None) -> torch.Tensor:
    """Encodes a CPU tensor losslessly into one message, exactly as long as it needs to be.

    bfloat16 and float32 are compressed; any other dtype is stored as it is. The message knows the dtype and the number
    of elements, not the shape, and carries a checksum.

    Args:
        tensor: Any shape, strides and size, empty included.
        sigma: The values' standard deviation if it is known: it sets the code window. Otherwise samples do.

    Returns:
        A one-dimensional uint8 tensor.
    """
    if sigma is not None:
        window(sigma)  # checks it
    return _C.encode(tensor, sigma)


def decode(buffer: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Decodes a message of :func:`encode`.

    Args:
        buffer: The message, a one-dimensional uint8 CPU tensor.
        out: A contiguous tensor with the message's dtype and number of elements, of any shape.

    Returns:
        ``out``, or a new one-dimensional tensor. A message of a dtype that is not compressed is returned as uint8
        unless ``out`` says what it was.

    Raises:
        ValueError: The message is damaged, or is not one of ``out``'s dtype and size. What ``out`` holds then is
            undefined.
    """
    code, elements = _C.message(buffer)
    if out is None:
        out = torch.empty(elements, dtype=_DTYPES.get(code, torch.uint8))
    elif not out.is_contiguous() or out.device.type != "cpu":
        raise ValueError("zipccl.decode: out must be a contiguous CPU tensor")
    _C.decode_into(buffer, out)
    return out


def window(sigma: float) -> range:
    """The 7 exponent fields that get short codes for values of a normal distribution with this standard deviation."""
    if not math.isfinite(sigma) or sigma <= 0 or sigma > 1e38:
        raise ValueError(f"zipccl: sigma={sigma!r} is not allowed: expected a positive finite number up to 1e38")
    top = _C.window_top(sigma)
    return range(top - 6, top + 1)
