"""Executes one member's part of a step of pipelines: its instructions (scheduler/elastic/program.py), in their order.

Layers are run one by one, each cut off from the one before it, so that their gradients are the same to the bit
whichever of them one member has. Before a layer sees a micro-batch, torch's generator is seeded from the step, the
micro-batch and the layer: dropout draws the same, whoever computes it, and when it is computed again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..callbacks import LayersComputed
from ..node.devices import accelerators
from ..node.mailbox import Interrupted, Mailbox, TensorName
from ..node.state.flat_state import dtype_name
from ..node.state.generators import get_generators, seed_devices, set_generators
from ..node.sums.layer_sums import LayerSums
from ..protocols.errors import ConfigError
from ..protocols.messages import Row, Tensor, ViewKey
from ..scheduler.elastic.program import Instruction, Op, Tag
from ..training.randomness import seed_from
from . import tensor_bytes

Value = Any  # A tensor, or a tuple of tensors. A gradient may be None.
Measure = Callable[[Value, Any, int], None]
CACHE_LINE = 64  # Bytes: torch begins what it allocates on the CPU at one.
CPU = torch.device("cpu")
LEAF_CHANGED = "leaf Variable"  # Says torch where a layer changes its input in place.


@dataclass(slots=True)
class MicroBatches:
    """The micro-batches of one step. `fetch`: gives inputs and targets of one, on the model's device.

    `samples`: how many each has; at the end of an epoch some may have none, and are left out.
    """

    samples: Sequence[int]
    fetch: Callable[[int], tuple[Value, Any]]


@dataclass(slots=True)
class Done:
    """What a member has computed: by layer, seconds of forwards and of backwards, and how many of each there were.

    Without a layer's first micro-batch in this process, which takes longer than all that follow.

    `void`: it counts for nothing. `out_bytes`: by layer, the size of its output for one micro-batch.
    """

    void: bool = False

    forward_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    backward_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    micro_batches: Counter[int] = field(default_factory=Counter)
    out_bytes: dict[int, int] = field(default_factory=dict)


def needs_nothing(layer: int) -> None:
    """For members that have all parameters."""


class _Void(Exception):
    """This attempt is to be left: it counts for nothing here, or at a member that was to send us a tensor."""


class LayerRunner:
    """Computes the layers of one node.

    If an attempt counts for nothing, a tensor without rows goes to all members that wait, and they pass that on.

    Args:
        loss: Of the last layer's output and the targets: the mean over the samples of a micro-batch.
        send: Sends a tensor to its target; its bytes stay as they are.
        layer_done: Is told of layers whose last backward is over: this node's part of their sums is whole.
        computed: Is told of each forward and backward of a micro-batch.
        needs: Is told of each layer before a forward through it; it may wait for its parameters.
        device: What the layers lie on.
    Attributes:
        in_hand: The micro-batch that is being computed, or was when something failed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        sums: LayerSums,
        send: Callable[[Tensor, Any], None],
        layer_done: Callable[[list[int]], None],
        computed: Callable[[LayersComputed], None],
        needs: Callable[[int], None],
        device: torch.device = CPU,
    ) -> None:
        self.layers, self.loss, self.sums = layers, loss, sums
        self.send, self.layer_done, self.computed, self.needs = send, layer_done, computed, needs
        self.device, self._checked = device, set[int]()
        self.warm = set[int]()  # Layers that have computed a micro-batch in this process.
        self.accelerators = accelerators(p for layer in layers for p in layer.parameters())
        self.in_hand: int | None = None
        self._last: _Attempt | None = None
        # What a layer changes in place is to be its own: others may go on with it. The first has a sample's memory.
        self.copies = [
            not number or any(getattr(m, "inplace", False) for m in layer.modules())
            for number, layer in enumerate(layers)
        ]
        # Buffers that are part of the state: by layer, their names, modules, and names in these.
        self.buffers = [
            [
                (f"{prefix}.{name}".lstrip("."), module, name)
                for prefix, module in layer.named_modules()
                for name in sorted(module._buffers.keys() - module._non_persistent_buffers_set)
            ]
            for layer in layers
        ]

    def run(
        self,
        lines: Sequence[Instruction],
        batches: MicroBatches,
        mailbox: Mailbox,
        key: ViewKey,
        step: int,
        seed: tuple[object, ...],
        void: bool = False,
        timed: bool = False,
        again: bool = False,
        measure: Measure | None = None,
    ) -> Done:
        """One attempt at a step, in the view of that `key`. `lines`: the instructions that `due` has left.

        `seed`: of what layers draw in the step. `void`: the attempt is to count for nothing.
        `timed`: an accelerator is waited for after each layer, so that seconds are those of computing; else they are
        those of asking for it.
        `again`: the same attempt was broken off, and what is left of it is void.
        `measure`: nothing is trained; called with outputs of the last layer, targets, and the number of samples.
        Raises: Interrupted when the session has something else to tell.
        """
        own = get_generators(self.accelerators)
        try:
            if self._last is None or not again:
                self._last = _Attempt(self, batches, mailbox, key, step, seed, lines, timed, measure)
            return self._last.run(void)
        finally:
            set_generators(own, self.accelerators)

    def check_strays(self, layer: int) -> None:
        """Once for each layer. Raises: ConfigError if its backward has reached parameters of other layers."""
        if layer not in self._checked:
            self._checked.add(layer)
            self.check_no_strays(f"layer {layer}")

    def check_no_strays(self, which: str) -> None:
        """Raises: ConfigError if a backward has reached parameters of layers that it does not belong to."""
        if self.sums.has_strays():
            raise ConfigError(
                f"{which}, or the loss, uses a parameter of another layer: who adds that gradient would hang on the "
                "pipelines (expected each layer to use parameters that it has itself, if only shared ones)"
            )

    def buffer_versions(self, layer: int) -> list[tuple[Any, int]]:
        """The layer's buffers, and how often each was written to, for `check_buffers`."""
        each = [module._buffers.get(name) for _, module, name in self.buffers[layer]]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in each]

    def check_buffers(self, layer: int, before: list[tuple[Any, int]]) -> None:
        """Raises: ConfigError if the forward has changed the layer's buffers."""
        pairs = zip(self.buffers[layer], before, self.buffer_versions(layer), strict=True)
        for (name, *_), (was, version), (now, written) in pairs:
            if was is not now or version != written:
                raise ConfigError(
                    f"layer {layer} changes its buffer {name!r} as it computes, by what this member alone has seen "
                    "(expected a layer that leaves it; persistent=False, if it is only kept to save time)"
                )


