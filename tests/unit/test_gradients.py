"""Gradients through chunks equal the gradients of the whole batch, whatever the script does to them."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from chaosnet.node.sums import gradients as gradients_module
from chaosnet.node.sums.gradients import Gradients
from chaosnet.protocols.errors import ConfigError, LocalProtocolError, MalformedMessage
from chaosnet.protocols.sums import bundles

TINY_CHUNKS = 64  # Bytes: several parameters per chunk, and several chunks per parameter.


def one(chunk):
    return range(chunk, chunk + 1)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2))


def samples(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randn(count, 2, generator=generator)


def loss_of(model, x, y):
    return functional.mse_loss(model(x), y)


def reduce(members, weights, presents):
    """What the overlay does, by plain torch. Returns the combined mask and the results."""
    total, results = sum(weights), []
    for chunk in members[0].chunks:
        parts = torch.stack([member.contribution(one(chunk.index)) for member in members])
        is_mean = members[0].lanes[chunk.lane].op == "mean"
        results.append(parts.sum(0) / total if is_mean else parts.max(0).values)
    return bytes(any_of(column) for column in zip(*presents, strict=True)), results


def any_of(masks):
    value = 0
    for mask in masks:
        value |= mask
    return value


def one_step(members, weights):
    finished = [member.finish(weight) for member, weight in zip(members, weights, strict=True)]
    present, results = reduce(members, weights, [f.present for f in finished])
    for member in members:
        member.adopt(present, results)
    return finished


@pytest.mark.parametrize("eager", [False, True])
def test_two_weighted_parts_of_a_batch_give_the_gradient_of_the_whole(eager):
    whole, parts, (x, y) = net(), [net(), net()], samples(8)
    loss_of(whole, x, y).backward()
    members, borders = [Gradients(model, TINY_CHUNKS) for model in parts], [slice(0, 5), slice(5, 8)]
    for member, model, part in zip(members, parts, borders, strict=True):
        member.arm(len(x[part]) if eager else None)
        loss_of(model, x[part], y[part]).backward()
    one_step(members, [5, 3])
    for expected, a, b in zip(whole.parameters(), parts[0].parameters(), parts[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
        torch.testing.assert_close(a.grad, expected.grad)


def test_chunks_are_handed_over_during_backward_each_once_and_last_layers_first():
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(4)
    loss_of(model, *samples(4)).backward()
    assert ready == sorted(ready) == list(range(len(gradients.chunks)))
    early = [gradients.contribution(one(chunk)).clone() for chunk in ready]
    finished = gradients.finish(4)
    assert (finished.chunks, finished.retracted) == ([], False)
    assert all(torch.equal(gradients.contribution(one(chunk)), early[chunk]) for chunk in ready)


def test_eager_and_late_contributions_are_the_same_bits():
    contributions = []
    for weight in (3, None):
        model = net()
        gradients = Gradients(model, TINY_CHUNKS)
        gradients.arm(weight)
        loss_of(model, *samples(3)).backward()
        gradients.finish(3)
        contributions.append(gradients.lanes[0].contribution)
    assert torch.equal(*contributions)


def test_unarmed_hooks_hand_nothing_over():
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    loss_of(model, *samples(2)).backward()
    gradients.arm(None)
    loss_of(model, *samples(2)).backward()
    assert ready == []
    assert gradients.finish(2).chunks == list(range(len(gradients.chunks)))


def test_chunks_cover_every_lane_once_and_the_layout_is_reversed():
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    assert [(c.start, c.stop) for c in gradients.chunks[:2]] == [(0, 16), (16, 32)]
    assert gradients.chunks[-1].stop == sum(p.numel() for p in model.parameters())
    loss_of(model, *samples(2)).backward()
    gradients.arm(None)
    gradients.finish(1)
    assert torch.equal(gradients.lanes[0].contribution[:2], model[4].bias.grad)
    assert torch.equal(gradients.lanes[0].contribution[-54:], model[0].weight.grad.flatten())


def test_gradients_of_parameters_that_no_optimizer_has_stay_where_they_are():
    model = net()
    head = list(model[4].parameters())
    gradients = Gradients(model, TINY_CHUNKS, trained={*head})
    assert gradients.total_bytes == 4 * sum(p.numel() for p in head)
    loss_of(model, *samples(2)).backward()
    before = model[0].weight.grad
    one_step([gradients], [2])
    assert model[0].weight.grad is before
    assert gradients.strangers(model) == []


def made_in_inference_mode():
    with torch.inference_mode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("make", "says", "mend"),
    [
        (lambda: torch.eye(2).to_sparse(), "is sparse.*expected.*to_dense", lambda t: t.to_dense()),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
            "quantized.*expected.*dequantize", lambda t: t.dequantize(),
        ),
        (lambda: torch.ones(2, dtype=torch.cfloat).conj(), "expected.*resolve_conj", torch.resolve_conj),
        (made_in_inference_mode, "inference mode.*expected.*clone", torch.clone),
        (lambda: torch.arange(4).expand(2, -1), "one place.*expected.*contiguous", torch.Tensor.contiguous),
        (lambda: torch.ones(1).expand(4), "one place.*expected.*contiguous", torch.Tensor.contiguous),
        (lambda: torch.ones(2).to(torch.float8_e5m2), "is float8_e5m2.*expected float32, or", torch.Tensor.float),
        (lambda: torch.ones(2).to(torch.uint16), "is uint16.*expected int64, or", torch.Tensor.long),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*quantize.*", "ignore:.*[Ss]parse.*")
def test_a_buffer_that_cannot_be_averaged_is_refused_by_name(make, says, mend):
    model = net()
    model.register_buffer("fractions", torch.ones(2))
    model.register_buffer("numbers", torch.ones(2, dtype=torch.int64))
    model.register_buffer("odd", make())
    with pytest.raises(ConfigError, match=f"^buffer 'odd' .*{says}"):
        Gradients(model)
    model.odd = mend(model.odd)
    gradients = Gradients(model)
    loss_of(model, *samples(2)).backward()
    for value in (1, 3):
        model.odd += value
        one_step([gradients], [1])
        gradients.revert_buffers()
    assert torch.equal(model.odd, mend(make()) + 4)


def test_a_buffer_without_data_is_refused_by_name():
    model = net()
    model.register_buffer("odd", torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, match="buffer 'odd' has no data"):
        Gradients(model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64])
def test_buffers_of_an_odd_type_are_averaged_if_there_are_no_others(dtype):
    model = net()
    for name in ("a", "b"):
        model.register_buffer(name, torch.ones(2).to(dtype))
    gradients = Gradients(model)
    loss_of(model, *samples(2)).backward()
    model.a.copy_(torch.tensor([2.0, 4.0]))
    one_step([gradients], [1])
    assert model.a.float().tolist() == [2, 4]


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (torch.zeros(2, dtype=torch.long), torch.zeros(2), "now float32.*expected whole numbers"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.long), "now int64.*expected floats of 32 bits or less"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.double), "now float64.*expected floats of 32"),
    ],
)
def test_a_buffer_that_becomes_another_kind_of_number_is_refused(was, now, says):
    model = net()
    model.register_buffer("seen", was)
    gradients = Gradients(model, TINY_CHUNKS)
    model.seen = now
    with pytest.raises(ConfigError, match=f"buffer 'seen' is {says}"):
        gradients.finish(1)


def test_what_has_left_is_at_hand_while_backward_writes_more():
    """Else the thread that serves all links waits for backward, which holds a lock meanwhile."""
    model, asked = net(), []

    def ready(chunks):
        asking = threading.Thread(
            target=lambda: asked.append((chunks, gradients.contribution(chunks).clone())), daemon=True
        )
        asking.start()
        asking.join(0.5)

    gradients = Gradients(model, TINY_CHUNKS, ready)
    gradients.arm(2)
    loss_of(model, *samples(2)).backward()
    assert [chunks.start for chunks, _ in asked] == list(range(len(gradients.chunks)))
    assert not gradients.finish(2).retracted
    assert all(torch.equal(values, gradients.contribution(chunks)) for chunks, values in asked)


def without_memory(monkeypatch, gradients, parts):
    """So many parts are written; then, once, there is no memory for one."""
    write, left = gradients._staging.write, [parts]

    def one_fails(*arguments, **options):
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("as on a device, where a part is widened first")
        write(*arguments, **options)

    monkeypatch.setattr(gradients._staging, "write", one_fails)


@pytest.mark.parametrize("parts", [0, 2])
@pytest.mark.parametrize("again", [False, True])
def test_what_could_not_be_written_during_backward_is_at_its_end(monkeypatch, parts, again):
    """A script that is out of memory may try a smaller batch, or go on with what it has."""
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.lanes[0].contribution.fill_(7.0)  # Of an earlier step.
    without_memory(monkeypatch, gradients, parts)
    gradients.arm(2)
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(model, *samples(4)).backward()
    if again:
        model.zero_grad()
        loss_of(model, *samples(2)).backward()
    finished = gradients.finish(2)
    assert finished.retracted == (again and parts > 0)
    assert finished.retracted or not {*finished.chunks} & {*ready}
    grads = [torch.zeros(p.shape) if p.grad is None else p.grad for p in reversed(list(model.parameters()))]
    assert torch.equal(gradients.lanes[0].contribution, 2 * torch.cat([grad.flatten() for grad in grads]))


def test_what_is_to_be_taken_back_is_so_if_the_script_has_to_try_twice(monkeypatch):
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(2)
    loss_of(model, *samples(2)).backward()
    model[4].bias.grad.mul_(3)
    without_memory(monkeypatch, gradients, 0)
    with pytest.raises(torch.OutOfMemoryError):
        gradients.finish(2)
    finished = gradients.finish(2)
    assert finished.retracted and finished.chunks == list(range(len(gradients.chunks)))


class Replaces(nn.Module):
    """Forward puts another tensor in its buffer's place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("largest", torch.zeros(2))

    def forward(self, x):
        self.largest = torch.maximum(self.largest.amax(), x.detach().amax()).expand(2)
        if torch.is_inference_mode_enabled():
            self.largest = self.largest.contiguous()
        return self.linear(x)


