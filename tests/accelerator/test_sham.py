"""The sham device punishes what it is there to punish: else nothing that passes on it would mean anything."""

import pytest
import sham
import torch

from chaosnet.node.devices import Crossing

pytestmark = pytest.mark.usefixtures("only_sham")


def test_its_tensors_are_no_operands_of_the_cpus_and_have_no_numpy(device):
    here = torch.ones(3, device=device)
    for other in (torch.ones(3), torch.ones(3, device="sham:1")):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
    with pytest.raises(TypeError, match="sham"):
        here.numpy()
    assert (here * torch.tensor(2.0)).tolist() == [2.0] * 3  # A number may be the CPU's.


@pytest.mark.parametrize("waits_for", ["the stream", "an event", "the device"])
def test_a_copy_to_the_host_is_garbage_until_somebody_waits(device, waits_for):
    target = torch.zeros(4, pin_memory=True)
    target.copy_(torch.ones(4, device=device), non_blocking=True)
    assert target.isnan().all()
    stream = torch.accelerator.current_stream(device)
    {
        "the stream": stream.synchronize,
        "an event": stream.record_event().synchronize,
        "the device": torch.accelerator.synchronize,
    }[waits_for]()
    assert target.tolist() == [1.0] * 4


def test_an_event_recorded_before_a_copy_says_nothing_of_it(device):
    target = torch.zeros(4, pin_memory=True)
    early = torch.accelerator.current_stream(device).record_event()
    target.copy_(torch.ones(4, device=device), non_blocking=True)
    early.synchronize()
    assert target.isnan().all()


def test_a_stream_that_has_not_waited_may_neither_read_nor_write(device):
    values, side = torch.ones(4, device=device), torch.Stream(device=device)
    with side, pytest.raises(RuntimeError, match="has not waited for what stream 0 of sham:0 writes"):
        values + 1
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        more = values + 1
    with pytest.raises(RuntimeError, match="may still be reading"):
        values.zero_()
    torch.accelerator.current_stream(device).wait_stream(side)
    values.zero_()
    assert more.tolist() == [2.0] * 4
    assert len(sham.complaints()) == 2


def test_pinned_memory_must_stay_as_it_is_until_it_is_copied(device):
    source = torch.ones(4, pin_memory=True)
    there = source.to(device, non_blocking=True)
    source.zero_()
    assert there.tolist() == [1.0] * 4
    assert "pinned memory was changed" in sham.complaints()[0]


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_may_go_only_when_no_other_stream_uses_it(device, recorded):
    values, side = torch.ones(4, device=device), torch.Stream(device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        more = values + 1
    if recorded:
        values.record_stream(side)
    del values
    told = [text for text in sham.complaints() if "was freed" in text]
    assert bool(told) != recorded and all(_name(side) in text for text in told)
    assert more.is_sham


def _name(stream):
    return f"stream {stream.stream_id} of sham:0"


def test_each_device_draws_from_a_generator_of_its_own(device):
    draws = {}
    for index in range(2):
        torch.manual_seed(index)
        before = torch.get_rng_state()
        draws[index] = torch.rand(3, device=f"sham:{index}").tolist()
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    torch.rand(3, device="sham:0")
    assert torch.rand(3, device="sham:1").tolist() == draws[1] != draws[0]


def test_crossing_is_told_of_what_it_does_not_wait_for(device):
    crossing, target = Crossing([device]), torch.zeros(4, pin_memory=True)
    crossing.send(target, [torch.ones(4, device=device)], 3.0, watched=False)
    assert target.isnan().all()
    crossing.wait()
    crossing.close()
    assert target.tolist() == [3.0] * 4
