"""`chaosnet.engines.layer_runner`: what layers hand on is the same, to the bit, wherever the model is cut."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chaosnet.engines import layer_runner
from chaosnet.engines.layer_runner import LayerRunner, MicroBatches, needs_nothing
from chaosnet.node.mailbox import Mailbox
from chaosnet.node.sums.layer_sums import LayerSums
from chaosnet.protocols.errors import ConfigError
from chaosnet.scheduler.elastic.program import Instruction, Op, Tag

KEY, WIDTH, SAMPLES, MICRO_BATCHES = (1, 1), 8, 4, 3


class Of(nn.Module):
    """What a function makes of its input, and of this layer's own."""

    def __init__(self, function, *own):
        super().__init__()
        self.function, self.own = function, nn.ModuleList(own)

    def forward(self, x):
        return self.function(x, *self.own)


def linear(out=WIDTH):
    return nn.Linear(WIDTH, out)


def lines_of(member, cuts):
    """All forwards, then all backwards, of the layers from `cuts[member]` on."""
    start, stop = cuts[member : member + 2]
    numbers, found = range(MICRO_BATCHES), []
    for n in numbers:
        if member:
            found.append(Instruction(Op.RECV, (start, stop), (n,), str(member - 1), Tag("a", n, start)))
        found.append(Instruction(Op.FORWARD, (start, stop), (n,)))
        if stop < cuts[-1]:
            found.append(Instruction(Op.SEND, (start, stop), (n,), str(member + 1), Tag("a", n, stop)))
    for n in numbers:
        if stop < cuts[-1]:
            found.append(Instruction(Op.RECV, (start, stop), (n,), str(member + 1), Tag("g", n, stop)))
        found.append(Instruction(Op.BACKWARD, (start, stop), (n,)))
        if member:
            found.append(Instruction(Op.SEND, (start, stop), (n,), str(member - 1), Tag("g", n, start)))
    return found