def due(lines: Sequence[Instruction], samples: Sequence[int]) -> list[Instruction]:
    """The instructions without those of micro-batches that have no samples."""
    return [line for line in lines if all(samples[number] for number in line.micro_batches)]


def forward_only(lines: Sequence[Instruction]) -> list[Instruction]:
    """The instructions of the way forward, in their order: for a step in which nothing is trained."""
    return [
        line for line in lines if line.op is Op.FORWARD or (line.tag is not None and line.tag.kind == "a")
    ]


def layers_in(lines: Sequence[Instruction]) -> Counter[int]:
    """How many backwards each layer has."""
    return Counter(layer for line in lines if line.op is Op.BACKWARD for layer in range(*line.layers))


class _Attempt:
    """One attempt at a step, of one member in one view."""

    def __init__(
        self,
        runner: LayerRunner,
        batches: MicroBatches,
        mailbox: Mailbox,
        key: ViewKey,
        step: int,
        seed: tuple[object, ...],
        lines: Sequence[Instruction],
        timed: bool,
        measure: Measure | None,
    ) -> None:
        self.runner, self.batches, self.mailbox, self.timed = runner, batches, mailbox, timed
        self.measure = measure
        self.key, self.step, self.seed, self.lines = key, step, seed, lines
        self.done, self.over = Done(), 0  # What is computed, and how many instructions that was.
        # By micro-batch and layer: what went in, and out.
        self.kept: dict[tuple[int, int], tuple[Value, Value]] = {}
        self.here: dict[tuple[str, int, int], Value] = {}  # By way, micro-batch and layer that it enters.
        self.targets: dict[int, Any] = {}
        self.cold = set[tuple[int, int]]()  # Micro-batches and layers that are not timed (see `Done`).
        forwards = [line for line in lines if line.op is Op.FORWARD]
        self.begins = {line.micro_batches[0] for line in forwards if line.layers[0] == 0}
        self.ends = {line.micro_batches[0] for line in forwards if line.layers[1] == len(runner.layers)}
        # Whose samples are needed here, in the order of need; a dict as an ordered set.
        needed = self.begins | self.ends
        numbers = (line.micro_batches[0] for line in forwards)
        self.unfetched = dict.fromkeys(each for each in numbers if each in needed)
        self.left = layers_in(lines)

    def run(self, void: bool) -> Done:
        try:
            if void:
                raise _Void
            for line in self.lines:
                self._do(line)
                self.over += 1
            self.runner.check_no_strays("a layer")  # Some are used now and then.
        except _Void:
            self.runner.in_hand = None  # What goes wrong from here on is not for these samples to answer for.
            self.done = Done(void=True)
            for line in self.lines[self.over :]:
                if line.op is Op.SEND and line.tag is not None:
                    self._send(line.peer, line.tag, (), [memoryview(b"")])
        except Interrupted:
            self.runner.in_hand = None
            raise
        finally:  # However it ends, nobody computes with that any more.
            for each in (self.kept, self.here, self.targets, self.unfetched):
                each.clear()
        return self.done

    def _do(self, line: Instruction) -> None:
        self.mailbox.check()
        match line.op:
            case Op.RECV:
                assert line.tag is not None
                self._receive(line.tag)
            case Op.SEND:
                assert line.tag is not None
                self._hand_on(line.peer, line.tag)
            case Op.FORWARD | Op.BACKWARD:
                self._compute(line)

    # --- between members ---

    def _receive(self, tag: Tag) -> None:
        name = TensorName(tag.kind, tag.micro_batch, tag.boundary)
        while self.unfetched and not self.mailbox.has(name):
            self._fetch(next(iter(self.unfetched)))  # Rather than wait.
        parts = self.mailbox.take(name)
        if not parts[0][0].rows:
            raise _Void
        value = tensor_bytes.moved(tensor_bytes.joined(parts), self.runner.device)
        self.here[tag.kind, tag.micro_batch, tag.boundary] = value

    def _hand_on(self, peer: str, tag: Tag) -> None:
        value = self.here.pop((tag.kind, tag.micro_batch, tag.boundary))
        self._send(peer, tag, *tensor_bytes.cut(value))

    def _send(self, peer: str, tag: Tag, rows: tuple[Row, ...], parts: Sequence[Any]) -> None:
        for part, data in enumerate(parts):
            message = Tensor(
                key=self.key, step=self.step, target=peer, way="a" if tag.kind == "a" else "g",
                micro_batch=tag.micro_batch, layer=tag.boundary, part=part, parts=len(parts), rows=rows,
            )  # fmt: skip
            self.runner.send(message, data)

    # --- layers ---

    def _suspect(self, number: int) -> None:
        """If something goes wrong now, this micro-batch is the suspect.

        Only samples of the training can be set aside.
        """
        self.runner.in_hand = number if self.measure is None else None

    def _fetch(self, number: int) -> None:
        """Fetch the samples of a micro-batch, as far as they are needed here."""
        del self.unfetched[number]
        self._suspect(number)
        inputs, targets = self.batches.fetch(number)
        if number in self.begins:
            self.here["a", number, 0] = inputs
        if number in self.ends:
            self.targets[number] = targets

    def _compute(self, line: Instruction) -> None:
        began_s, number, backward = time.monotonic(), line.micro_batches[0], line.op is Op.BACKWARD
        self._suspect(number)
        if backward:
            self._backward(number, *line.layers)
        elif self.measure is None:
            self._forward(number, *line.layers)
        else:
            self._validate(number, *line.layers)
        self.runner.in_hand = None  # What a callback raises is not for the samples to answer for.
        self.runner.computed(
            LayersComputed(self.step, self.key, backward, line.layers, number, began_s, time.monotonic())
        )

    def _now_s(self) -> float:
        """The time; if `timed`, once the device has done what it was asked for."""
        if self.timed:
            for device in self.runner.accelerators:
                torch.accelerator.synchronize(device)
        return time.perf_counter()

    def _time(self, took_s: dict[int, float], layer: int, number: int, began_s: float) -> None:
        """Add what a layer has taken for a micro-batch, since `began_s`."""
        ended_s = self._now_s()
        if (number, layer) not in self.cold:
            took_s[layer] += ended_s - began_s

    def _forward(self, number: int, start: int, stop: int) -> None:
        last = len(self.runner.layers)
        if number in self.unfetched:
            self._fetch(number)
        value = self.here.pop(("a", number, start))
        for layer in range(start, stop):
            self.runner.needs(layer)
            if layer not in self.runner.warm:
                self.runner.warm.add(layer)
                self.cold.add((number, layer))
            began_s = time.perf_counter()
            value = _leaves(value)
            buffers = self.runner.buffer_versions(layer)
            out = self._out(layer, number, value)
            self.runner.check_buffers(layer, buffers)
            if layer == last - 1:
                out = self._loss(out, self.targets.pop(number))
                _check_loss(out)
                self.runner.sums.tell_loss(number, float(out.detach()), self.batches.samples[number])
                self.here["g", number, last] = torch.ones_like(out)
            else:
                tensor_bytes.check(out, layer)
                self.done.out_bytes[layer] = sum(each.nbytes for each in _each(out))
            self.kept[number, layer] = _trained(value), _trained(out)
            value = out
            self._time(self.done.forward_s, layer, number, began_s)
        if stop < last:
            self.here["a", number, stop] = _detached(value)

    def _loss(self, out: Any, targets: Any) -> Any:
        try:
            return self.runner.loss(out, targets)
        except Exception as error:
            error.add_note(f"the loss was given {_described(out)}, and as targets {_described(targets)}")
            raise

    @torch.no_grad()
    def _validate(self, number: int, start: int, stop: int) -> None:
        """Forward, in evaluation mode: nothing is kept for a backward."""
        assert self.measure is not None
        if number in self.unfetched:
            self._fetch(number)
        value = self.here.pop(("a", number, start))
        for layer in range(start, stop):
            self.runner.needs(layer)
            with _in_evaluation(self.runner.layers[layer]):
                value = self._out(layer, number, _leaves(value))
            if layer < len(self.runner.layers) - 1:
                tensor_bytes.check(value, layer)
        if stop < len(self.runner.layers):
            self.here["a", number, stop] = _detached(value)
        else:
            self.measure(value, self.targets.pop(number), self.batches.samples[number])

    def _out(self, layer: int, number: int, value: Value) -> Value:
        """The layer's output. A layer that changes its input in place gets a copy.

        Its modules may not tell that they do so (`x += ...`); then torch's error does, once.
        Raises: _Void if it has changed what others go on with.
        """
        runner = self.runner
        versions = _versions(value)
        while True:
            seed_devices(seed_from("layer", *self.seed, number, layer), runner.accelerators)
            try:
                out = runner.layers[layer](_copied(value) if runner.copies[layer] else value)
                break
            except Exception as error:
                if runner.copies[layer] or LEAF_CHANGED not in str(error):
                    error.add_note(self._was_given(layer, value, number))
                    raise
            runner.copies[layer] = True
        if versions != _versions(value):
            runner.copies[layer] = True
            raise _Void
        return out

    def _was_given(self, layer: int, value: Value, number: int) -> str:
        """For who reads an error of a layer's: torch's own says of what shape, and not where."""
        name = type(self.runner.layers[layer]).__name__
        return f"layer {layer}, a {name}, was given {_described(value)}, as micro-batch {number} of a step"

    def _backward(self, number: int, start: int, stop: int) -> None:
        layers, samples = self.runner.layers, self.batches.samples[number]
        gradient = self.here.pop(("g", number, stop))
        finished: list[int] = []
        for layer in reversed(range(start, stop)):
            began_s = time.perf_counter()
            value, out = self.kept.pop((number, layer))
            _backward(out, gradient)
            gradient = _gradients(value)
            self.runner.sums.add(layers[layer], samples)
            self.runner.check_strays(layer)
            self._time(self.done.backward_s, layer, number, began_s)
            if (number, layer) not in self.cold:
                self.done.micro_batches[layer] += 1
            self.left[layer] -= 1
            if not self.left[layer]:
                finished.append(layer)
        if start:
            self.here["g", number, start] = gradient
        if finished:
            self.runner.layer_done(finished)


