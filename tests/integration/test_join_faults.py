"""A state of real size is pulled from three members while one of them is killed, or a link is cut or slowed.

Run with -s for the figures, and with --times 50 --state-mb 132 to be sure, --moments 1, 2, ... for other moments.
"""

import random
import signal
import time
from pathlib import Path

import pytest
from overlay import HAS_NAMESPACES, overlay

from chaosnet.netem.netns import Netns
from chaosnet.netem.relay import RelayTestbed
from chaosnet.netem.topology import LinkSpec, mesh

WORKER = Path(__file__).with_name("large_worker.py")
MEMBERS, JOINER = ("n0", "n1", "n2"), "n3"
TRANSFER_S = 1.0  # What three links take for the state.
PATIENCE_S = 90.0

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


class Killed:
    """One of the sources, and started again afterwards."""

    @staticmethod
    def begin(run, source, spec):
        run.processes[source].send_signal(signal.SIGKILL)
        run.processes[source].wait(10)

    @staticmethod
    def end(run, source, spec):
        start(run, source)


class Cut:
    """The link to one of them, without a word to anybody."""

    @staticmethod
    def begin(run, source, spec):
        run.testbed.cut((source, JOINER))

    @staticmethod
    def end(run, source, spec):
        run.testbed.heal((source, JOINER))


class Slowed:
    """The same to a tenth."""

    @staticmethod
    def begin(run, source, spec):
        run.testbed.change({(source, JOINER): LinkSpec(rate_mbit=spec.rate_mbit / 10)})

    @staticmethod
    def end(run, source, spec):
        run.testbed.change({(source, JOINER): spec})


def start(run, node):
    """Until it is a member."""
    run.start(node, WORKER, CHAOSNET_NEIGHBORS="3")
    run.until_told(2, [node], PATIENCE_S)


def pulls(run):
    """How often the joiner has begun to pull the state."""
    return (run.folder / f"{JOINER}.err").read_text().count(f"{JOINER} starts to pull")


@pytest.mark.parametrize("fault", [Killed, Cut, Slowed], ids=lambda fault: fault.__name__.lower())
def test_a_join_goes_on_without_a_source(fault, tmp_path, monkeypatch, times, moments, state_mb):
    monkeypatch.setenv("CHAOSNET_TEST_LAYERS", str(state_mb // 6))
    spec = LinkSpec(rate_mbit=8 * state_mb / len(MEMBERS) / TRANSFER_S)
    topology, backend = mesh(4, spec), Netns if HAS_NAMESPACES else RelayTestbed
    rng = random.Random(f"{fault.__name__} {moments}")
    (tmp_path / "go").touch()
    with overlay(backend, topology, tmp_path, monkeypatch) as run:
        for node in MEMBERS:
            start(run, node)
        for number in range(times):
            run.start(JOINER, WORKER, CHAOSNET_NEIGHBORS="3")
            run.until(lambda: pulls(run), "the joiner pulls", PATIENCE_S)
            after_s, source = rng.uniform(0.0, 1.5), rng.choice(MEMBERS)
            time.sleep(after_s)
            had_joined = len(run.told(JOINER)) > 1
            fault.begin(run, source, spec)
            run.until_told(2, [JOINER], PATIENCE_S)
            joined = run.told(JOINER)[1]
            print(
                f"{number}: {source} after {after_s:.1f} s{' (too late)' * had_joined}: joined in "
                f"{joined['took_s']:.1f} s, pulled {pulls(run)} times, {joined['from']}"
            )
            if pulls(run) > 1:
                print((run.folder / f"{JOINER}.err").read_text())
            assert sum(joined["from"].values()) >= joined["bytes"] > 0.9e6 * state_mb, run.story()
            assert pulls(run) <= 2, run.story()  # Once more where it lacks results that nobody has kept.
            fault.end(run, source, spec)
            run.until_told(3, [JOINER], PATIENCE_S)
            run.processes[JOINER].send_signal(signal.SIGINT)
            assert run.processes[JOINER].wait(30) == 0, run.story()
        del run.processes[JOINER]
        run.stop()
