"""Exchanges of a small virtual cluster as text: one line a message, for people to read.

Nothing here is drawn: every delay is the mean of what the simulator would draw from, and each node's generator
depends on its name only. So a text changes when the protocols do, and not when somebody draws once more.
"""

import random
from collections import Counter

import msgspec
from scripted import Scripted

from chaosnet.protocols.messages import (
    EVERYONE,
    Commit,
    Down,
    Echo,
    EchoReply,
    Envelope,
    Losses,
    Notice,
    Ping,
    Pong,
    Ready,
    Report,
    Up,
    View,
    ViewChange,
)

QUIET = (Ping, Pong, Echo, EchoReply, Notice, Report, Losses, Up, Down)  # Always there, and told elsewhere.
# Of fields: names for machines, and what comes with every message of its kind.
HIDDEN = {
    "life", "lives", "peer_life", "joined_step", "version", "digest", "addresses", "trees", "serial", "dataset",
    "graph", "index", "count", "shares",
}  # fmt: skip
PIECES = {"Shard", "ShardRequest", "Probe", "ProbeRequest", "ProbeResult", "Have"}
MANY = 6  # Of a list, shown.


class Means(random.Random):
    """Draws that are always the same."""

    def uniform(self, a, b):
        return (a + b) / 2

    def random(self):
        return 0.5

    def choice(self, seq):
        return seq[0]

    def randint(self, a, b):
        return a


class Recorded(Scripted):
    """`lines` is the text, from `record_from_here` on."""

    def __init__(self):
        super().__init__()
        self.rng = Means()
        self.lines, self.began_s = None, 0.0
        self.told_by = set()
        self.on_message = self._write

    def record_from_here(self):
        self.lines, self.began_s = [], self.now_s

    def _machine(self, name, life):
        node = super()._machine(name, life)
        node.agent.rng.seed(name)
        return node

    def _write(self, sender, receiver, message):
        body, to = message, receiver
        if isinstance(message, Envelope):
            body, to = message.body, "all" if message.target == EVERYONE else message.target
            if message.source != sender or (sender, message.serial) in self.told_by:
                return  # Passed on.
            self.told_by.add((sender, message.serial))
        if self.lines is not None and not isinstance(body, QUIET) and not is_usual(body):
            self._line(f"{sender:>3} -> {to:<4}", short(body))

    def _say(self, node, what):
        super()._say(node, what)
        if self.lines is not None and isinstance(what, str) and not what.startswith("EVENT"):
            self._line(f"{node:>3}        ", f"({what})")

    def _line(self, way, text):
        self.lines.append((self.now_s - self.began_s, way, text))

    def text(self):
        """Of pieces, of state and of probes, the first on a way is shown, and the others are counted."""
        rows, counts = [], Counter()
        for at_s, way, text in self.lines:
            kind = text.split()[0]
            counts[way, kind] += 1
            if kind not in PIECES or counts[way, kind] == 1:
                rows.append((at_s, way, kind, text))
        return "".join(
            f"{at_s:7.3f}  {way} {text}"
            + (f" (and {counts[way, kind] - 1} more)" if kind in PIECES else "")
            + "\n"
            for at_s, way, kind, text in rows
        ).replace(" (and 0 more)", "")


def is_usual(body):
    """A step as any other: nobody votes for another view, and none is switched to."""
    return (isinstance(body, Ready) and body.vote in (None, body.key)) or (
        isinstance(body, Commit) and body.switch is None
    )


def short(body):
    """Its kind, and what its fields say; those at their defaults, and those for machines only, are left out."""
    defaults = {each.name: each.default for each in msgspec.structs.fields(body)}
    fields = [
        f"{name}={plain(name, value)}"
        for name, value in msgspec.structs.asdict(body).items()
        if name not in HIDDEN and value != defaults[name] and value not in ((), {}, b"", "")
    ]
    return " ".join([type(body).__name__, *fields])


def plain(name, value):
    """A field as a person would write it."""
    match value:
        case View():
            names = [*value.member_ids, *(f"+{each}" for each in value.observer_ids)]
            return f"{value.term}.{value.seq}[{','.join(names)}]"
        case ViewChange():
            told = [each for each in short(value).split(" ")[1:] if not each.startswith(("term=", "seq="))]
            return f"{value.term}.{value.seq}({' '.join(told)})"
        case msgspec.Struct():
            return getattr(value, "id", None) or f"({short(value).partition(' ')[2]})"
        case (int(), int()) if name in ("key", "vote", "switch", "base", "before", "installed"):
            return f"{value[0]}.{value[1]}"
        case tuple() | list() | set() | frozenset():
            shown = [plain(name, each) for each in value][:MANY]
            return "[" + ",".join(shown) + (",..." if len(value) > MANY else "") + "]"
        case dict():
            return "{" + ", ".join(f"{key}: {plain(name, each)}" for key, each in value.items()) + "}"
        case bytes():
            return f"<{len(value)} bytes>"
        case float():
            return f"{value:.4g}"
        case str() if " " in value:
            return f'"{value}"'
    return str(value)
