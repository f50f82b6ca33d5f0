"""Accelerators: which ones a model lies on, and what crosses between their memory and this machine's.

Gradients leave on a stream of their own, into pinned memory, so that both sides go on meanwhile: the device computes,
and the thread that gives it work does not wait. Where a copy has arrived, an event says so.

A model on the CPU has nothing to do with any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import torch

FINGERPRINT_ELEMENTS = 1 << 22  # Of which at once: it takes 16 bytes of the device's memory for each.
# 2^64 by the golden ratio: places that are near get factors that are not.
ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def accelerators(tensors: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """The accelerators on which these tensors lie, each once, in the order of their numbers."""
    if not torch.accelerator.is_available():
        return ()
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    found = {tensor.device for tensor in tensors if tensor.device.type == kind.type}
    return tuple(sorted(found, key=lambda device: device.index))


def name_of(device: torch.device) -> str:
    """The device's model, as its maker calls it ("NVIDIA-H100-80GB-HBM3"), without spaces; else its kind."""
    told = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return device.type if told is None else str(told(device)).replace(" ", "-")


def wait_for_device() -> None:
    """Wait until the current accelerator, if there is any, has done what it was asked to."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@cache
def has_streams(device: torch.device) -> bool:
    """May copies have a stream of their own there? MPS has one for all."""
    try:
        torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@cache
def has_doubles(device: torch.device) -> bool:
    """Does it compute in float64? MPS does not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1.0)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def widened(tensors: Sequence[torch.Tensor], dtype: torch.dtype, weight: float) -> torch.Tensor:
    """weight * tensor, one behind the other, of that type, in fresh memory of theirs: [elements].

    Widened before it is multiplied: float16 would overflow.
    """
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).to(dtype) * weight


def to_device(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A copy of what lies in this machine's memory, there: flat parts of one type, one behind the other.

    It crosses from pinned memory, which torch keeps until it has, so nobody waits for it: what is asked of the
    device next comes after it.
    """
    size = sum(map(torch.Tensor.numel, parts))
    pinned = torch.empty(size, dtype=parts[0].dtype, device="cpu", pin_memory=True)
    return torch.cat([*parts], out=pinned).to(device, non_blocking=True)


class Moment:
    """What was asked of some devices up to now. Another thread may have streams of its own begin there."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events = [
            (each, torch.accelerator.current_stream(each).record_event())
            for each in devices
            if has_streams(each)
        ]

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Inside, what this thread asks comes after the moment, and beside all that others ask later.

        It must have been waited for at the end, as copies to this machine are that block.
        """
        with ExitStack() as entered:
            for device, event in self._events:
                stream = torch.Stream(device=device)
                stream.wait_event(event)
                entered.enter_context(stream)
            yield


@dataclass(frozen=True, slots=True)
class _Sent:
    """Tensors that were sent in this step, and fingerprints of what they were then."""

    tensors: Sequence[torch.Tensor]
    dtype: torch.dtype
    fingerprint: torch.Tensor


class Crossing:
    """Brings gradients from devices into pinned memory.

        send, send, then(call), send, ..., then(call), ... -> wait

    Methods are for one thread at a time. Calls happen in a thread of this object's, in their order.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = frozenset(devices)
        self._streams = {device: torch.Stream(device=device) for device in devices}
        self._used: set[torch.device] = set()  # Since the last `then`.
        self._arrivals = ThreadPoolExecutor(1, thread_name_prefix="chaosnet-crossing")
        self._calls: list[Future[None]] = []
        self._sent: list[_Sent] = []

    def send(
        self, target: torch.Tensor, tensors: Sequence[torch.Tensor], weight: float, watched: bool
    ) -> None:
        """Have weight * tensor, one behind the other, written to `target`, which nobody reads before it has come.

        Args:
            tensors: Of one device, as the current stream there leaves them.
            watched: `changed` is to tell whether they are still what they are.
        """
        device = tensors[0].device
        values, stream = widened(tensors, target.dtype, weight), self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            target.copy_(values, non_blocking=True)
        values.record_stream(stream)  # Its memory is not given to others before that.
        self._used.add(device)
        if watched:
            self._sent.append(_Sent(tensors, target.dtype, _fingerprint(values)))

    def then(self, call: Callable[[], None]) -> None:
        """Call once all that was sent so far has arrived."""
        self._calls.append(self._arrivals.submit(_after, self._marks(), call))

    def wait(self) -> None:
        """Wait until all has arrived, and all calls have been made. Raises: what a call, or a copy, has raised."""
        calls, self._calls = self._calls, []
        for each in calls:
            each.result()
        for mark in self._marks():
            mark.synchronize()

    def changed(self, weight: float) -> bool:
        """Has anything changed that was sent and is watched? Waits for the devices."""
        differ: dict[torch.device, list[torch.Tensor]] = {}
        for each in self._sent:
            now = _fingerprint(widened(each.tensors, each.dtype, weight))
            differ.setdefault(now.device, []).append(now != each.fingerprint)
        return any(bool(torch.stack(those).any()) for those in differ.values())

    def forget(self) -> None:
        """Stop watching."""
        self._sent.clear()

    def close(self) -> None:
        self._arrivals.shutdown()

    def _marks(self) -> list[torch.Event]:
        """One behind what was sent to each device since the last time. Who waits for them leaves the processor."""
        marks = [self._streams[each].record_event(torch.Event(each, blocking=True)) for each in self._used]
        self._used.clear()
        return marks


def _after(marks: Sequence[torch.Event], call: Callable[[], None]) -> None:
    for mark in marks:
        mark.synchronize()
    call()


def _fingerprint(values: torch.Tensor) -> torch.Tensor:
    """64 bits, on their device, that hang on every bit of floating-point values, and on its place."""
    bits = values.view(torch.int32 if values.dtype.itemsize == 4 else torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), FINGERPRINT_ELEMENTS):
        part = bits[start : start + FINGERPRINT_ELEMENTS]
        places = torch.arange(start, start + len(part), device=values.device)
        total += (part * (places * ODD | 1)).sum()
    return total
