"""Hands gradients, and buffers that forward changes, to the all-reduce in chunks, and takes results back.

The reducer (all_reduce.py) sees chunks: every member contributes its weighted values of chunk c, the root of the
chunk's tree adds them, divides by the total weight and broadcasts,

    g = sum_i n_i g_i / sum_i n_i        (n_i samples on node i)

which is the gradient of the global batch however unequal its parts.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn

from ...protocols.errors import ConfigError, LocalProtocolError, MalformedMessage
from ...protocols.sums import bundles
from ..devices import Moment
from ..state.trainable import is_read_only, thawed
from .compression import Compression, Encoding, encoding_of
from .lanes import MAX_CHUNK_BYTES, LaneLayout, averaged, chunk_bytes_of
from .staging import Staging

# Elements. For a gradient of this size or more, a digest tells faster whether it has changed than a comparison.
LARGE = 16384


@dataclass(frozen=True, slots=True)
class _AsSent:
    """What the gradients of these parameters were when they were handed over, and digests of the large ones."""

    indices: list[int]
    grads: list[torch.Tensor | None]
    versions: list[int]
    digests: dict[int, int]  # By parameter.


class _InPlace(NamedTuple):
    """A contribution not written to the lanes: the gradients, which are final at `moment`, and buffers by lane."""

    grads: list[torch.Tensor | None]
    weight: float
    moment: Moment
    buffers: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Finished:
    """What `Gradients.finish` leaves to the reducer.

    Attributes:
        present: One bit per parameter with a gradient here and per buffer that changed here, lowest first.
            Members' masks combine by bitwise or.
        chunks: Those not handed over before, or handed over wrongly. Their contributions are final now.
        retracted: Chunks handed over during backward were wrong. All are in `chunks` again; start over.
    """

    present: bytes
    chunks: list[int]
    retracted: bool


class Gradients:
    """Turns `.grad` into chunks ready to send, and reduced chunks back into `.grad`.

        arm -> backward: chunks become ready -> finish or empty -> (all-reduce) -> adopt

    What lies where in the chunks is a function of the model alone: `LaneLayout` (lanes.py).

    Buffers are averaged only if some member's forward changed them since the last `adopt`. Averaging equal
    values is not harmless: (x + x + x) / 3 may differ from x in the last bit, and a constant would drift.

    Eager mode, `arm` with a weight, hands chunks over while backward runs. If the script then turns out to
    add to gradients that are gone already (a second backward, say), `finish` retracts them, and eager mode
    stays off for the rest of this object's life: a script that accumulates does so at every step, and would
    pay for an aborted attempt each time. What a backward handed over that the script then gave up (`arm` again
    without `finish` or `empty`) is retracted, too.

    While this node is alone, the mean is its own gradient, so gradients stay where they are. If another node comes
    in the middle of a step, the reducer asks for the contribution, and only then is it written to the lanes.

    Attributes:
        alone: Is this node the only one, as far as the training thread knows?
    Args:
        chunk_bytes: Size of a chunk; the last of a lane is smaller. None: what suits the model.
        on_chunks_ready: Called with neighbouring chunks once their contribution is complete, each once per step, in
            the thread that runs backward or, where devices have one, that of `Crossing`. Must return quickly and
            not raise.
        compression: What float32 gradients are on the wire (compression.py).
        trained: The parameters that the optimizer has. Gradients of others are neither sent nor changed.
            Default: all.
    Raises: ConfigError for a parameter that cannot be averaged, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        chunk_bytes: int | None = None,
        on_chunks_ready: Callable[[range], None] = lambda chunks: None,
        compression: Compression = "none",
        trained: Collection[nn.Parameter] | None = None,
    ) -> None:
        if chunk_bytes is None:
            chunk_bytes = chunk_bytes_of(sum(4 * p.numel() for _, p in averaged(model, trained)))
        if not isinstance(chunk_bytes, int) or not 8 <= chunk_bytes <= MAX_CHUNK_BYTES:
            raise ConfigError(
                f"chunk_bytes: {chunk_bytes!r} (expected a whole number from 8 to {MAX_CHUNK_BYTES})"
            )
        self.chunk_bytes, self.compression = chunk_bytes, compression
        self._layout = layout = LaneLayout(model, chunk_bytes, trained)
        # The first bits of `present` are parameters', so many; the others are buffers'.
        self.parameter_count = len(layout.parameters)
        self.lanes, self.chunks = layout.lanes, layout.chunks
        self._parameters, self._buffers = layout.parameters, layout.buffers
        self._holders = [place.holder for place in self._parameters if isinstance(place.holder, nn.Parameter)]
        self._is_large = [place.stop - place.start >= LARGE for place in self._parameters]
        self._parameter_bits = np.array([place.bit for place in self._parameters], dtype=np.int64)
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._known = {id(p): p for p in model.parameters()}
        self._on_chunks_ready = on_chunks_ready
        self._staging = Staging(layout)
        self._crossing = self._staging.crossing
        self._bundles_of: list[list[int]] = [[] for _ in self._parameters]
        self._bundle_size = 0
        self.set_bundle_size(1)

        self.alone = False
        self._in_place: _InPlace | None = None  # Gradients taken out of `.grad`, to be put back by `adopt`.
        # Is `_in_place` still the contribution, as nobody has asked to have that written?
        self._unwritten = False
        # Were the last gradients put back without being written? The optimizer may have changed them since.
        self._let_go = False
        self._eager_allowed = True
        self.had_backward = False  # In the step under way, whatever has become of its gradients.
        self._weight: float | None = None  # What arm() announced; None while hooks have nothing to do.
        self._fired = bytearray(len(self._parameters))
        self._written = bytearray(len(self._parameters))
        self._handed_over = bytearray(len(self.chunks))
        self._is_over = True  # Has the step that `arm` began come to `finish` or `empty`?
        self._given_up = False  # Have chunks left of a backward that came to neither?
        self._as_sent: list[_AsSent] = []  # Emptied at the end of a step, or it would keep gradients alive.
        self._lock = threading.Lock()  # Backward has one thread per device.
        self._hooks = [
            holder.register_post_accumulate_grad_hook(self._hook(index))
            for index, holder in enumerate(self._holders)
        ]
        self._agreed: list[torch.Tensor] = []
        self.rebase()

    def set_bundle_size(self, size: int) -> None:
        """From now on hand over so many neighbouring chunks at once, as many as travel as one message.

        Each call of `on_chunks_ready` costs backward a little. To be called between two steps.
        """
        if size == self._bundle_size:
            return
        self._bundle_size, self._bundles = size, bundles(len(self.chunks), size, self.borders)
        bundle_of = {chunk: index for index, chunks in enumerate(self._bundles) for chunk in chunks}
        self._parameters_in: list[list[int]] = [[] for _ in self._bundles]  # A bundle of buffers has none.
        for index, place in enumerate(self._parameters):
            chunks_here = self._layout.chunks_at(place)
            self._bundles_of[index][:] = sorted({bundle_of[chunk] for chunk in chunks_here})
            for number in self._bundles_of[index]:
                self._parameters_in[number].append(index)
        self._waiting_at_start = [len(indices) for indices in self._parameters_in]
        self._waiting = list(self._waiting_at_start)

    # One step, in order.

    def arm(self, weight: float | None) -> None:
        """Start a step.

        Args:
            weight: Samples in this node's batch, if known already: chunks are handed over during backward.
                None if not: `finish` hands over all of them.
        """
        self._wait_for_crossing()
        with self._lock:
            self._in_place, self._unwritten, self._let_go = None, False, False
        # Peers would take chunks that have left for this step's: no others may leave before `finish` retracts them.
        self._given_up = not self._is_over and (self._given_up or any(self._handed_over))
        self._is_over = False
        self._fired[:] = bytes(len(self._fired))
        self.had_backward = False
        self._written[:] = bytes(len(self._written))
        self._handed_over[:] = bytes(len(self._handed_over))
        self._waiting[:] = self._waiting_at_start
        eager = self._eager_allowed and not self._given_up and not self.alone
        self._weight = weight if eager else None

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Runs for every parameter at every step, so it does little: writing waits until a bundle is full."""
        fired, numbers, lock = self._fired, self._bundles_of[index], self._lock

        def on_gradient(parameter: torch.Tensor) -> None:
            weight, self.had_backward = self._weight, True
            if weight is None or fired[index]:
                return  # If its gradient was written already, finish() notices the change.
            with lock:
                if self._weight is None:
                    return  # Another thread has ended the step meanwhile.
                fired[index] = 1
                for number in numbers:
                    self._waiting[number] -= 1
                    if not self._waiting[number]:
                        self._hand_over(number, weight)

        return on_gradient

    def _hand_over(self, number: int, weight: float) -> None:
        indices = [index for index in self._parameters_in[number] if not self._written[index]]
        grads = self._write(indices, weight, watched=True)
        digests = {
            index: digest
            for index, grad in zip(indices, grads, strict=True)
            if self._is_large[index] and (digest := _digest(grad))
        }
        self._as_sent.append(_AsSent(indices, grads, _versions(grads), digests))
        chunks = self._bundles[number]
        self._handed_over[chunks.start : chunks.stop] = b"\1" * len(chunks)
        if self._crossing is None:
            self._on_chunks_ready(chunks)
        else:
            self._crossing.then(partial(self._on_chunks_ready, chunks))

    def _wait_for_crossing(self) -> None:
        """Wait until all that was handed over has left its device, and `on_chunks_ready` was called for it."""
        if self._crossing is not None:
            self._crossing.wait()

    def finish(self, weight: float) -> Finished:
        """End the step's backward: complete every contribution.

        Contributions then stay as they are until the next `arm`, so an attempt can be repeated.
        Args:
            weight: Samples behind the gradients, >= 0. At 0 the contribution is zeros, no gradient present.
        Raises: ConfigError for a gradient or buffer that cannot be averaged, by name.
        """
        assert 0 <= weight < math.inf, weight
        for name, parameter in self._frozen:
            if parameter.requires_grad and parameter.grad is not None:
                raise thawed(repr(name))
        self._wait_for_crossing()
        handed_over = any(self._handed_over)
        retracted = handed_over and (weight != self._weight or self._outdated(weight))
        self._weight = None
        if retracted:
            self._eager_allowed = False
            # The reducer must hear of it also if what follows raises, and the script tries again.
            self._given_up = True
            self._handed_over[:] = bytes(len(self._handed_over))
            self._written[:] = bytes(len(self._written))
        unwritten = [index for index, written in enumerate(self._written) if not written]
        chunks = [index for index, gone in enumerate(self._handed_over) if not gone]
        # If `_in_place` is taken, an error of the script has interrupted a step that is yet to be adopted.
        may_stay = self.alone and self._in_place is None and self.compression == "none"
        stays = may_stay and weight > 0 and len(chunks) == len(self.chunks)
        if stays:
            self._staging.check(unwritten, self._grads(unwritten))
        else:
            self._unwritten = False
            self._write(unwritten, weight)
        present = self._present(self._staging.write_buffers(self._agreed, 1.0 if stays else weight), weight)
        self._wait_for_crossing()
        self._forget()
        if stays:
            self._leave_in_place(weight)
        return Finished(present, chunks, self._given_up)

    def empty(self) -> Finished:
        """End the step without a contribution: no samples, and no chunk of data to send."""
        with self._lock:
            retracted, self._weight = self._given_up or any(self._handed_over), None
        self._wait_for_crossing()
        self._write_late()  # The contribution of a step that an error of the script interrupted, if it is not over.
        present = self._present(self._staging.write_buffers(self._agreed, 0.0), 0.0)
        self._forget()
        return Finished(present, [], retracted)

    def _forget(self) -> None:
        self._is_over = True
        self._as_sent.clear()
        if self._crossing is not None:
            self._crossing.forget()

    @torch.no_grad()
    def adopt(self, present: bytes, results: Sequence[torch.Tensor] | None) -> None:
        """Copy the reduced values of a step to where the model keeps them.

        Gradients that somebody had are written, into the tensor in `.grad` where there is one; the others
        become None. Buffers that somebody changed are overwritten in place.
        Args:
            present: The bitwise or of all members' masks.
            results: By chunk, 1-D; they are only read. None: they equal the contribution, which was left in place.
        Raises: MalformedMessage if the mask has another length than ours.
        """
        expected = (self._layout.bits + 7) // 8
        if len(present) != expected:
            raise MalformedMessage(f"{len(present)} bytes of gradient mask; expected {expected}")
        if results is None:
            self._adopt_in_place()
            return
        self._in_place = None
        bits = np.unpackbits(np.frombuffer(present, dtype=np.uint8), bitorder="little").astype(bool)
        wanted = bits[self._parameter_bits]
        for index in np.flatnonzero(~wanted):
            self._holders[index].grad = None
        indices = np.flatnonzero(wanted).tolist()
        places = [self._parameters[index] for index in indices]
        targets = [_grad_of(self._holders[index]) for index in indices]
        gradients = len(places)
        for place in itertools.chain(*self._buffers):
            if place.bit < 0 or bits[place.bit]:
                places.append(place)
                targets.append(place.buffer())
        self._layout.spread(places, targets, results)
        for place, value in zip(places[gradients:], targets[gradients:], strict=True):
            agreed, buffers = self._agreed[place.lane], self._buffers[place.lane]
            if agreed.numel():
                start = place.start - buffers[0].start
                agreed[start : start + value.numel()].copy_(value.reshape(-1))

    def _leave_in_place(self, weight: float) -> None:
        """Take the gradients out of `.grad` until `adopt`: what the script puts there meanwhile is another step's."""
        grads = [holder.grad for holder in self._holders]
        buffers = [self._layout.buffers_part(number).clone() for number in range(len(self.lanes))]
        self._in_place = _InPlace(grads, weight, Moment(self._layout.devices), buffers)
        self._unwritten = True
        for holder in self._holders:
            holder.grad = None

    def _adopt_in_place(self) -> None:
        """Put the gradients back into `.grad`. They may change now: nobody may ask for the contribution any more."""
        assert self._in_place is not None, "nothing was left in place"
        with self._lock:
            left, self._in_place = self._in_place, None
            self._unwritten, self._let_go = False, self._unwritten
        for holder, grad in zip(self._holders, left.grads, strict=True):
            holder.grad = grad
        self._agreed = left.buffers

    def _write_late(self) -> None:
        """Write the contribution to the lanes if it was left in place."""
        if not self._unwritten:
            return  # Asked without the lock, for which the loop's thread would wait while backward writes.
        with self._lock:
            if self._unwritten and (late := self._in_place) is not None:
                self._staging.write_late(late.grads, late.weight, late.moment)
            self._unwritten = False

    @property
    def stays(self) -> bool:
        """See `ChunkStore`."""
        return self._unwritten

    def contribution(self, chunks: range) -> torch.Tensor:
        """This node's part of neighbouring chunks of one lane, 1-D, final once all of them are ready.

        Raises: LocalProtocolError after a step whose gradients were adopted in place.
        """
        if self._let_go:
            raise LocalProtocolError("gradients that were adopted in place are asked for")
        self._write_late()
        first, last = self.chunks[chunks[0]], self.chunks[chunks[-1]]
        return self.lanes[first.lane].contribution[first.start : last.stop]

    def encoding(self, chunk: int) -> Encoding:
        """How a chunk looks on the wire."""
        lane = self.lanes[self.chunks[chunk].lane]
        return encoding_of(self.compression, lane.contribution.numpy().dtype, self.chunks[chunk].is_gradient)

    @property
    def borders(self) -> tuple[int, ...]:
        """Chunks that begin another lane, or buffers after gradients."""
        return self._layout.borders

    @property
    def total_bytes(self) -> int:
        """Bytes on the wire of all that a step sums."""
        return sum(self.encoding(each.index).size(each.stop - each.start) for each in self.chunks)

    def is_zero(self) -> bool:
        """Are all gradients of this step zero or absent, in `.grad` or left in place?"""
        grads = self._grads(range(len(self._holders))) if self._in_place is None else self._in_place.grads
        return not any(grad is not None and bool(grad.count_nonzero()) for grad in grads)

    def agreed(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers as all members held them after the last step, whatever forward has done to ours since.

        Returns: (name, values), 1-D, of each lane that has buffers.
        """
        names = [f"buffers of {lane.dtype}".replace("torch.", "") for lane in self.lanes]
        return [(name, agreed) for name, agreed in zip(names, self._agreed, strict=True) if agreed.numel()]

    def strangers(self, model: nn.Module) -> list[str]:
        """Names of parameters that have a gradient and were added to the model, or replaced, since construction."""
        named = model.named_parameters()
        return [name for name, p in named if p.grad is not None and id(p) not in self._known]

    def rebase(self) -> None:
        """Take the buffers as they are for what all members hold, e.g. after `TrainingState.load`.

        Not calling it costs one average of unchanged buffers.
        """
        self._agreed = [self._layout.gather_buffers(number).clone() for number in range(len(self.lanes))]

    @torch.no_grad()
    def revert_buffers(self) -> None:
        """Take back what this step's forward did to the buffers: put in what all members agreed on."""
        for agreed, places in zip(self._agreed, self._buffers, strict=True):
            for place in places:
                buffer, start = place.buffer(), place.start - places[0].start
                buffer.copy_(agreed[start : start + buffer.numel()].view(buffer.shape))

    def spoilt(self) -> str | None:
        """The name of a buffer with a number that was finite when all agreed on it and, since forward, is not."""
        for number, (agreed, places) in enumerate(zip(self._agreed, self._buffers, strict=True)):
            values = self._layout.gather_buffers(number)
            wrong = (agreed.isfinite() & ~values.isfinite()).nonzero()
            if len(wrong):
                at = places[0].start + int(wrong[0])
                return next(place.name for place in places if at < place.stop)
        return None

    def judge_first(self) -> None:
        """From now on no chunk leaves before `finish`, so that a gradient can be judged as a whole."""
        self._eager_allowed = False

    def detach(self) -> None:
        """Leave the model alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._crossing is not None:
            self._crossing.close()

    # Moving values.

    def _grads(self, indices: Iterable[int]) -> list[torch.Tensor | None]:
        return [self._holders[index].grad for index in indices]

    def _outdated(self, weight: float) -> bool:
        """Whether a gradient has changed since it was handed over: by another backward, or by the script.

        Values are looked at, too: GradScaler.unscale_, and who changes `.grad.data`, leave the version alone.
        """
        for sent in self._as_sent:  # Without a loop over parameters in Python: there may be thousands.
            now = self._grads(sent.indices)
            if any(map(is_not, now, sent.grads)) or _versions(now) != sent.versions:
                return True
        if not weight:
            return False
        digests = {index: digest for sent in self._as_sent for index, digest in sent.digests.items()}
        if any(_digest(self._holders[index].grad) != digest for index, digest in digests.items()):
            return True
        small = [index for sent in self._as_sent for index in sent.indices if index not in digests]
        if self._crossing is not None:
            if self._crossing.changed(weight):
                return True
            devices = self._crossing.devices
            small = [index for index in small if self._holders[index].device not in devices]
        return self._staging.differs(small, self._grads(small), weight)

    def _write(
        self, indices: Sequence[int], weight: float, watched: bool = False
    ) -> list[torch.Tensor | None]:
        """Returns: the gradients of these parameters."""
        grads = self._grads(indices)
        self._staging.write(indices, grads, weight, watched)
        for index in indices:  # Not before: there may be no memory for it, and the script try another batch.
            self._written[index] = 1
        return grads

    def _present(self, changed: Sequence[int], weight: float) -> bytes:
        bits = np.zeros(self._layout.bits, dtype=bool)
        bits[list(changed)] = True
        if weight > 0:
            here = [holder.grad is not None for holder in self._holders]
            bits[self._parameter_bits[here]] = True
        return np.packbits(bits, bitorder="little").tobytes()


def _versions(grads: Iterable[torch.Tensor | None]) -> list[int]:
    return [0 if grad is None else grad._version for grad in grads]


def _grad_of(holder: nn.Parameter) -> torch.Tensor:
    """The parameter's `.grad` to be overwritten, made or replaced if it cannot be written to."""
    grad = holder.grad
    # Scripts put in what torch.autograd.grad() returns, which may be one number expanded to many.
    if grad is None or is_read_only(grad):
        # Newer releases of torch allow another than the parameter's.
        dtype = getattr(holder, "grad_dtype", None)
        grad = holder.grad = torch.empty_like(holder, dtype=dtype)
    return grad


def _digest(grad: torch.Tensor | None) -> int:
    """A hash of the bytes of a gradient on the CPU; 0 for others, which are compared in another way."""
    if grad is None or grad.device.type != "cpu":
        return 0
    flat = grad.detach().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # One element of a slice: torch takes that for contiguous.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return xxhash.xxh3_64_intdigest(flat.view(torch.uint8).numpy().data)