class Step:
    """One step of members that compute the layers between `cuts`, each in a thread, done over while it is void.

    Attributes:
        void: Attempts that were.
        sums: Of all members. `present`: whether each parameter had a gradient, in the order of the layers.
        sent: Rows and bytes of what was sent, by its way.
        done: By member, what it has computed.
    """

    def __init__(self, make, cuts, loss, fetch):
        self.sent, self.void, self.done = [], 0, {}
        self.boxes = [Mailbox(lambda: False) for _ in cuts[1:]]
        self.members = []
        for _ in self.boxes:
            torch.manual_seed(0)
            layers = make()
            runner = LayerRunner(
                layers, loss, LayerSums(layers, MICRO_BATCHES), self._send, lambda done: None, lambda done: None,
                needs_nothing,
            )  # fmt: skip
            self.members.append(runner)
        while self._attempt(cuts, fetch):
            self.void += 1
        self.sums = sum(each.sums.lanes[0].contribution for each in self.members)
        self.losses = sum(each.sums.lanes[1].contribution for each in self.members).tolist()
        presents = [each.sums._bits(each.sums.present) for each in self.members]
        self.present = [any(bits) for bits in zip(*presents, strict=True)][: len(self.members[0].sums._bit)]

    def _send(self, message, data):
        self.sent.append((message.way, message.rows, len(data)))
        self.boxes[int(message.target)].put(message, bytes(data))

    def _attempt(self, cuts, fetch):
        done, at = [None] * len(self.boxes), self.void

        def run(number):
            runner, lines = self.members[number], lines_of(number, cuts)
            self.boxes[number].begin(KEY, at)
            runner.sums.begin(range(*cuts[number : number + 2]))
            try:
                batches = MicroBatches([SAMPLES] * MICRO_BATCHES, fetch)
                self.done[number] = runner.run(lines, batches, self.boxes[number], KEY, at, ("seed",))
                done[number] = self.done[number].void
            except Exception as error:  # Raised below: the others are waiting for it.
                done[number] = error
                for box in self.boxes:
                    box._is_called = lambda: True
                    box.wake()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(self.boxes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in done:
            if type(each) not in (bool, type(None)) and type(each).__name__ != "Interrupted":
                raise each
        return any(done)


def samples(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.arange(SAMPLES) % 3


def alone_and_cut(make, loss=nn.functional.cross_entropy, fetch=samples):
    """A step of one member, and one where each layer is another's."""
    count = len(make())
    alone = Step(make, [0, count], loss, fetch)
    each = Step(make, range(count + 1), loss, fetch)
    assert alone.losses == each.losses and alone.present == each.present
    assert torch.equal(alone.sums, each.sums)
    return alone, each


def test_what_a_layer_changes_is_its_own_though_the_next_is_given_the_same_memory():
    """One member's layers went on with what another's had not seen: their models differed."""

    def split(x, own):
        mask = (x > 0).long()
        return own(x), mask, mask

    def change(given):
        x, mask, same = given
        mask.mul_(2)
        return x * same, mask

    alone, each = alone_and_cut(
        lambda: [Of(split, linear()), Of(change), Of(lambda v, own: own(v[0] * v[1]), linear(3))]
    )
    assert (alone.void, each.void) == (1, 1)  # Then it was known.


def test_a_first_layer_that_changes_its_input_changes_no_sample_and_no_target():
    data = [torch.randn(SAMPLES, WIDTH) for _ in range(MICRO_BATCHES)]
    before = [each.clone() for each in data]
    alone, _ = alone_and_cut(
        lambda: [Of(lambda x, own: own(x.mul_(2.0)), linear()), nn.ReLU(), linear()],
        nn.functional.mse_loss,
        lambda number: (data[number], data[number]),
    )
    assert not alone.void and all(map(torch.equal, data, before))


def test_what_no_layer_uses_has_no_gradient_as_in_one_process():
    """It had zeros, and optimizers that decay weights changed what nothing uses."""
    alone, _ = alone_and_cut(
        lambda: [
            Of(lambda x, a, b: (a(x), b(x)), linear(), linear()),
            Of(lambda v, own: (own(v[0]).relu(), v[1]), linear()),
            Of(lambda v, own: own(v[0]), linear(3)),
        ]
    )
    assert alone.present == [True, True, False, False, True, True, True, True]


def test_no_gradient_goes_back_to_where_nothing_is_trained():
    def make():
        layers = [linear(), linear(), nn.Tanh(), linear(3)]
        layers[0].requires_grad_(False)
        layers[1].requires_grad_(False)
        return layers

    _, each = alone_and_cut(make)
    assert [size for way, _, size in each.sent if way == "g"] == [0] * (3 * MICRO_BATCHES)


def test_a_layer_is_given_what_needs_no_gradient_as_it_was():
    """`numpy()` of lengths failed, and attention took another kernel, for a gradient of its mask."""

    def use(given, own):
        x, scale = given
        return own(x) * float(scale.numpy().mean()), scale

    alone_and_cut(
        lambda: [
            Of(lambda x, own: (own(x), x.abs().sum(1)), linear()),
            Of(use, linear()),
            Of(lambda v, own: own(v[0]), linear(3)),
        ]
    )


def test_a_layer_may_use_inference_mode():
    def features(x, own):
        with torch.inference_mode():
            return own(x)

    alone_and_cut(lambda: [Of(features, linear()), linear(), linear(3)])


def test_the_last_layer_may_give_the_loss_whatever_it_takes():
    alone_and_cut(
        lambda: [linear(), Of(lambda x, own: {"logits": own(x), "more": None}, linear(3))],
        lambda out, targets: nn.functional.cross_entropy(out["logits"], targets),
    )
    with pytest.raises(ConfigError, match="layer 0 gives dict"):
        alone_and_cut(lambda: [Of(lambda x: {"x": x}), linear(3)])


def test_an_error_says_which_layer_was_given_what():
    """Torch names shapes, and one traceback is as the other where layers are of one class."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        alone_and_cut(lambda: [linear(), linear(5), linear(3)])
    assert caught.value.__notes__ == [
        "layer 2, a Linear, was given float32 (4, 5), as micro-batch 0 of a step"
    ]
    with pytest.raises(IndexError) as caught:
        alone_and_cut(lambda: [linear(), linear(1)], fetch=lambda number: (samples(number)[0], "abc"),
                      loss=lambda out, targets: out[99])  # fmt: skip
    assert caught.value.__notes__ == ["the loss was given float32 (4, 1), and as targets str"]


def test_a_parameter_of_another_layer_that_is_used_now_and_then_is_refused_where_its_gradient_would_be_lost():
    """It was looked for in a layer's first backward alone."""

    def make():
        first, calls = linear(), []

        def use(x, own):
            calls.append(x)
            return own(x) + (first.weight.square().sum() if len(calls) == MICRO_BATCHES else 0)

        return [first, Of(use, linear(3))]

    with pytest.raises(ConfigError, match="a layer, or the loss, uses a parameter of another layer"):
        alone_and_cut(make)


def test_the_first_micro_batch_of_a_layer_in_a_process_is_not_timed(monkeypatch):
    """It allocates, and libraries set themselves up: it says nothing of those that follow."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks), monotonic=lambda: 0.0)
    monkeypatch.setattr(layer_runner, "time", clock)
    step = Step(lambda: [linear(3)], [0, 1], nn.functional.cross_entropy, samples)
    for timed in (MICRO_BATCHES - 1, MICRO_BATCHES):
        done = step.done[0]
        assert (done.micro_batches[0], done.forward_s[0], done.backward_s[0]) == (timed, timed, timed)
        step._attempt([0, 1], samples)