@contextlib.contextmanager
def _in_evaluation(layer: nn.Module) -> Iterator[None]:
    """Inside, the layer is as after `eval()`; afterwards each of its modules is in its own mode again."""
    were = [(module, module.training) for module in layer.modules()]
    layer.eval()
    try:
        yield
    finally:
        for module, training in were:
            module.training = training


def _each(value: Value) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _described(value: Any) -> str:
    """For people: "float32 (4, 8), bool (4, 8)"."""
    each = (
        f"{dtype_name(each)} {tuple(each.shape)}" if isinstance(each, torch.Tensor) else type(each).__name__
        for each in _each(value)
    )
    return ", ".join(each)


def _like(value: Value, each: Sequence[Any]) -> Value:
    return tuple(each) if isinstance(value, tuple) else each[0]


def _leaves(value: Value) -> Value:
    """The same numbers, cut off from what made them, and laid out as they are when they come over a link.

    With other strides, or another place in a cache line, kernels may add in another order.
    """
    return _like(value, [_leaf(each) for each in _each(value)])


def _leaf(each: torch.Tensor) -> torch.Tensor:
    trained = each.requires_grad and torch.is_grad_enabled()
    each = each.detach().resolve_conj().resolve_neg().contiguous()
    if each.data_ptr() % CACHE_LINE or each.is_inference():  # Such tensors take part in no gradient.
        each = each.clone()
    return each.requires_grad_(trained)


def _versions(value: Value) -> list[int]:
    """How often each was written to. In inference mode nobody counts."""
    return [each._version for each in _each(value) if not each.is_inference()]


def _copied(value: Value) -> Value:
    return _like(value, [each.clone() for each in _each(value)])


def _detached(value: Value) -> Value:
    """Cut off; what something trained has made says so all the same."""
    return _like(value, [each.detach().requires_grad_(each.requires_grad) for each in _each(value)])


def _trained(value: Value) -> Value:
    """What gradients go through; None for the rest."""
    return _like(value, [each if each.requires_grad else None for each in _each(value)])


def _backward(out: Value, gradient: Value) -> None:
    """Run autograd from the gradients of `out` to those of its inputs."""
    pairs = [
        (o, g) for o, g in zip(_each(out), _each(gradient), strict=True) if o is not None and g is not None
    ]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _gradients(value: Value) -> Value:
    """The gradients of a layer's inputs; None where an input needs none, or was not used."""
    return _like(value, [None if each is None else each.grad for each in _each(value)])


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            found = "nothing trained has a part in it"
        raise ConfigError(f"loss: {found} (expected one number, the mean over the samples, with a gradient)")
