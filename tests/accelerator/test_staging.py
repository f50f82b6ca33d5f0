"""Gradients leave a device beside backward, and come back; what is handed over is what they are."""

import threading

import pytest
import sham
import torch
from members import CPU, data, loss_of, net
from torch import nn

from chaosnet.node.sums.gradients import Gradients
from chaosnet.node.sums.lanes import LaneLayout, stage

TINY_CHUNKS = 64  # Bytes: several parameters in a chunk, and several chunks for a parameter.


def batch(start, stop):
    return data()[start:stop]


def backward(model, start=0, stop=8):
    loss_of(model, batch(start, stop)).backward()


def reduced(members, presents):
    """What the overlay does, by plain torch: the mask of all, and results by chunk."""
    total, results = sum(weight for _, weight in members), []
    for chunk in members[0][0].chunks:
        parts = torch.stack([m.contribution(range(chunk.index, chunk.index + 1)) for m, _ in members])
        is_mean = members[0][0].lanes[chunk.lane].op == "mean"
        results.append(parts.sum(0) / total if is_mean else parts.max(0).values)
    mask = bytes(a | b for a, b in zip(*presents, strict=True))
    return mask, results


@pytest.fixture
def made():
    """Makes `Gradients` and detaches them."""
    all_made = []

    def make(*arguments, **options):
        all_made.append(Gradients(*arguments, **options))
        return all_made[-1]

    yield make
    for each in all_made:
        each.detach()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cpu_and_a_device_member_get_the_gradient_of_the_whole(device, made, eager, dtype):
    models = [net(CPU), net(device)]
    if dtype == torch.float16:
        models = [nn.Sequential(*[each for each in m if type(each) is nn.Linear]).to(dtype) for m in models]
    members = [(made(model, TINY_CHUNKS), 3.0 + 2 * number) for number, model in enumerate(models)]
    finished = []
    for (member, weight), model in zip(members, models, strict=True):
        member.arm(weight if eager else None)
        x = torch.ones(4, 6, dtype=dtype, device=next(model.parameters()).device)
        part = model[0](x).pow(2).mean() if len(model) == 2 else model(x.float()).pow(2).mean()
        part.backward()
        finished.append(member.finish(weight))
    before = [p.grad.cpu() for p in models[0].parameters() if p.grad is not None]
    mask, results = reduced(members, [each.present for each in finished])
    for member, _ in members:
        member.adopt(mask, results)
    for a, b, own in zip(*(m.parameters() for m in models), before + [None] * 9, strict=False):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert b.grad.device == device and torch.equal(a.grad, b.grad.cpu())
            torch.testing.assert_close(a.grad, own, rtol=2e-3, atol=1e-4)  # Both had the same samples.


@pytest.mark.parametrize("own_stream", [False, True])
def test_what_stays_on_a_device_is_written_by_another_thread(device, made, own_stream):
    """As the loop's does, when somebody has come whom the training thread has not heard of."""
    models, found = [net(device), net(device)], []
    for model, alone in zip(models, (False, True), strict=True):
        member = made(model, TINY_CHUNKS)
        member.alone = alone
        member.arm(3)
        stream = torch.Stream(device) if own_stream else torch.accelerator.current_stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            backward(model)
            member.finish(3)
            asking = threading.Thread(target=lambda member=member: found.append(contributions(member)))
            asking.start()
            asking.join()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def contributions(member):
    return [member.contribution(range(chunk.index, chunk.index + 1)).clone() for chunk in member.chunks]


def test_of_a_node_alone_only_buffers_leave(device, made, only_sham):
    model = net(device)
    gradients = made(model, TINY_CHUNKS)
    gradients.alone = True
    gradients.arm(1.0)
    backward(model)
    before = sham.traffic()
    gradients.adopt(gradients.finish(3.0).present, None)
    after = sham.traffic()
    assert after.to_host - before.to_host <= 2 * sum(b.nbytes for b in model.buffers())
    assert after.to_device == before.to_device


def test_chunks_have_arrived_when_they_are_handed_over(device, made):
    model, handed_over = net(device), {}

    def ready(chunks):
        handed_over.update(
            {chunk: gradients.contribution(range(chunk, chunk + 1)).clone() for chunk in chunks}
        )

    gradients = made(model, TINY_CHUNKS, ready)
    gradients.arm(2.0)
    backward(model)
    finished = gradients.finish(2.0)
    assert handed_over and not finished.retracted and not {*finished.chunks} & {*handed_over}
    for chunk, values in handed_over.items():
        assert torch.equal(values, gradients.contribution(range(chunk, chunk + 1)))
    flat = torch.empty_like(gradients.lanes[0].contribution)
    grads = [p.grad for p in reversed(list(model.parameters()))]
    stage(flat, grads, 2.0)
    size = sum(grad.numel() for grad in grads)
    assert torch.equal(flat[:size], gradients.lanes[0].contribution[:size])


def test_backward_does_not_wait_for_what_it_hands_over(device, made):
    model, over = net(device), threading.Event()
    waited = []
    gradients = made(model, TINY_CHUNKS, lambda chunks: waited.append(over.wait(20)))
    gradients.arm(1.0)
    backward(model)
    over.set()  # Whoever was told during backward is held up until here.
    gradients.finish(1.0)
    assert waited and all(waited)


