"""A small virtual cluster that a test steers step by step, and the messages that its nodes exchange."""

from chaosnet.protocols.messages import (
    EVERYONE,
    DialBack,
    DialBackReply,
    Envelope,
    LinkNews,
    Losses,
    Notice,
    Ping,
    Pong,
    Probe,
    ProbeRequest,
    ProbeResult,
    Report,
)
from chaosnet.simulator.cluster import SimCluster

MEASURING = (ProbeRequest, Probe, ProbeResult, DialBack, DialBackReply)
CHATTER = (Ping, Pong, Notice, LinkNews, Losses, Report, *MEASURING)  # Always there, of no event.
TRAINING = ("Up", "Down", "Ready", "Commit")


class Scripted(SimCluster):
    """`exchange` lists who said what to whom; a message that travels over several hops, or is flooded, once."""

    def __init__(self, seed=1, **kwargs):
        super().__init__(seed, chunks=2, record=True, **kwargs)
        self.max_delay_s, self.compute_s, self.retract_odds = 0.002, 0.1, 0.0
        self.state_bytes = 3 << 20
        self.exchange = []
        self.on_message = self._note

    def _note(self, sender, receiver, message):
        if isinstance(message, Envelope):
            if message.source != sender or isinstance(message.body, CHATTER):
                return
            target = "all" if message.target == EVERYONE else message.target
            said = (sender, target, type(message.body).__name__)
        elif isinstance(message, CHATTER):
            return
        else:
            said = (sender, receiver, type(message).__name__)
        if said not in self.exchange:
            self.exchange.append(said)

    def grow(self, *names):
        """Found a cluster and let the others join one by one."""
        self.add(names[0])
        for name in names[1:]:
            self.add(name, seeds=[names[0]], degree=len(names))
            self.settle()
        self.exchange.clear()
        return self

    def settle(self, seconds=2.0):
        self.run(self.now_s + seconds)

    def agent(self, name):
        return self.nodes[name].agent

    def members(self, name):
        return self.agent(name).sync.view.member_ids

    def control(self):
        """The exchange without training."""
        return [said for said in self.exchange if said[2] not in TRAINING]
