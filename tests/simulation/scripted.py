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
from chaosnet.simulator.stories import ScriptedCluster

MEASURING = (ProbeRequest, Probe, ProbeResult, DialBack, DialBackReply)
CHATTER = (Ping, Pong, Notice, LinkNews, Losses, Report, *MEASURING)  # Always there, of no event.
TRAINING = ("Up", "Down", "Ready", "Commit")


class Scripted(ScriptedCluster):
    """`exchange` lists who said what to whom; a message that travels over several hops, or is flooded, once."""

    def __init__(self, seed=1, **kwargs):
        super().__init__(seed, **kwargs)
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
        super().grow(*names)
        self.exchange.clear()
        return self

    def control(self):
        """The exchange without training."""
        return [said for said in self.exchange if said[2] not in TRAINING]
