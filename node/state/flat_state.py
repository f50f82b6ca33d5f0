"""A training state as one flat run of bytes: what its bytes mean, how it is copied, and how it arrives.

The state is one manifest of byte ranges, so shards are equal in size whatever the tensors are, and any range can
come from any neighbor. Its order is

    parameters | tensors of optimizer.state | buffers | caches (buffers with persistent=False), other tensors
    `------ copied in the background -----'   `---------------- copied at the boundary ---------------------'
    `-------------- alike on all nodes -------------'   `--- of other number and shape on other nodes ------'

and beside the bytes goes a plain part (see plain.py). What is in both is the business of training_state.py.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from operator import attrgetter

import msgspec
import numpy as np
import torch
import xxhash
from torch._utils import _flatten_dense_tensors

from ...protocols.errors import ChaosnetError, MalformedMessage
from ..devices import Moment, has_streams
from ..memory import fresh
from . import plain

MAX_TOTAL_BYTES = 1 << 50
MAX_DIMENSIONS = 64

# How much is gathered in one call. On the CPU: what a cache holds. On an accelerator, which gathers in memory of its
# own before the bytes cross the bus: enough to make a crossing worth while.
CPU_RUN_BYTES = 1 << 20
ACCELERATOR_RUN_BYTES = 64 << 20
SMALL_BYTES = 16 << 10  # Making a view of such a tensor takes longer than copying it.
FROZEN_BLOCK_BYTES = 1 << 20  # Of a frozen parameter: hashed together.

Row = tuple[str, str, tuple[int, ...]]  # Name, dtype, shape.


class _Named(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A `Row` in a manifest. There may be thousands, so Python's garbage collector is told not to track them."""

    name: str
    dtype: str
    shape: tuple[int, ...]


# It takes no memory for elements that a header claims before their bytes are there.
_decoder = msgspec.msgpack.Decoder(tuple[int, list[_Named], bytes])

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}

ITEM_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
NUMPY_KINDS = DTYPES.keys() & np.sctypeDict.keys()  # Those that numpy has, too: not bfloat16.


def dtype_name(tensor: torch.Tensor) -> str:
    """As torch spells it, without the module: "float32"."""
    return _spelled(tensor.dtype)