def test_what_handing_over_raises_is_raised_by_finish(device, made):
    model = net(device)

    def fail(chunks):
        raise RuntimeError("nobody listens")

    gradients = made(model, TINY_CHUNKS, fail)
    gradients.arm(1.0)
    backward(model)
    with pytest.raises(RuntimeError, match="nobody listens"):
        gradients.finish(1.0)


@pytest.mark.parametrize("how", ["again", "data", "swapped", "untouched"])
def test_a_gradient_that_changes_after_it_was_handed_over_is_taken_back(device, made, how):
    model = net(device)
    gradients = made(model, TINY_CHUNKS)
    gradients.arm(1.0)
    backward(model)
    grad = model[0].weight.grad
    if how == "again":
        backward(model)
    elif how == "data":  # As GradScaler.unscale_ does: the version stays.
        grad.data.mul_(0.5)
    elif how == "swapped":  # The sum of all bits stays.
        grad.data.copy_(grad.data.flip(0))
    finished = gradients.finish(1.0)
    assert finished.retracted == (how != "untouched")
    place = next(p for p in gradients._parameters if p.holder is model[0].weight)
    assert torch.equal(
        gradients.lanes[0].contribution[place.start : place.stop], model[0].weight.grad.cpu().reshape(-1)
    )


def test_a_step_that_is_dropped_leaves_nothing_under_way(device, made):
    model, told = net(device), []

    def tell(chunks):
        threading.Event().wait(0.02)  # Whoever does not wait for it goes on before.
        told.extend(chunks)

    gradients = made(model, TINY_CHUNKS, tell)
    gradients.arm(1.0)
    backward(model)
    assert gradients.empty().retracted
    count = len(told)
    assert count == sum(chunk.is_gradient for chunk in gradients.chunks)
    gradients.arm(None)
    model.zero_grad()
    backward(model)
    assert not gradients.finish(0.0).retracted
    assert len(told) == count and not gradients.lanes[0].contribution.any()


def test_gradients_leave_and_come_over_once(device, made, only_sham):
    model = net(device)
    gradients = made(model, TINY_CHUNKS)
    size = sum(p.nbytes for p in model.parameters())
    gradients.arm(None)
    backward(model)
    before = sham.traffic()
    finished = gradients.finish(1.0)
    left = sham.traffic()
    buffers = sum(b.nbytes for b in model.buffers())
    assert left.to_host - before.to_host <= size + 2 * buffers
    results = [gradients.contribution(range(c.index, c.index + 1)).clone() for c in gradients.chunks]
    gradients.adopt(finished.present, results)
    counted = 8  # Bytes: BatchNorm's count of batches, which all take over each time.
    assert sham.traffic().to_device - left.to_device == size + counted


def test_a_model_on_two_devices_is_staged_from_both(device, last_device, made):
    model = nn.ModuleList([net(device), net(last_device), net(CPU)])
    gradients = made(model, TINY_CHUNKS)
    gradients.arm(1.0)
    for each in model:
        backward(each)
    finished = gradients.finish(1.0)
    results = [gradients.contribution(range(c.index, c.index + 1)).clone() for c in gradients.chunks]
    before = [p.grad.cpu() for p in model.parameters()]
    gradients.adopt(finished.present, results)
    assert not finished.retracted
    assert all(torch.equal(p.grad.cpu(), was) for p, was in zip(model.parameters(), before, strict=True))


def test_results_come_to_each_place_where_devices_and_this_machines_memory_take_turns(
    device, last_device, monkeypatch
):
    """What crosses at once may have a place of the CPU, or of another device, in its middle."""
    monkeypatch.setattr("chaosnet.node.sums.lanes.CROSSING_BYTES", 2 * TINY_CHUNKS)
    where = device, CPU, device, last_device, device, CPU, last_device
    sizes = 3, 5, 40, 7, 1, 90, 33
    model = nn.ParameterList(torch.zeros(size, device=at) for size, at in zip(sizes, where, strict=True))
    layout = LaneLayout(model, TINY_CHUNKS)
    values = torch.arange(sum(sizes), dtype=torch.float32)
    targets = [torch.full_like(place.holder, torch.nan) for place in layout.parameters]
    layout.spread(layout.parameters, targets, [values[chunk.start : chunk.stop] for chunk in layout.chunks])
    for place, target in zip(layout.parameters, targets, strict=True):
        assert torch.equal(target.cpu(), values[place.start : place.stop]), place.name


def test_a_script_may_train_on_a_stream_of_its_own(device, made):
    model, stream = net(device), torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    gradients = made(model, TINY_CHUNKS)
    with stream:
        for _ in range(2):
            gradients.arm(1.0)
            backward(model)
            finished = gradients.finish(1.0)
            results = [gradients.contribution(range(c.index, c.index + 1)).clone() for c in gradients.chunks]
            gradients.adopt(finished.present, results)
            assert not finished.retracted
            model.zero_grad()
    torch.accelerator.synchronize()
