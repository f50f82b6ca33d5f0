"""What happens in a cluster, in words for people. `kind` is its name on the wire, for programs and traces."""

from __future__ import annotations

from typing import Protocol

SENTENCES = {
    "scheduler": "{node} is the scheduler now, {detail}",
    "scale-out": "{node} {detail}",
    "replication": "{node} {detail}",
    "joined": "{node} joins: {detail}",
    "scale-in": "{node} {detail}",
    "left": "{node} leaves: {detail}",
    "node-failure": "{node} is lost: {detail}",
    "expelled": "{node} is shut out: {detail}",
    "declared dead": "{node} is declared dead: {detail}",
    "unreachable": "{node} can only dial: {detail}",
    "connect-link": "{node} is to open: {detail}",
    "disconnect-link": "{node} is to close: {detail}",
    "link-refused": "{node} cannot be opened: {detail}",
    "link-up": "{node} opens: {detail}",
    "link-down": "{node} closes: {detail}",
    "link-failure": "{node} is lost: {detail}",
    "new-plan": "{node} chooses other trees: {detail}",
    "waits for": "all wait for {node}, {detail}",
    "waited for": "all waited for {node}, {detail}",
}
"""By kind. `node`: a node, several, or a link."""

OTHERS = "{kind} {node}: {detail}"  # Of a node whose chaosnet is newer.
STYLES = {
    "joined": "green", "link-up": "green", "left": "yellow", "link-down": "yellow", "expelled": "bold red",
    "node-failure": "bold red", "link-failure": "bold red", "declared dead": "bold red", "waits for": "yellow",
}  # fmt: skip


class Told(Protocol):
    """A notice, or a row of the status' events."""

    @property
    def kind(self) -> str: ...
    @property
    def node(self) -> str: ...
    @property
    def detail(self) -> str: ...


def sentence(event: Told) -> str:
    """What happened, e.g. "n3 joins: now 4 members, 5 links"."""
    node = f"the link {event.node}" if " - " in event.node else event.node
    told = SENTENCES.get(event.kind, OTHERS).format(kind=event.kind, node=node, detail=event.detail)
    return told if event.detail else told.rstrip(":, ")


def counted(count: int, noun: str) -> str:
    """ "1 link", "2 links"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def lasting(seconds: float) -> str:
    """A duration, to two digits or so: "300 ms", "8.1 s", "42 s", "3 min 20 s", "12 min", "1 h 05 min", "3 days"."""
    if 0 < seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes} min" + (f" {rest:02d} s" if rest else "")
    hours, rest = divmod(round(seconds / 60), 60)
    if hours < 1:
        return f"{rest} min"
    if hours < 10:
        return f"{hours} h" + (f" {rest:02d} min" if rest else "")
    return f"{seconds / 3600:.0f} h" if hours < 48 else f"{seconds / 86400:.0f} days"


def silent(nodes: int, seconds: float) -> str:
    """So many nodes that all wait for are not heard of."""
    return f"nothing has come from {'it' if nodes == 1 else 'them'} for {seconds:.0f} s"


def waiting(seconds: float, why: str) -> str:
    """What is said behind those whom all wait for. `why`: a sentence."""
    return f"{seconds:.0f} s so far: {why}"


def in_again(name: str, left_at: int, step: int) -> str:
    """A node has rejoined. `left_at`: the step that it had come to by itself."""
    missed = step - left_at
    told = f"{counted(missed, 'step')} went by without it"
    if missed < 0:
        told = f"{counted(-missed, 'step')} that it has made are undone, as the others went on from an earlier one"
    return f"{name} is in again at step {step}: {told}"


def printable(text: str) -> str:
    """What another machine has told, for a terminal: with blanks for what would change its colours, or worse."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else " " for each in text)