@cache
def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row_of(name: str, tensor: torch.Tensor) -> Row:
    """How a manifest, or a spec, names a tensor."""
    return name, dtype_name(tensor), tuple(tensor.shape)


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of the flat state."""

    name: str
    dtype: str  # "float32"
    shape: tuple[int, ...]
    start: int  # [start, stop), bytes; entries follow each other without gaps.
    stop: int


@dataclass(frozen=True)
class Manifest:
    """What the bytes of a flat state mean.

    Attributes:
        entries: Every tensor, in the order of its bytes.
        plain: The rest of the state, encoded.
        step: Number of committed steps that led to this state.
    """

    entries: tuple[Entry, ...]
    plain: bytes
    step: int

    @cached_property
    def total_bytes(self) -> int:
        return self.entries[-1].stop if self.entries else 0

    @cached_property
    def layout(self) -> bytes:
        """A hash of which tensors lie where: caches and the user's own tensors may differ between nodes."""
        return xxhash.xxh3_64_digest(msgspec.msgpack.encode(self.entries))

    def to_bytes(self) -> bytes:
        named = [_Named(entry.name, entry.dtype, entry.shape) for entry in self.entries]
        return plain.checked(msgspec.msgpack.encode((self.step, named, self.plain)), "manifest")

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises: MalformedMessage for anything that `to_bytes` did not write."""
        if len(data) > plain.MAX_BYTES:
            raise MalformedMessage(f"manifest of {len(data)} bytes; at most {plain.MAX_BYTES} expected")
        try:
            step, rows, plain_part = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise MalformedMessage(f"no manifest: {error}") from error
        if step < 0:
            raise MalformedMessage(f"manifest of step {step}")
        for dtype, shape in {(row.dtype, row.shape) for row in rows}:
            _check_kind(dtype, shape)
        manifest = cls(tuple(lay_out((row.name, row.dtype, row.shape) for row in rows)), plain_part, step)
        if len({entry.name for entry in manifest.entries}) < len(manifest.entries):
            raise MalformedMessage("manifest names a tensor twice")
        if manifest.total_bytes > MAX_TOTAL_BYTES:
            raise MalformedMessage(
                f"manifest of {manifest.total_bytes} bytes; at most {MAX_TOTAL_BYTES} expected"
            )
        return manifest


def lay_out(rows: Iterable[Row]) -> Iterator[Entry]:
    """The tensors of `rows` one behind the other."""
    start, kinds = 0, dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int]]()
    for name, dtype, shape in rows:
        kind = kinds.get((dtype, shape))
        if kind is None:  # There may be thousands of tensors, of few shapes: each is kept once.
            kind = kinds[dtype, shape] = shape, math.prod(shape) * ITEM_SIZES[dtype]
        stop = start + kind[1]
        yield Entry(name, dtype, kind[0], start, stop)
        start = stop


def merged(entries: Iterable[Entry]) -> Iterator[tuple[int, int]]:
    """The byte ranges [start, stop) of `entries`, adjacent ones merged."""
    start = stop = 0
    for entry in entries:
        if entry.start != stop:
            if stop > start:
                yield start, stop
            start = entry.start
        stop = entry.stop
    if stop > start:
        yield start, stop


def _check_kind(dtype: str, shape: tuple[int, ...]) -> None:
    """Check the dtype and shape of a tensor that a peer names. Raises: MalformedMessage."""
    sane = dtype in DTYPES and len(shape) <= MAX_DIMENSIONS and min(shape, default=0) >= 0
    # An empty tensor has strides too, and torch multiplies its other sizes for them.
    if not sane or math.prod([size or 1 for size in shape]) > MAX_TOTAL_BYTES:
        raise MalformedMessage(f"manifest entry of {dtype:.50} {shape!r:.200}")


# What is raised where there is no memory for a copy of the state, or for one that arrives; RuntimeError is torch's.
NO_MEMORY = (MemoryError, RuntimeError)


class StateChanged(ChaosnetError):
    """The script has changed what was being copied, or sent from where it lies."""


class FrozenTensor:
    """A frozen parameter on the CPU, row-major, with hashes of what it held: so it can be sent from where it lies.

    A script may change a frozen parameter all the same (to an average of other weights, say). What has changed is
    not sent.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name, self.address = name, tensor.data_ptr()
        self.changed = False
        self._data = memoryview(as_bytes(tensor).numpy().data)
        self._hashes = [self._hash(block) for block in range(-(-len(self._data) // FROZEN_BLOCK_BYTES))]

    def __getitem__(self, part: slice) -> memoryview:
        """Raises: StateChanged if these bytes, or any in the same blocks, are not what they were."""
        start, stop, _ = part.indices(len(self._data))
        for block in range(start // FROZEN_BLOCK_BYTES, -(-stop // FROZEN_BLOCK_BYTES)):
            if self._hash(block) != self._hashes[block]:
                self.changed = True
                raise StateChanged(f"{self.name} is frozen, and was changed nevertheless")
        return self._data[part]

    def _hash(self, block: int) -> int:
        return xxhash.xxh3_64_intdigest(
            self._data[block * FROZEN_BLOCK_BYTES : (block + 1) * FROZEN_BLOCK_BYTES]
        )


class Snapshot:
    """The training state at one step boundary, as parts by the byte at which each begins.

    A part is a copy (uint8, 1-D), perhaps of many tensors, or a tensor that is sent from where it lies. Tensors that
    were not to be copied have no part. The first `alike` tensors of the manifest are the same on all nodes.
    """

    def __init__(
        self, manifest: Manifest, parts: Mapping[int, np.ndarray | FrozenTensor], alike: int = 0
    ) -> None:
        self.manifest, self.alike = manifest, alike
        self._starts = sorted(parts)
        self._parts = [
            part.data if isinstance(part, np.ndarray) else part
            for part in map(parts.__getitem__, self._starts)
        ]

    def slice(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the state; copied only where parts meet.

        Raises: StateChanged if they are of a frozen parameter that has changed.
        """
        assert 0 <= start <= stop <= self.manifest.total_bytes, (start, stop)
        pieces, index = [], max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            offset = start - self._starts[index]
            piece = self._parts[index][offset : offset + stop - start]
            assert len(piece), f"byte {start} of the state was not copied"
            pieces.append(piece)
            start, index = start + len(piece), index + 1
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))


class Capture:
    """A snapshot in the making.

    What forward and the user's code may change is copied already. Parameters and the tensors of
    optimizer.state, nearly all of the bytes, are not: only optimizer.step() changes them. So `run` may copy
    them in another thread during the next forward and backward pass, and the training thread calls `wait`
    before it steps the optimizer. `on_torn`: called if the script has changed what was being copied.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        late: Sequence[torch.Tensor],
        target: torch.Tensor,
        moment: Moment,
        on_torn: Callable[[], None],
    ) -> None:
        self.manifest = snapshot.manifest
        self._on_torn = on_torn
        self._snapshot = snapshot
        self._late, self._target = late, target  # What is still to be copied, and where to.
        self._moment = moment  # Work that devices were given after it is not to show in the copy.
        self._traces = _traces(late)
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Copy the rest, once, in any thread. A failure is raised by `wait`."""
        assert not self._done.is_set(), "a capture runs once"
        try:
            with self._moment.streams():
                gather(self._late, self._target)
            if self._traces != _traces(self._late):
                self._on_torn()
                raise StateChanged(
                    "the script has changed parameters, or what the optimizer keeps, after update()"
                )
        except BaseException as error:
            self._error = error
        finally:
            self._late = ()  # The optimizer may have dropped some of them since.
            self._done.set()

    def wait(self, timeout_s: float | None = None) -> Snapshot:
        """The snapshot, once `run` has ended. Raises: TimeoutError, StateChanged, or what went wrong in `run`."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the state of step {self.manifest.step} was not copied in {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._snapshot


def _traces(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor, what changes when somebody writes into it, or gives it other memory by `.data`."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


class Arrival:
    """A training state as it comes in, range by range, in any order.

    Every tensor has memory of its own from the start, so that the optimizer keeps what arrives without
    another copy, and the rest can be freed. What `places` names arrives where it is to stay. Tensors at positions
    in `absent` do not arrive: they have a shape, and no values.
    """

    def __init__(
        self,
        manifest: Manifest,
        places: Mapping[str, torch.Tensor] | None = None,
        absent: Collection[int] = (),
    ) -> None:
        self.manifest = manifest
        made = [
            _without_values(entry) if index in absent else _place_for(entry, (places or {}).get(entry.name))
            for index, entry in enumerate(manifest.entries)
        ]
        self.tensors = [tensor for tensor, _ in made]
        self._starts = [
            entry.start for entry, (_, data) in zip(manifest.entries, made, strict=True) if data.size
        ]
        self._bytes = [data for _, data in made if data.size]
        self._have: list[tuple[int, int]] = []  # Disjoint, not adjacent, in order.
        for index in sorted(absent):  # In order, so that neighbours become one range.
            self._add_range(manifest.entries[index].start, manifest.entries[index].stop)

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes [start, start + len(data)) into place; a range may come again.

        Raises: MalformedMessage if they reach outside the state.
        """
        stop = start + memoryview(data).nbytes
        if not 0 <= start <= stop <= self.manifest.total_bytes:
            raise MalformedMessage(f"bytes [{start}, {stop}) of a state of {self.manifest.total_bytes}")
        if start == stop:
            return
        source = np.frombuffer(data, dtype=np.uint8)
        index, at = bisect_right(self._starts, start) - 1, start
        while at < stop:
            target, offset = self._bytes[index], at - self._starts[index]
            length = min(len(target) - offset, stop - at)
            target[offset : offset + length] = source[at - start : at - start + length]  # Without the GIL.
            index, at = index + 1, at + length
        self._add_range(start, stop)

    def _add_range(self, start: int, stop: int) -> None:
        apart_before = [have for have in self._have if have[1] < start]
        apart_after = [have for have in self._have if have[0] > stop]
        touching = self._have[len(apart_before) : len(self._have) - len(apart_after)]
        merged = (min([start, *(a for a, _ in touching)]), max([stop, *(b for _, b in touching)]))
        self._have = [*apart_before, merged, *apart_after]

    def has(self, start: int, stop: int) -> bool:
        """Have bytes [start, stop) arrived?"""
        return any(first <= start and stop <= last for first, last in self._have)

    def snapshot(self) -> Snapshot:
        """What has arrived, to be sent on from where it lies. Valid while nobody writes into the tensors."""
        return Snapshot(self.manifest, dict(zip(self._starts, self._bytes, strict=True)))

    @property
    def missing(self) -> list[tuple[int, int]]:
        """The ranges [start, stop) still to come, in order."""
        edges = [(0, 0), *self._have, (self.manifest.total_bytes, self.manifest.total_bytes)]
        return [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]

    @property
    def complete(self) -> bool:
        return not self.missing


def _without_values(entry: Entry) -> tuple[torch.Tensor, np.ndarray]:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta"), np.empty(0, np.uint8)


def _place_for(entry: Entry, place: torch.Tensor | None) -> tuple[torch.Tensor, np.ndarray]:
    """The tensor that `entry` is to fill, `place` if that fits, and its bytes (uint8, 1-D) in the same memory."""
    dtype = DTYPES[entry.dtype]
    if place is not None and place.dtype == dtype and tuple(place.shape) == entry.shape:
        if entry.dtype in NUMPY_KINDS and place.is_contiguous():
            return place, place.numpy().reshape(-1).view(np.uint8)
        data = as_bytes(place)
        if data.data_ptr() == place.data_ptr():
            return place, data.numpy()
    if 0 < entry.stop - entry.start < SMALL_BYTES:  # Here calls take the time, and this way has the fewest.
        if entry.dtype in NUMPY_KINDS:
            values = np.empty(entry.shape, entry.dtype)
            return torch.from_numpy(values), values.reshape(-1).view(np.uint8)
        bare = np.empty(entry.stop - entry.start, np.uint8)
        return torch.from_numpy(bare).view(dtype).view(entry.shape), bare
    whole = fresh(entry.stop - entry.start)
    return whole.view(dtype).view(entry.shape), whole.numpy()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in row-major order as uint8 [nbytes]; a view where they lie so in memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() and flat.stride(0) != 1:  # One element of a slice: torch takes that for contiguous.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


_on_cpu, _size = attrgetter("is_cpu"), attrgetter("nbytes")


def device_runs(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut `tensors` into runs of neighbors on one device, small enough to gather in one call each."""
    tensors = list(tensors)
    if all(map(_on_cpu, tensors)) and sum(map(_size, tensors)) <= CPU_RUN_BYTES:  # There may be thousands.
        if tensors:
            yield tensors
        return
    run: list[torch.Tensor] = []
    device, room = torch.device("cpu"), 0
    for tensor in tensors:
        size = tensor.nbytes
        if run and (size > room or tensor.device != device):
            yield run
            run = []
        if not run:
            device = tensor.device
            room = CPU_RUN_BYTES if device.type == "cpu" else ACCELERATOR_RUN_BYTES
        run.append(tensor)
        room -= size
    if run:
        yield run


@torch.no_grad()
def gather(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the bytes of `tensors` one behind the other to the front of `out`, uint8 on the CPU.

    In few large calls, each without the GIL.
    """
    start, arrivals = 0, deque[Callable[[], None]]()
    for run in device_runs(tensors):
        stop = start + sum(tensor.nbytes for tensor in run)
        small = stop - start < SMALL_BYTES * len(run)
        if small and len({tensor.dtype for tensor in run}) == 1:
            out[start:stop].copy_(as_bytes(_flatten_dense_tensors(run)))
        elif run[0].device.type == "cpu":
            torch.cat([as_bytes(tensor) for tensor in run], out=out[start:stop])
        else:
            values = torch.cat([as_bytes(tensor) for tensor in run])
            for piece in zip(
                values.split(ACCELERATOR_RUN_BYTES), out[start:stop].split(ACCELERATOR_RUN_BYTES), strict=True
            ):
                arrivals.append(_bring(*piece))
                if len(arrivals) > 1:  # While one is on its way, the one before is put into its place.
                    arrivals.popleft()()
        start = stop
    for arrive in arrivals:
        arrive()


def _bring(values: torch.Tensor, to: torch.Tensor) -> Callable[[], None]:
    """Begin to copy a device's bytes. Returns: a call that waits for them, and puts them into their place.

    They come through pinned memory, which torch reuses, if there is some: into other memory, a driver copies through
    pinned pieces of its own, while the caller waits.
    """
    try:
        if not has_streams(values.device):
            raise RuntimeError("there is one stream, for which one waits")
        pinned = torch.empty(len(values), dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        to.copy_(values)
        return lambda: None
    pinned.copy_(values, non_blocking=True)
    mark = torch.accelerator.current_stream(values.device).record_event(
        torch.Event(values.device, blocking=True)
    )

    def arrive() -> None:
        mark.synchronize()
        to.copy_(pinned)

    return arrive
