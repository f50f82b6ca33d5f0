"""What lives of a cluster have come by: messages delivered, crashes at them, and what the cores went through.

A transition of a core is an assignment to its state, so that is what is watched: it costs nothing while nothing
changes. `EXPECTED` names all there is to come by; what was not reached is told by name.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from ..node.agent.core import Agent
from ..node.agent.recovery import StepRecovery
from ..protocols import asking, election, messages, scale_in
from ..protocols.connect_link import LinkOpener
from ..protocols.flush import FlushFollower
from ..protocols.healing import _LostLink
from ..scheduler.core import Scheduler

# Kinds that no simulated process sends: they are the transport's, or a client's.
UNPLAYED = {
    "Envelope",
    "Hello",
    "Bye",
    "Lend",
    "Mapped",
    "Laid",
    "Iperf3Ready",
    "StatusRequest",
    "StatusReply",
    "LeaveCommand",
    "GoOnCommand",
    "RelayoutCommand",
}
UNPLAYED |= {"KeyCommand", "KeyringNews", "Introduction"}  # The simulated network has no keys.
# What links with rates lead to.
TAKEN_BACK = "rates: chunks of an attempt that is over are taken back"
CHANGED = "rates: a link changes while bulk is under way"
OVERTAKEN = "rates: pieces of state overtake results"
TOO_MANY = "rates: results come faster than the state"
LONG_JOIN = "rates: a join takes a hundred steps"
NEW_TREES = "rates: the trees follow what links carry"
SEVERAL_LACKED = "rates: a flush brings a joiner the results of several steps"
OF_RATES = frozenset({TAKEN_BACK, CHANGED, OVERTAKEN, TOO_MANY, LONG_JOIN, NEW_TREES, SEVERAL_LACKED})

KINDS = frozenset(
    each.__name__ for union in (messages.WireMessage, messages.Routed) for each in typing.get_args(union)
) - UNPLAYED  # fmt: skip

IS_COMPILED = not inspect.getfile(inspect.getmodule(Agent)).endswith(".py")  # type: ignore[arg-type]

_WATCHED: dict[type, dict[str, str]] = {  # Core: attribute: what a value that is not an Enum stands for.
    Agent: {"phase": "", "parked": "parked"},
    StepRecovery: {"torn": "torn"},
    FlushFollower: {"flush": "frozen"},
    asking.Standing: {"state": ""},
    scale_in.Leaver: {"state": ""},
    election.Election: {"role": ""},
    Scheduler: {"flush": "flushing", "proposal": "proposing", "parked": "parked"},
    LinkOpener: {"view": "opening"},
    _LostLink: {"try_at_s": "looking", "requested": "asked for"},
}


def delivered(kind: str) -> str:
    return f"delivered: {kind}"


def crashed(end: str, kind: str) -> str:
    """`end`: sender or receiver."""
    return f"crash: {end} of {kind}"


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """The transitions of all cores in here; none of compiled ones (tests/compiled.py), which cannot be watched."""
    seen: set[str] = set()
    if IS_COMPILED:
        yield seen
        return
    for core, attributes in _WATCHED.items():
        core.__setattr__ = _noting(core, attributes, seen)  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        for core in _WATCHED:
            del core.__setattr__


def _noting(core: type, attributes: dict[str, str], seen: set[str]) -> Callable[[Any, str, Any], None]:
    plain, name_of = object.__setattr__, core.__name__.lstrip("_")

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name in attributes:
            before = getattr(self, name, value)
            if before is not value:
                old, new = _stands_for(before, attributes[name]), _stands_for(value, attributes[name])
                if old != new:
                    seen.add(f"{name_of}: {old} -> {new}")
        plain(self, name, value)

    return set_attribute


def _stands_for(value: Any, word: str) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return word if value else f"not {word}"


def _words(following: str) -> list[str]:
    """The states in a list of words; a state of several words stands alone."""
    return [following] if following.startswith(("not ", "asked for")) else following.split()


_LEADS_TO = {  # Every transition that the code allows, by core; "x" and "not x" for attributes that are set or not.
    "Agent": {
        "outside": "joining member",
        "joining": "member out",
        "member": "joining out",
        "not parked": "parked", "parked": "not parked",
    },
    "StepRecovery": {"not torn": "torn", "torn": "not torn"},
    "FlushFollower": {"not frozen": "frozen", "frozen": "not frozen"},
    "Standing": {
        "knocking": "asked failed joined",
        "asked": "linking fetching knocking failed",
        "linking": "waiting fetching asked knocking failed",
        "waiting": "fetching asked knocking failed",
        "fetching": "loading asked knocking failed",
        "loading": "ready asked knocking failed",
        "ready": "joined fetching asked knocking failed",
    },
    "Leaver": {"staying": "leaving left", "leaving": "left"},  # At once, if it is no member yet.
    "Election": {
        "follower": "trial elected",
        "trial": "candidate follower",
        "candidate": "elected follower trial",
        "elected": "follower",
    },
    "Scheduler": {
        "not flushing": "flushing", "flushing": "not flushing",
        "not proposing": "proposing", "proposing": "not proposing",
        "not parked": "parked", "parked": "not parked",
    },
    "LinkOpener": {"not opening": "opening", "opening": "not opening"},
    "LostLink": {
        "looking": "not looking",
        "not asked for": "asked for", "asked for": "not asked for",
    },
}  # fmt: skip

TRANSITIONS = frozenset(
    f"{core}: {old} -> {new}"
    for core, leads_to in _LEADS_TO.items()
    for old, following in leads_to.items()
    for new in _words(following)
)


def expected(aims: Iterable[str], tensors: bool = False) -> set[str]:
    """All that random lives should come by if crashes are aimed at these kinds of messages.

    `tensors`: in lives in which nodes need each other's tensors.
    """
    of_tensors = {"Tensor"} if tensors else set[str]()
    ends = {crashed(end, kind) for kind in {*aims} | of_tensors for end in ("sender", "receiver")}
    kinds = KINDS - {"Tensor"} | of_tensors
    return {delivered(kind) for kind in kinds} | ends | OF_RATES | (set() if IS_COMPILED else TRANSITIONS)
