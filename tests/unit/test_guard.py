"""What the guard thinks of gradients, and what becomes of parts and results that are not finite."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from chaosnet.node.loop import NodeLoop
from chaosnet.node.sums.all_reduce import AllReduce
from chaosnet.node.sums.compression import Exact
from chaosnet.node.sums.gradients import Gradients
from chaosnet.protocols.effects import Accumulate, AdoptChunks
from chaosnet.training.guard import EVICT_AFTER, LEARNS_FROM, MEMORY, Guard


def used_to(norm, policy="skip", factor=10.0):
    guard = Guard(policy, factor)
    for _ in range(LEARNS_FROM):
        assert guard.judge(norm).action == "pass"
    return guard


@pytest.mark.parametrize("norm", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["skip", "clip"])
def test_what_is_not_finite_never_counts(policy, norm):
    assert Guard(policy, 10.0).judge(norm).action == "skip"


def test_a_norm_far_above_the_usual_is_skipped_or_clipped_to_the_limit():
    assert used_to(2.0).judge(20.0).action == "pass"
    verdict = used_to(2.0).judge(21.0)
    assert (verdict.action, verdict.reason) == ("skip", "its gradient has norm 21 (limit 20)")
    clipped = used_to(2.0, "clip").judge(40.0)
    assert (clipped.action, clipped.scale) == ("clip", 0.5)


def test_at_first_any_finite_norm_will_do():
    guard = Guard("skip", 10.0)
    assert [guard.judge(norm).action for norm in (1e-6, 1e6, 0.0)] == ["pass"] * 3


def test_the_third_in_a_row_puts_the_node_out():
    guard = used_to(1.0, "evict")
    assert [guard.judge(math.nan).action for _ in range(EVICT_AFTER)] == ["skip", "skip", "evict"]
    guard = used_to(1.0, "evict")
    for _ in range(5):
        assert guard.judge(math.nan).action == guard.judge(math.nan).action == "skip"
        assert guard.judge(1.0).action == "pass"


def test_what_is_refused_for_another_reason_is_one_in_the_row():
    guard = used_to(1.0, "evict")
    verdicts = [guard.refuse("it is spoilt"), guard.judge(math.nan), guard.refuse("it is spoilt")]
    assert [verdict.action for verdict in verdicts] == ["skip", "skip", "evict"]
    assert verdicts[2].reason == "it is spoilt, the 3rd time in a row"
    assert used_to(1.0, "clip").refuse("it is spoilt").action == "skip"


def test_what_grows_for_good_becomes_usual():
    guard = used_to(1.0)
    actions = [guard.judge(1000.0).action for _ in range(4 * MEMORY)]
    assert actions[0] == "skip" and actions[-1] == "pass"


def test_gradients_of_zero_make_no_limit_of_zero():
    assert used_to(0.0).judge(1.0).action == "pass"


# --- a child's part ---


def all_reduce(guarded):
    lanes = [SimpleNamespace(op="mean"), SimpleNamespace(op="max")]
    own = [torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(4)]  # The last two are of buffers.
    store = SimpleNamespace(
        lanes=lanes,
        chunks=[SimpleNamespace(lane=lane, is_gradient=not number) for number, lane in enumerate((0, 1, 0))],
        contribution=lambda chunks: own[chunks.start],
        encoding=lambda chunk: Exact(own[chunk].numpy().dtype),
        stays=False,
    )
    return AllReduce(store, lambda *args, **kwargs: True, guarded)


def frame(*values, dtype=np.float32):
    return SimpleNamespace(buffer=memoryview(bytearray(np.array(values, dtype).tobytes())))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_childs_part_that_is_not_finite_counts_as_zeros(bad):
    reduce = all_reduce(guarded=True)
    reduce.perform(Accumulate(range(1), frame(1, bad, 3, 4), 0))
    reduce.perform(Accumulate(range(1), frame(1, 2, 3, 4), 1))
    assert reduce._sum(range(1), own=True).tolist() == [2, 3, 4, 5]
    assert reduce.counters["guard_dropped_parts"] == 1


def test_finite_parts_count_however_large_their_sum():
    reduce = all_reduce(guarded=True)
    reduce.perform(Accumulate(range(1), frame(3e38, 3e38, -3e38, -3e38), 0))
    reduce.perform(Accumulate(range(1, 2), frame(1, 2, 3, 4, dtype=np.int64), 0))
    assert reduce.counters["guard_dropped_parts"] == 0
    assert reduce._sum(range(1), own=False).tolist() == pytest.approx([3e38, 3e38, -3e38, -3e38])


def test_without_a_guard_nothing_is_looked_at():
    reduce = all_reduce(guarded=False)
    reduce.perform(Accumulate(range(1), frame(1, math.nan, 3, 4), 0))
    assert reduce.counters["guard_dropped_parts"] == 0 and np.isnan(reduce._sum(range(1), own=True)).any()


def test_a_childs_part_of_a_buffer_counts_as_it_is():
    """Zeros with its weight would pull everybody's running averages towards zero."""
    reduce = all_reduce(guarded=True)
    reduce.perform(Accumulate(range(2, 3), frame(100, -math.inf, 100, 100), 0))
    assert reduce._sum(range(2, 3), own=True).tolist() == [101, -math.inf, 101, 101]
    assert reduce.counters["guard_dropped_parts"] == 0


@pytest.mark.parametrize(("chunk", "refused"), [(0, True), (2, False)])
def test_only_a_gradient_that_is_not_finite_is_a_reason_to_refuse_results(chunk, refused):
    """A buffer may hold infinity on purpose, as a causal mask does."""
    reduce = all_reduce(guarded=True)
    reduce.perform(AdoptChunks(0, range(chunk, chunk + 1), frame(1, -math.inf, 3, 4)))
    assert reduce._is_refused(0) is refused


def test_a_node_that_comes_back_is_as_guarded_as_before():
    store = SimpleNamespace(lanes=[], chunks=[], contribution=None)
    loop = NodeLoop(lambda *args: None, lambda loop: None, store, guarded=True)
    loop.transport, loop._tests, loop._addresses = SimpleNamespace(send_bulk=None), None, ()
    for life in range(2):
        loop._begin_life(life)
        assert loop.all_reduce.guarded and loop.all_reduce.counters is loop.counters


# --- what a bad batch leaves in the model ---


def test_buffers_go_back_to_what_all_agreed_on():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    model(torch.randn(8, 3))
    gradients = Gradients(model)
    gradients.rebase()
    agreed = [buffer.clone() for buffer in model.buffers()]
    model(torch.full((8, 3), math.nan))
    assert model[0].running_mean.isnan().all()
    gradients.revert_buffers()
    assert all(map(torch.equal, agreed, model.buffers()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_buffer_is_spoilt_by_a_number_that_was_finite_when_all_agreed(bad):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(3, dtype=torch.double))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    gradients = Gradients(model)
    model.mask[1] = bad  # As infinite as it was on purpose.
    model[1].running_mean += 1
    assert gradients.spoilt() is None
    model[1].running_var[2] = bad
    assert gradients.spoilt() == "1.running_var"
    gradients.revert_buffers()
    assert gradients.spoilt() is None


def test_nothing_leaves_during_backward_once_it_is_to_be_judged_first():
    gone = []
    model = nn.Linear(3, 2)
    gradients = Gradients(model, on_chunks_ready=gone.extend)
    gradients.judge_first()
    gradients.arm(4.0)
    model(torch.ones(1, 3)).sum().backward()
    assert gone == [] and gradients.finish(4.0).chunks == [0]
