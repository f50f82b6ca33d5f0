"""How chunks of gradients look on the wire: as they are, as bfloat16, or as 8-bit integers with error feedback.

What is lossy is decided where bytes are made: a node encodes the sum of its subtree for its parent, and the root
encodes the mean for everybody. All nodes, the root too, apply what is decoded from the same bytes, so replicas stay
equal to the bit. What a node's own encoding has lost it adds to what it encodes next (error feedback): 8 bits would
otherwise lose the same small gradients at every step.

Source: Seide et al., "1-Bit Stochastic Gradient Descent" (2014); Karimireddy et al., "Error Feedback Fixes SignSGD"
(2019).
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

Compression = Literal["none", "bf16", "int8"]
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)

BLOCK = 512
"""Elements that share a scale: its 4 bytes add 0.8 %, and one large gradient coarsens at most 511 others."""

UNSHARED = 32 << 10
"""Elements to convert at once: so few that torch uses only the calling thread, and leaves other cores to training."""

Array = np.ndarray[Any, np.dtype[Any]]
Buffer = Any  # bytes, memoryview, or a frame's buffer.


class Encoding(Protocol):
    """How the values of one chunk become bytes, and bytes values: 1-D arrays of the lane's type.

    Attributes:
        elementwise: Neighbouring chunks may be encoded as one. If not, each is encoded by itself, and what its
            encoding loses is added to what is encoded next (error feedback).
    """

    elementwise: bool

    def size(self, elements: int) -> int:
        """Bytes that so many elements take."""

    def encode(self, values: Array) -> Buffer:
        """`values` as bytes, perhaps in the same memory."""

    def decode(self, data: Buffer) -> Array:
        """The values that `data` stands for, perhaps in the same memory."""


class Exact:
    """The values themselves; nothing is copied."""

    elementwise = True

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype

    def size(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, values: Array) -> Buffer:
        return values.data.cast("B")

    def decode(self, data: Buffer) -> Array:
        return np.frombuffer(data, dtype=self.dtype)


class BFloat16:
    """The upper half of float32, rounded to nearest: its range, and 8 bits of mantissa."""

    elementwise = True

    def size(self, elements: int) -> int:
        return 2 * elements

    def encode(self, values: Array) -> Buffer:
        wide, short = torch.from_numpy(values), torch.empty(values.size, dtype=torch.bfloat16, device="cpu")
        for some, rounded in zip(wide.split(UNSHARED), short.split(UNSHARED), strict=True):
            rounded.copy_(some)
        return short.view(torch.int16).numpy().data.cast("B")

    def decode(self, data: Buffer) -> Array:
        wide = np.frombuffer(data, dtype=np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)


class Int8:
    """Integers from -127 to 127, times a scale for each BLOCK elements.

    Bytes: all scales (float32), then all integers (int8). A block with any value that is not finite is decoded to
    NaN as a whole.
    """

    elementwise = False

    def size(self, elements: int) -> int:
        return 4 * _blocks(elements) + elements

    def encode(self, values: Array) -> Buffer:
        whole = np.zeros(_blocks(values.size) * BLOCK, np.float32)
        whole[: values.size] = values
        blocks = whole.reshape(-1, BLOCK)
        with np.errstate(all="ignore"):
            scales = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(127)
            scales[np.isinf(scales)] = np.nan
            factors = 1 / scales
            factors[~np.isfinite(factors)] = 0  # All zeros, or too small for 1 / scale to be finite.
            blocks *= factors[:, None]
            blocks[np.isnan(scales)] = 0
        data = np.empty(self.size(values.size), np.uint8)
        data[: scales.nbytes] = scales.view(np.uint8)
        np.rint(blocks, out=blocks)
        data[scales.nbytes :] = whole[: values.size].astype(np.int8).view(np.uint8)
        return data.data

    def decode(self, data: Buffer) -> Array:
        everything = np.frombuffer(data, dtype=np.uint8)
        blocks = -(-everything.size // (BLOCK + 4))
        scales, numbers = everything[: 4 * blocks].view(np.float32), everything[4 * blocks :].view(np.int8)
        whole = np.zeros((blocks, BLOCK), np.float32)
        whole.reshape(-1)[: numbers.size] = numbers
        whole *= scales[:, None]
        return whole.reshape(-1)[: numbers.size]


def encoding_of(compression: Compression, dtype: np.dtype[Any], is_gradient: bool) -> Encoding:
    """The encoding of a chunk: exact but for float32 gradients, the only ones that are compressed."""
    if is_gradient and dtype == np.float32 and compression != "none":
        return BFloat16() if compression == "bf16" else Int8()
    return Exact(dtype)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
