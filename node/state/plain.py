"""Nested plain data as bytes: what a training state holds besides tensors, and nothing in them is ever run.

Plain data is None, bool, int, float, str, bytes, and lists, tuples, dicts, OrderedDicts and Counters of it.
Pickle could carry more, and run anything a peer puts into it. Tensors do not go into the bytes: each stands
there as its index in a `TensorTable`, and travels beside them.

The format is msgpack. Its extension types keep apart what msgpack would blur: a tuple from a list, a Counter
from a dict, an int beyond 64 bits.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import msgpack
import numpy as np
import torch

from ...protocols.errors import ConfigError, MalformedMessage

MAX_DEPTH = 64  # Containers inside containers; also what stops data that contains itself.
MAX_BYTES = 60 << 20  # Of one encoded value: a manifest, with all that is in it, goes out as one frame.

EXPECTED = "expected plain data (None, bool, int, float, str, bytes, list, tuple, dict) or tensors"

_TUPLE, _COUNTER, _ORDERED_DICT, _BIG_INT, _TENSOR = range(1, 6)  # On the wire: never renumber.
_INT_BYTES = 9  # At most, of an int in msgpack; a longer body is no index, and may claim to be huge.
# A list of these alone is packed in one call.
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str, bytes})
_MAP_TYPES: dict[int, type] = {_COUNTER: Counter, _ORDERED_DICT: OrderedDict}


class TensorTable:
    """The tensors that encoded data refers to, each once however many names it has.

    Attributes:
        tensors: In the order they were first met; a reference is an index into it.
        names: Where each was met first, e.g. "extra_state['ema'][2]".
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._index_by_id: dict[int, int] = {}

    def add(self, tensor: torch.Tensor, name: str) -> int:
        """The index of `tensor`, which is added as `name` if it is new here.

        Raises: ConfigError for a tensor whose values are not a dense block of memory.
        """
        index = self._index_by_id.get(id(tensor))
        if index is not None:
            return index
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else "sparse"
            raise ConfigError(f"{name} is a {kind} tensor; expected a dense one")
        index = self._index_by_id[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.names.append(name)
        return index


def encode(value: Any, path: str, tensors: TensorTable | None = None, *, canonical: bool = False) -> bytes:
    """Plain data as bytes; `decode` gives back the same values, types and order.

    Args:
        path: What error messages and tensor names call `value`, e.g. "extra_state".
        tensors: Takes the tensors met on the way; None refuses them.
        canonical: Sort dicts and Counters by key, so that equal dicts give equal bytes: for hashing.
    Raises: ConfigError naming the path and type of what is not plain data.
    """
    return checked(_Encoder(tensors, canonical).pack(value, path, MAX_DEPTH), path)


def decode(data: bytes, tensors: Sequence[torch.Tensor] = ()) -> Any:
    """What `encode` was given, with references replaced by `tensors`.

    Memory and time stay proportional to `len(data)`, whatever the bytes claim.
    Raises: MalformedMessage for bytes that `encode` did not write.
    """
    if len(data) > MAX_BYTES:
        raise MalformedMessage(f"{len(data)} bytes of plain data; at most {MAX_BYTES} expected")
    try:
        return _read_all(data, tensors, 2 * MAX_DEPTH)  # An extension around a container counts here.
    except (msgpack.UnpackException, ValueError, TypeError, IndexError) as error:
        # TypeError: an unhashable dict key. IndexError: the data ends early.
        raise MalformedMessage(f"not plain data: {type(error).__name__}: {error}") from error


def checked(data: bytes, path: str) -> bytes:
    """`data`, which is `path`, if it is small enough to be sent. Raises: ConfigError."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} takes {len(data)} bytes; at most {MAX_BYTES} fit (use tensors for bulk)")
    return data


def _packer() -> msgpack.Packer:
    return msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass")


class _Encoder:
    def __init__(self, tensors: TensorTable | None, canonical: bool) -> None:
        self.tensors = tensors
        self.canonical = canonical
        self.packer = _packer()
        self._known: dict[str, bytes] = {}  # Keys that are strings, packed.

    def pack(self, value: Any, path: str, depth_left: int) -> bytes:
        if isinstance(value, torch.Tensor) and self.tensors is not None:  # First, as there may be thousands.
            return self._ext(_TENSOR, self.packer.pack(self.tensors.add(value, path)))
        if isinstance(value, np.generic):
            value = value.item()  # A number of numpy's arrives as one of Python's.
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is bytes:
            return self.packer.pack(value)
        if isinstance(value, float):
            return self.packer.pack(float(value))
        if kind is int:
            if -(1 << 63) <= value < 1 << 64:
                return self.packer.pack(value)
            return self._ext(_BIG_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
        if depth_left == 0:
            raise ConfigError(f"{path} is nested more than {MAX_DEPTH} deep")
        if kind is list:
            return self._array(value, path, depth_left)
        if kind is tuple:
            return self._ext(_TUPLE, self._array(value, path, depth_left))
        if kind is dict:
            return self._map(value, path, depth_left, self.canonical)
        if kind is Counter:
            return self._ext(_COUNTER, self._map(value, path, depth_left, self.canonical))
        if kind is OrderedDict:
            return self._ext(_ORDERED_DICT, self._map(value, path, depth_left, False))
        raise ConfigError(f"{path} is a {_type_name(value)}; {EXPECTED}")

    def _array(self, values: Sequence[Any], path: str, depth_left: int) -> bytes:
        if _AS_THEY_ARE.issuperset(map(type, values)):
            with suppress(OverflowError):  # For an int beyond 64 bits.
                return self.packer.pack(values)
        parts = [self.packer.pack_array_header(len(values))]
        parts += [self.pack(value, f"{path}[{index}]", depth_left - 1) for index, value in enumerate(values)]
        return b"".join(parts)

    def _map(self, values: dict[Any, Any], path: str, depth_left: int, in_key_order: bool) -> bytes:
        keys = [(self._key(key, path, depth_left), key) for key in values]
        if in_key_order:  # Before the values are packed: their tensors are numbered in this order too.
            keys.sort(key=itemgetter(0))
        parts = [self.packer.pack_map_header(len(keys))]
        for packed_key, key in keys:
            parts += packed_key, self.pack(values[key], f"{path}[{key!r}]", depth_left - 1)
        return b"".join(parts)

    def _key(self, key: Any, path: str, depth_left: int) -> bytes:
        if type(key) is str:  # Thousands of dicts have the same few keys.
            return self._known.get(key) or self._known.setdefault(key, self.packer.pack(key))
        if not _is_key(key):
            raise ConfigError(
                f"{path} has the key {key!r:.80}, a {_type_name(key)}; "
                "expected str, int, float, bool or a tuple of these"
            )
        return self.pack(key, f"{path} key", depth_left - 1)

    def _ext(self, code: int, body: bytes) -> bytes:
        return self.packer.pack_ext_type(code, body)


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return type(key) in (str, int, bool) or isinstance(key, float)


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _read_all(data: bytes, tensors: Sequence[torch.Tensor], depth_left: int) -> Any:
    def extension(code: int, body: bytes) -> Any:  # Resolves tensors here, as there may be thousands.
        return tensors[_index(body, len(tensors))] if code == _TENSOR else msgpack.ExtType(code, body)

    unpacker = msgpack.Unpacker(
        max_buffer_size=max(1, len(data)),
        strict_map_key=False,
        unicode_errors="surrogatepass",
        ext_hook=extension,
    )
    unpacker.feed(data)
    value = _read(unpacker, data, tensors, depth_left)
    if unpacker.tell() != len(data):
        raise ValueError(f"{len(data) - unpacker.tell()} bytes after the end")
    return value


def _index(data: bytes, tensors: int) -> int:
    index = msgpack.unpackb(data) if len(data) <= _INT_BYTES else None
    if type(index) is not int or not 0 <= index < tensors:
        raise ValueError(f"tensor {data!r:.40} of {tensors}")
    return index


def _read(unpacker: msgpack.Unpacker, data: bytes, tensors: Sequence[torch.Tensor], depth_left: int) -> Any:
    """The next value.

    Containers are read element by element: unpack() would reserve the memory for as many elements as a header
    claims, again at every depth, before it sees that the bytes end.
    """
    if depth_left < 0:
        raise ValueError("nested too deep")
    first = data[unpacker.tell()]
    if 0x90 <= first <= 0x9F or first in (0xDC, 0xDD):
        return [_read(unpacker, data, tensors, depth_left - 1) for _ in range(unpacker.read_array_header())]
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        items: dict[Any, Any] = {}
        for _ in range(unpacker.read_map_header()):
            key = _read(unpacker, data, tensors, depth_left - 1)
            items[key] = _read(unpacker, data, tensors, depth_left - 1)
        return items
    value = unpacker.unpack()
    if not isinstance(value, msgpack.ExtType):
        return value
    if value.code == _BIG_INT:
        return int.from_bytes(value.data, "big", signed=True)
    body = _read_all(value.data, tensors, depth_left - 1)
    if value.code == _TUPLE and type(body) is list:
        return tuple(body)
    if value.code in _MAP_TYPES and type(body) is dict:
        return _MAP_TYPES[value.code](body)
    raise ValueError(f"extension type {value.code} around a {type(body).__name__}")
