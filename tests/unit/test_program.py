"""Compiled programs of thousands of random plans: all is done once, in order, whatever order messages come in."""

import random
from collections import Counter, defaultdict

import pytest

from chaosnet.protocols.errors import PlanInfeasible
from chaosnet.scheduler.elastic.plan import Pipeline, Plan, cuts_of, of_pipelines, without
from chaosnet.scheduler.elastic.program import Op, Unit, compile_plan, in_flight_bounds

PLANS = 2000


def random_plan(rng: random.Random) -> Plan:
    """Pipelines of any length and any split, some of their workers lost; both ways to go on."""
    layers = rng.randint(2, 9)
    pipelines = []
    for number in range(rng.randint(1, 4)):
        stages = rng.randint(1, min(4, layers))
        cuts = (0, *sorted(rng.sample(range(1, layers), stages - 1)), layers)
        pipelines.append(Pipeline(tuple(f"p{number}s{s}" for s in range(stages)), cuts))
    counts = [rng.randint(1, 5) for _ in pipelines]
    samples = rng.randint(1, 4)
    workers = [worker for each in pipelines for worker in each.workers]
    lost = set(rng.sample(workers, rng.randint(0, min(3, len(workers) - 1))))
    try:
        return without(pipelines, counts, samples, lost, resize=rng.random() < 0.5)
    except PlanInfeasible:  # Nobody holds a layer, or a detour goes in a circle.
        return of_pipelines(pipelines, counts, samples)


class RandomCosts(Unit):
    def __init__(self, rng):
        self.rng = rng

    def compute_s(self, worker, op, start, stop, samples):
        return self.rng.choice([0.0, 0.5, 1.0, 3.0]) * (stop - start)

    def transfer_s(self, source, to, boundary, samples):
        return self.rng.choice([0.0, 0.0, 0.3, 5.0])


def random_program(seed):
    rng = random.Random(seed)
    plan = random_plan(rng)
    options = {"split_backward": rng.random() < 0.5, "more_in_flight": rng.randint(0, 2)}
    return compile_plan(plan, RandomCosts(rng), **options), options, rng


def execute(program, rng):
    """Any worker that can go on goes on, in any order; messages wait for as long as they like."""
    at = dict.fromkeys(program.instructions, 0)
    came, at_bucket = set(), defaultdict(set)
    buckets = {
        (worker, (bucket.start, bucket.stop)): bucket
        for each in program.plan.sync for bucket in each for worker in bucket.holders
    }  # fmt: skip
    while able := [worker for worker, lines in program.instructions.items() if at[worker] < len(lines)]:
        rng.shuffle(able)
        moved = False
        for worker in able:
            line = program.instructions[worker][at[worker]]
            if line.op is Op.RECV and (worker, line.tag) not in came:
                continue
            if line.op is Op.REDUCE:
                bucket = buckets[worker, line.layers]
                at_bucket[bucket].add(worker)
                if at_bucket[bucket] != {*bucket.holders}:
                    continue
            if line.op is Op.SEND:
                assert (line.peer, line.tag) not in came, "sent twice"
                came.add((line.peer, line.tag))
            at[worker] += 1
            moved = True
        assert moved, {worker: program.instructions[worker][at[worker]] for worker in able}


@pytest.mark.parametrize("part", range(4))
def test_programs_end_in_any_order_of_messages(part):
    for seed in range(part, PLANS, 4):
        program, _, rng = random_program(seed)
        execute(program, rng)


def test_every_send_has_its_receive():
    for seed in range(PLANS):
        program, _, _ = random_program(seed)
        sent, received = Counter(), Counter()
        for worker, lines in program.instructions.items():
            sent.update((worker, line.peer, line.tag) for line in lines if line.op is Op.SEND)
            received.update((line.peer, worker, line.tag) for line in lines if line.op is Op.RECV)
        assert sent == received and max(sent.values(), default=1) == 1


def test_each_micro_batch_goes_through_each_layer_once_forward_then_backward():
    for seed in range(PLANS):
        program, options, _ = random_program(seed)
        last = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT} if options["split_backward"] else {Op.BACKWARD}
        done = defaultdict(list)
        for lines in program.instructions.values():
            for line in lines:
                if line.op in {Op.FORWARD, *last}:
                    for number in line.micro_batches:
                        for layer in range(*line.layers):
                            done[number, layer].append(line.op)
        expected = 1 + len(last)
        assert len(done) == len(program.plan.micro_batches) * program.plan.layers
        assert all(ops[0] is Op.FORWARD and len({*ops}) == len(ops) == expected for ops in done.values())


def test_forwards_in_flight_stay_within_their_bound():
    for seed in range(PLANS):
        program, options, _ = random_program(seed)
        bounds = in_flight_bounds(program.plan)
        released = Op.BACKWARD_WEIGHT if options["split_backward"] else Op.BACKWARD
        for worker, lines in program.instructions.items():
            now = most = 0
            for line in lines:
                now += (line.op is Op.FORWARD) - (line.op is released)
                most = max(most, now)
            assert now == 0 and most <= bounds.get(worker, 0) + options["more_in_flight"]


def test_a_plain_pipeline_runs_one_forward_one_backward():
    plan = of_pipelines([Pipeline(("a", "b"), (0, 1, 2))], [3], 1)
    lines = compile_plan(plan).instructions
    told = {w: "".join(x.op.value[0] for x in lines[w] if x.op in (Op.FORWARD, Op.BACKWARD)) for w in "ab"}
    assert told == {"a": "ffbfbb", "b": "fbfbfb"}


def test_a_step_ends_with_sums_the_optimizer_and_a_snapshot():
    pipelines = [Pipeline(("a", "b"), (0, 1, 2)), Pipeline(("c",), (0, 2))]
    program = compile_plan(of_pipelines(pipelines, [1, 1], 1), snapshot=True)
    ends = {worker: [line.op.value for line in lines][-4:] for worker, lines in program.instructions.items()}
    assert ends["c"] == ["reduce", "reduce", "step", "snapshot"]
    assert ends["a"][-3:] == ends["b"][-3:] == ["reduce", "step", "snapshot"]


def test_what_is_lost_from_a_stage_of_two_workers_passes_through_both():
    pipelines = [Pipeline(("a", "b", "c"), (0, 2, 4, 6)), Pipeline(("d", "e"), (0, 3, 6))]
    plan = without(pipelines, [2, 2], 1, {"b"}, resize=False)
    detours = {tuple(hop.worker for hop in each.route) for each in plan.micro_batches}
    assert detours == {("a", "d", "e", "c"), ("d", "e")}


def test_cuts_are_sums():
    assert cuts_of((2, 2, 2, 3)) == (0, 2, 4, 6, 9)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "costs", [(3, 2, 2, 2), (4, 2, 2, 2), (5, 4, 4, 4), (3, 2, 2, 2, 2, 2), (2, 3, 2, 2)]
)
def test_a_slow_first_stage_is_not_starved(costs, ahead):
    """Where backwards always come first, it is idle for up to a third of the step."""

    class Stages(Unit):
        def compute_s(self, worker, op, start, stop, samples):
            return super().compute_s(worker, op, start, stop, samples) * costs[start]

    count = 16
    stages = len(costs)
    pipeline = Pipeline(tuple(f"w{number}" for number in range(stages)), tuple(range(stages + 1)))
    program = compile_plan(of_pipelines([pipeline], [count], 1), Stages(), more_in_flight=ahead)
    slowest = costs.index(max(costs))
    least = 3 * (
        count * costs[slowest] + sum(costs[:slowest])
    )  # It is never idle, and the others never late.
    assert program.computed_s <= 1.12 * least