@pytest.mark.parametrize("inference", [False, True])
def test_a_buffer_that_forward_has_made_read_only_is_averaged(inference):
    models = [Replaces(), Replaces()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    for largest in (1.0, 2.0):
        for number, model in enumerate(models):
            model(torch.full((1, 3), largest + number)).sum().backward()
            with torch.inference_mode(inference):
                model(torch.ones(1, 3))
        one_step(members, [1, 1])
        for member, model in zip(members, models, strict=True):
            assert model.largest.tolist() == [largest + 0.5] * 2
            model(torch.full((1, 3), 9.0))
            member.revert_buffers()
            assert model.largest.tolist() == [largest + 0.5] * 2


def test_accumulated_gradients_are_retracted_and_sent_late_from_then_on():
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(4)
    loss_of(model, *samples(2, seed=1)).backward()
    loss_of(model, *samples(2, seed=2)).backward()
    finished = gradients.finish(4)
    assert finished.retracted and finished.chunks == list(range(len(gradients.chunks)))
    assert torch.equal(gradients.lanes[0].contribution[:2], model[4].bias.grad * 4)
    ready.clear()
    gradients.arm(4)
    loss_of(model, *samples(2)).backward()
    finished = gradients.finish(4)
    assert not ready and not finished.retracted and finished.chunks == list(range(len(gradients.chunks)))


@pytest.mark.parametrize("change", ["scale in place", "scale the data", "replace", "drop", "nothing"])
@pytest.mark.parametrize("how", ["by digests", "by a copy"])
def test_gradients_changed_by_the_script_after_backward_are_retracted(change, how, monkeypatch):
    monkeypatch.setattr(gradients_module, "LARGE", 1 if how == "by digests" else 1000)
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(4)
    loss_of(model, *samples(2)).backward()
    bias = model[4].bias
    if change == "scale in place":
        bias.grad.mul_(3)
    elif change == "scale the data":  # As GradScaler.unscale_, it leaves the tensor's version alone.
        bias.grad.data.mul_(3)
    elif change != "nothing":
        bias.grad = torch.ones(2) if change == "replace" else None
    assert gradients.finish(4).retracted == (change != "nothing")
    expected = torch.zeros(2) if bias.grad is None else bias.grad * 4
    assert torch.equal(gradients.lanes[0].contribution[:2], expected)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("large", [0, 1000])
def test_gradients_of_any_stride_are_looked_at(shape, dtype, large, monkeypatch):
    monkeypatch.setattr(gradients_module, "LARGE", large)
    model = nn.Module()
    model.gate = nn.Parameter(torch.ones(shape, dtype=dtype))
    gradients = Gradients(model, TINY_CHUNKS)
    for changed in (False, True):
        gradients.arm(2)
        model.gate.grad = None
        x = torch.ones(shape, dtype=dtype)
        every_second = torch.stack([x, model.gate], -1)  # Of its gradient's memory is the gate's.
        (every_second * torch.arange(1, 3, dtype=dtype)).sum().backward()
        if changed:
            model.gate.grad.data.mul_(3)
        assert gradients.finish(2).retracted == changed


def test_another_weight_than_announced_is_a_retraction():
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(4)
    loss_of(model, *samples(2)).backward()
    assert gradients.finish(2).retracted
    assert torch.equal(gradients.lanes[0].contribution[:2], model[4].bias.grad * 2)


def test_another_weight_than_announced_is_no_retraction_if_nothing_was_sent():
    gradients = Gradients(net(), TINY_CHUNKS)
    gradients.arm(4)
    assert not gradients.finish(2).retracted


@pytest.mark.parametrize("end", ["finish", "empty"])
def test_what_has_left_of_a_backward_that_was_given_up_is_retracted(end):
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(2)
    loss_of(model, *samples(2)).backward()
    ready.clear()
    model.zero_grad()
    for weight in (None, 2):  # A new pass begins, and its first batch.
        gradients.arm(weight)
    loss_of(model, *samples(2, seed=2)).backward()
    assert ready == []
    finished = gradients.finish(2) if end == "finish" else gradients.empty()
    assert finished.retracted
    if end == "finish":
        assert finished.chunks == list(range(len(gradients.chunks)))
    gradients.arm(2)
    loss_of(model, *samples(2)).backward()
    assert ready and not gradients.finish(2).retracted


def test_a_second_backward_into_chunks_still_open_needs_no_retraction():
    model, ready = net(), []
    gradients = Gradients(model, 1 << 20, ready.extend)
    gradients.arm(2)
    model[4](torch.ones(1, 4)).sum().backward()
    loss_of(model, *samples(2)).backward()
    assert ready == [0]
    assert not gradients.finish(2).retracted
    assert torch.equal(gradients.lanes[0].contribution[:2], model[4].bias.grad * 2)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used_by_one = nn.Parameter(torch.ones(3))
        self.used_by_none = nn.Parameter(torch.ones(40))
        self.used_by_all = nn.Parameter(torch.ones(2))


def test_a_gradient_somebody_has_is_for_all_and_one_nobody_has_stays_none():
    models = [Branches(), Branches()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    for member, model in zip(members, models, strict=True):
        model.used_by_none.grad = torch.ones(40)
        member.arm(1)
        model.used_by_none.grad = None
        model.used_by_all.sum().backward()
    models[0].used_by_one.mul(6).sum().backward()
    finished = one_step(members, [1, 1])
    assert [f.present for f in finished] == [bytes([0b101]), bytes([0b100])]
    for model in models:
        assert model.used_by_none.grad is None
        assert torch.equal(model.used_by_one.grad, torch.full((3,), 3.0))
        assert torch.equal(model.used_by_all.grad, torch.ones(2))


def test_a_missing_gradient_leaves_no_trace_of_the_step_before():
    model = Branches()
    gradients = Gradients(model, TINY_CHUNKS)
    for parameter in (model.used_by_one, model.used_by_all):
        model.zero_grad()
        gradients.arm(1)
        parameter.sum().backward()
        one_step([gradients], [1])
    assert model.used_by_one.grad is None
    assert gradients.lanes[0].contribution.sum() == 2


def test_a_node_without_samples_adopts_what_the_others_computed():
    models = [net(), net()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    loss_of(models[0], *samples(2)).backward()
    expected = [p.grad.clone() for p in models[0].parameters()]
    members[0].arm(2)
    members[1].arm(0)
    finished = one_step(members, [2, 0])
    assert finished[1].present == bytes(1)
    for model in models:
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("how", ["expanded", "made in inference mode"])
def test_what_a_script_puts_in_for_a_gradient_may_be_read_only(how):
    models = [net(), net()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    for number, model in enumerate(models):
        parameters = list(model.parameters())
        with torch.inference_mode(how != "expanded"):
            made = [torch.full(() if how == "expanded" else p.shape, 1.0 + number) for p in parameters]
        for parameter, grad in zip(parameters, made, strict=True):
            parameter.grad = grad.expand(parameter.shape) if how == "expanded" else grad
    one_step(members, [1, 1])
    for parameter in (p for model in models for p in model.parameters()):
        assert torch.equal(parameter.grad, torch.full_like(parameter, 1.5))
        parameter.grad.mul_(2)


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="of newer torches")
def test_a_gradient_of_another_type_than_its_parameter_is_so_where_nobody_had_samples():
    models = [net().bfloat16(), net().bfloat16()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    for parameter in (p for model in models for p in model.parameters()):
        parameter.grad_dtype = torch.float32
    x, y = samples(2)
    loss_of(models[0], x.bfloat16(), y.bfloat16()).backward()
    one_step(members, [2, 0])
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.grad.dtype == b.grad.dtype == torch.float32 and torch.equal(a.grad, b.grad)


def test_a_weight_of_zero_silences_even_infinite_gradients():
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(None)
    model[0].weight.grad = torch.full((9, 6), torch.inf)
    gradients.finish(0)
    assert not gradients.lanes[0].contribution.any()


def test_empty_sends_nothing_and_takes_back_what_was_sent():
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(None)
    empty = gradients.empty()
    assert (empty.present, empty.chunks, empty.retracted) == (bytes(1), [], False)
    gradients.arm(2)
    loss_of(model, *samples(2)).backward()
    assert gradients.empty().retracted


def test_a_tied_parameter_travels_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(3, 3, bias=False)
            self.leave = nn.Linear(3, 3, bias=False)
            self.leave.weight = self.enter.weight

    model, ready = Tied(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(2)
    model.leave(model.enter(torch.ones(2, 3))).sum().backward()
    assert ready == [0] and gradients.chunks[0].stop == 9
    assert not gradients.finish(2).retracted
    assert torch.equal(gradients.contribution(one(0)).view(3, 3), model.enter.weight.grad * 2)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.register_buffer("mask", torch.tensor([0.1, -torch.inf, torch.nan]))
        self.register_buffer("narrow", torch.ones(2, dtype=torch.float16))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.total = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.total = self.total + len(x)  # A new tensor each time.
        self.phase *= 1j
        return self.norm(x)


def backward_of(model, frozen_bias=False):
    model(torch.arange(12.0).view(-1, 3)).pow(2).sum().backward()
    if frozen_bias:
        model.norm.bias.grad = None


@pytest.mark.parametrize("frozen_bias", [False, True])
def test_the_gradients_of_a_node_alone_stay_where_they_are(frozen_bias):
    model = Normed()
    member = Gradients(model, TINY_CHUNKS)
    member.alone = True
    for _ in range(2):
        member.arm(3)
        backward_of(model, frozen_bias)
        grads = [p.grad for p in model.parameters()]
        values = [None if g is None else g.clone() for g in grads]
        buffers = [b.clone() for b in model.buffers()]
        finished = member.finish(3)
        assert member.stays and finished.chunks == list(range(len(member.chunks))) and not finished.retracted
        member.adopt(finished.present, None)
        for parameter, grad, value in zip(model.parameters(), grads, values, strict=True):
            assert parameter.grad is grad and (grad is None or torch.equal(grad, value))
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(buffers, model.buffers(), strict=True)
        )
        model.norm.running_mean.add_(1)
        member.revert_buffers()
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(buffers, model.buffers(), strict=True)
        )
        with pytest.raises(LocalProtocolError, match="in place"):
            member.contribution(one(0))
        model.zero_grad()


@pytest.mark.parametrize("frozen_bias", [False, True])
def test_what_stays_is_written_as_ever_when_it_is_asked_for(frozen_bias):
    models, contributions, masks = [Normed(), Normed()], [], []
    for model, alone in zip(models, (False, True), strict=True):
        member = Gradients(model, TINY_CHUNKS)
        member.alone = alone
        member.contribution(one(0)).fill_(7.0)  # Of an earlier step.
        member.arm(3)
        backward_of(model, frozen_bias)
        masks.append(member.finish(3).present)
        contributions.append([member.contribution(one(chunk.index)).clone() for chunk in member.chunks])
        assert not member.stays
    assert masks[0] == masks[1]
    for mine, theirs in zip(*contributions, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


@pytest.mark.parametrize("then", ["leaves", "trains on", "nothing"])
def test_what_is_adopted_late_is_what_was_left_in_place(then):
    """The script's own signal handler raised in update(), and the step was completed meanwhile."""
    model = Normed()
    member = Gradients(model, TINY_CHUNKS)
    member.alone = True
    member.arm(3)
    backward_of(model)
    values = [p.grad.clone() for p in model.parameters()]
    mean = model.norm.running_mean.clone()
    present = member.finish(3).present
    assert not member.is_zero() and all(p.grad is None for p in model.parameters())
    if then == "leaves":
        member.empty()
    elif then == "trains on":
        backward_of(model)
        assert member.finish(3).chunks and not member.stays
    member.adopt(present, None)
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), values, strict=True))
    member.revert_buffers()
    assert torch.equal(model.norm.running_mean, mean)
    if then == "trains on":  # That is of the next step.
        member.contribution(one(0))


def test_a_contribution_in_place_outlives_an_error_of_the_script_after_which_it_has_nothing():
    """The step that it is for may be done over with somebody who has come, and who adds it up."""
    model = net()
    member = Gradients(model, TINY_CHUNKS)
    member.alone = True
    member.arm(3)
    loss_of(model, *samples(4)).backward()
    expected = torch.cat([3 * p.grad.reshape(-1) for p in reversed(list(model.parameters()))])
    member.finish(3)
    member.empty()
    found = torch.cat([member.contribution(one(chunk.index)) for chunk in member.chunks])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("other", ["no samples", "given up", "compressed"])
def test_nothing_stays_that_is_not_a_gradient_as_it_is(other):
    model = Normed()
    member = Gradients(model, TINY_CHUNKS, compression="bf16" if other == "compressed" else "none")
    if other == "given up":
        member.arm(3)
        backward_of(model)
        model.zero_grad()
    member.alone = True
    member.arm(3)
    backward_of(model)
    assert member.finish(0 if other == "no samples" else 3).retracted == (other == "given up")
    assert member.stays == (other == "given up")  # Its chunks have left before, and are void.


def test_running_means_are_averaged_and_batch_counts_take_the_maximum():
    models = [Normed(), Normed()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    for step, weights in enumerate(((3, 1), (2, 2))):
        for member, model, weight in zip(members, models, weights, strict=True):
            member.arm(weight)
            model(torch.arange(weight * 3.0 + 9).view(-1, 3)).sum().backward()
        models[1](torch.zeros(2, 3))
        models[1].flag.fill_(True)
        before = [(model.norm.running_mean.clone(), float(model.total)) for model in models]
        one_step(members, weights)
        expected = sum(w * mean for w, (mean, _) in zip(weights, before, strict=True)) / 4
        for model in models:
            torch.testing.assert_close(model.norm.running_mean, expected)
            assert model.norm.num_batches_tracked == 2 * (step + 1)
            assert model.total == sum(w * total for w, (_, total) in zip(weights, before, strict=True)) / 4
            assert model.flag and model.flag.dtype == torch.bool
    for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_buffers_that_nobody_changed_keep_every_bit():
    models = [Normed(), Normed(), Normed()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    mask = models[0].mask.view(torch.int32).clone()
    for _ in range(4):
        for member in members:
            member.arm(1)
        one_step(members, [1, 1, 1])
    for model in models:
        assert torch.equal(model.mask.view(torch.int32), mask)
        assert model.mask[0] == torch.tensor(0.1)


def test_a_buffer_changed_by_one_node_is_averaged_over_all():
    models = [Normed(), Normed()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    models[0].narrow.fill_(4)
    finished = one_step(members, [1, 2])
    assert finished[0].present != bytes(1) and finished[1].present == bytes(1)
    assert models[0].narrow.tolist() == models[1].narrow.tolist() == [2, 2]
    models[0].narrow.add_(0.001)  # Lies between two float16: what it becomes is what the next step compares.
    one_step(members, [1, 2])
    assert one_step(members, [1, 2])[0].present == bytes(1)


def test_a_node_whose_buffers_changed_without_samples_is_brought_back():
    models = [Normed(), Normed()]
    members = [Gradients(model, TINY_CHUNKS) for model in models]
    models[1].narrow.fill_(9)
    masks = [members[0].finish(2).present, members[1].finish(0).present]
    present, results = reduce(members, [2, 0], masks)
    for member in members:
        member.adopt(present, results)
    assert models[1].narrow.tolist() == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_chunks_are_handed_over_in_bundles_that_may_change_between_steps(size):
    model, given = net(), []
    gradients = Gradients(model, TINY_CHUNKS, given.append)
    for count in (size, 1, size):
        given.clear()
        gradients.set_bundle_size(count)
        gradients.arm(2)
        loss_of(model, *samples(2)).backward()
        finished = gradients.finish(2)
        found = [chunk for chunks in given for chunk in chunks] + finished.chunks
        assert sorted(found) == list(range(len(gradients.chunks)))
        assert given and all(
            chunks in bundles(len(gradients.chunks), count, gradients.borders) for chunks in given
        )


def test_buffers_wait_for_finish_in_chunks_of_their_own():
    model, ready = Normed(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(3)
    model(torch.randn(3, 3)).sum().backward()
    assert ready == [0] and gradients.chunks[0].stop == 6
    assert gradients.finish(3).chunks == list(range(1, len(gradients.chunks)))


def test_a_buffer_of_another_size_is_refused_by_name():
    model = Normed()
    gradients = Gradients(model)
    model.mask = torch.zeros(7)
    with pytest.raises(ConfigError, match=r"buffer 'mask' had 3 numbers .* now of shape \[7\].*persistent"):
        gradients.finish(1)


@pytest.mark.parametrize("eager", [False, True])
def test_a_sparse_gradient_is_refused_by_name_where_the_script_sees_it(eager):
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    gradients = Gradients(model)
    gradients.arm(1 if eager else None)
    with pytest.raises(ConfigError, match=r"parameter '0\.weight' has a sparse gradient"):
        model(torch.tensor([1])).sum().backward()
        gradients.finish(1)


def test_a_complex_parameter_is_refused_by_name():
    with pytest.raises(ConfigError, match="parameter 'bias' is complex64"):
        model = nn.Linear(1, 1)
        model.bias = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        Gradients(model)


def test_a_lazy_layer_that_has_not_run_is_refused_by_name():
    with pytest.raises(ConfigError, match="parameter 'weight' has no shape yet; run the model once"):
        Gradients(nn.LazyLinear(2))


def test_frozen_parameters_are_left_out_and_refused_once_they_thaw():
    model = net()
    model[0].requires_grad_(False)
    gradients = Gradients(model, TINY_CHUNKS)
    assert gradients.chunks[-1].stop == 9 * 4 + 4 + 4 * 2 + 2
    model[0].requires_grad_(True)
    gradients.arm(None)
    loss_of(model, *samples(2)).backward()
    with pytest.raises(
        ConfigError, match=r"parameter '0\.weight' has a gradient but had requires_grad=False"
    ):
        gradients.finish(2)


def test_narrow_and_wide_types_travel_without_loss():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.f16 = nn.Parameter(torch.ones(3, dtype=torch.float16))
            self.bf16 = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            self.f32 = nn.Parameter(torch.ones(()))
            self.f64 = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.none = nn.Parameter(torch.ones(0))

    model = Mixed()
    gradients = Gradients(model, TINY_CHUNKS)
    assert [lane.dtype for lane in gradients.lanes] == [torch.float32, torch.float64]
    gradients.arm(1000)
    loss = (model.f16 * 60000).sum().double() + (model.f64 / 3).sum() + model.none.sum()
    (loss + model.f32 + model.bf16.sum()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    one_step([gradients], [1000])
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, grad)


def test_a_float16_gradient_is_widened_before_it_is_multiplied():
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.float16))])
    gradients = Gradients(model)
    gradients.arm(1000)
    model[0].grad = torch.full((3,), 60000.0, dtype=torch.float16)
    gradients.finish(1000)
    assert gradients.contribution(one(0)).tolist() == [float(torch.tensor(60000.0).half()) * 1000] * 3


def test_channels_last_gradients_keep_their_layout():
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    gradients = Gradients(model, TINY_CHUNKS)
    gradients.arm(2)
    model(torch.randn(1, 2, 4, 4)).square().sum().backward()
    expected = model.weight.grad.clone()
    gradients.finish(2)
    model.zero_grad()
    gradients.adopt(bytes([3]), [gradients.contribution(one(chunk.index)) / 2 for chunk in gradients.chunks])
    assert torch.equal(model.weight.grad, expected)
    assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_clipping_in_place_leaves_results_fit_to_be_sent_again():
    model = net()
    gradients = Gradients(model, TINY_CHUNKS)
    loss_of(model, *samples(2)).backward()
    finished = gradients.finish(2)
    present, results = reduce([gradients], [2], [finished.present])
    kept = [result.clone() for result in results]
    gradients.adopt(present, results)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert all(map(torch.equal, results, kept))
    gradients.adopt(present, results)
    assert torch.equal(model[4].bias.grad, torch.cat(kept)[:2])


def test_a_mask_of_another_length_is_malformed():
    with pytest.raises(MalformedMessage, match="expected 1"):
        Gradients(net()).adopt(bytes(2), [])


def test_detaching_ends_the_hooks():
    model, ready = net(), []
    gradients = Gradients(model, TINY_CHUNKS, ready.extend)
    gradients.arm(2)
    gradients.detach()
    loss_of(model, *samples(2)).backward()
    assert ready == []


def test_a_chunk_too_small_for_one_element_is_refused():
    with pytest.raises(ConfigError, match="chunk_bytes: 4 "):
        Gradients(net(), 4)
