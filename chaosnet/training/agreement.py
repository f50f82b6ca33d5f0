"""Do all replicas hold the same training state? Compares, names what differs first and on which node.

    before step s:  every node hashes its settings, and a window of its state, into its contribution
    commit of s:    all see the same sums of who has which hash
    step s+1:       where hashes differed, every node says what was behind its own
    commit of s+1:  all name the same first difference: a Verdict

The majority is right; in a tie the side of the most senior member is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from ..node.outcomes import StepOutcome
from ..node.session import Session
from ..node.state.optimizer_loading import EXECUTION
from ..node.state.state_window import EVERY, Averaged, StateWindow, Window
from ..node.state.training_state import TrainingState
from ..protocols.messages import Contribution, Side, Sides

MAX_HEALS = 3  # Of one node, for one thing: what comes back every time is in its script.
HEALS_COUNT_STEPS = 1000  # For so long; all of the state is compared several times meanwhile.
MAX_ITEMS, MAX_TEXT = 1024, 200
MOST_LEAVES = 64  # Of extra_state, compared at every step; larger ones every so often.
KINDS = SETTINGS, FLAGS, EXTRA, STATE = "settings", "requires_grad", "extra_state", "state"
SCHEDULED = ("['lr']", "['momentum']", "['betas']")  # What torch's schedules change; not initial_lr.
MOST_TOLD = 3  # Settings that loading has replaced.
PLAIN = {int, float, bool, str, tuple, type(None)}
ADVICE = {
    "optimizer.param_groups": (
        "Something sets it on each node by itself, often from a count that a node which joined later does not have: "
        "give the schedule to Trainer(lr_scheduler=...), e.g. as a LambdaLR, which takes any function of the step"
    ),
    "lr_scheduler": "Only update() may step a scheduler: delete the line that does it, too",
    "requires_grad": (
        "Freeze by what every node can see whenever it comes in: `if trainer.step >= 30` before forward, not `== 30`"
    ),
    "extra_state": (
        "It is training state, equal on all nodes: change it in Trainer(after_step=...), which a joiner runs, too, "
        "and keep out of it what belongs to one node"
    ),
    "": (
        "Something changes it on one node outside of update(): do that in Trainer(after_step=...), which all nodes "
        "and every joiner run"
    ),
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """What differs, the same on every node. `here`: is this node one of those that differ from the majority?"""

    kind: str
    item: str
    sentence: str
    here: bool

    @property
    def key(self) -> str:
        """By what the same difference is known, if it comes again."""
        return self.kind if self.kind == STATE else self.item


@dataclass(slots=True)
class _Record:
    """What this node has told, and the values behind it."""

    round: int
    step: int
    digest: str
    items: Callable[[], Sequence[tuple[str, str]]]


class Agreement:
    """One node's part in the comparison; its methods are for the training thread, between two steps."""

    def __init__(
        self, state: TrainingState, averaged: Averaged, me: str, policy: str, window: Window | None = None
    ) -> None:
        self._state, self._me, self._policy = state, me, policy
        self.window = window or StateWindow(state, averaged)
        self._parameters = list(state.model.parameters())
        self._names = [name for name, _ in state.model.named_parameters()]
        self._keys: list[tuple[str, ...]] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []
        self._values_digest = ""
        self._settled: tuple[str, Callable[[], list[tuple[str, str]]]] | None = None  # After the last step.
        self._flags: list[bool] = []
        self._flags_digest = ""
        self._records: dict[str, _Record] = {}
        self._accounted: dict[str, _Record] = {}  # Those of the step before that the others hear more of.
        self._said: dict[str, dict[str, Side]] = {}
        self._open: set[str] = set()  # Differed in the last step.
        self._warned: set[str] = set()
        self._arithmetics: set[str] = set()  # That somebody has been told of.

    def forget(self) -> None:
        """The state was replaced: what was told of the one before is void."""
        self._records.clear()
        self._accounted.clear()
        self._open.clear()
        self._settled = None
        self.window.forget()

    def settle(self) -> None:
        """A step is over: until the next one, settings should stay what they are now."""
        self._settled = self._settings()

    def set_by_script(self) -> str:
        """What to tell people of a setting that the script has changed since; "" if it has not."""
        before, now = self._settled, self._settings()
        if before is None or before[0] == now[0]:
            return ""
        name, (old, new) = first_difference([before[1](), now[1]()]) or ("a setting", ["?", "?"])
        return (
            f"{name} was {old} after the last step, and the script has made it {new}: a node that joins takes part "
            "in steps before its own script does so, and then all stop, as replicas differ; give the schedule to "
            "Trainer(lr_scheduler=...), e.g. as a LambdaLR, or set it in Trainer(after_step=...)"
        )

    def replaced_settings(self, before: dict[str, str]) -> str:
        """For people: which of these `fixed_settings` a loaded state has replaced; "" if none."""
        others = [
            (name, text, before[name])
            for name, text in self.fixed_settings().items()
            if before.get(name, text) != text
        ]
        said = [f"{name} is {text} (this script: {own})" for name, text, own in others[:MOST_TOLD]]
        if len(others) > MOST_TOLD:
            said.append(f"and {len(others) - MOST_TOLD} more")
        return f"settings of the state that was loaded are used: {', '.join(said)}" if said else ""

    def fixed_settings(self) -> dict[str, str]:
        """The optimizer's numbers, by name, without those that a schedule changes."""
        moving = () if self._state.lr_scheduler is None else SCHEDULED
        return {
            name: text for name, text in self._settings()[1]() if not name.endswith((*moving, "last_epoch"))
        }

    # --- before a step ---

    def tell(self, round: int, step: int, trained: bool, evaluating: bool = False) -> tuple[Sides, Sides]:
        """Digests and accounts for this node's contribution.

        Args:
            trained: It has samples in this step.
            evaluating: Its script may have put in, for as long as that takes, what an evaluation needs: an optimizer
                without a schedule has other weights then. Others may wait with those that they train.
        """
        accounts = self._accounts(round)
        self._records.clear()
        if evaluating:
            return {}, accounts
        self._note(SETTINGS, round, step, *self._settings())
        if trained:  # Who had none may not have come to where the script freezes.
            self._note(FLAGS, round, step, *self._requires_grad())
        if self._state.extra_state is not None:
            leaves = _leaves(self._state.extra_state, MOST_LEAVES if step % EVERY else None)
            if leaves is not None:
                self._note(
                    EXTRA, round, step, _digest(leaves), lambda: [(name, repr(v)) for name, v in leaves]
                )
        # By steps of the model: rounds of an evaluation, in which nobody tells anything, must not take one's turn.
        if reading := self.window.read(step):
            self._note(reading.kind, round, step, reading.digest, lambda: reading.pieces)
        return {kind: self._side(kind, record.digest) for kind, record in self._records.items()}, accounts

    def _side(self, kind: str, digest: str) -> dict[str, Side]:
        """This node's entry for `kind`, made only once for as long as its digest stays the same."""
        side = self._said.get(kind)
        if side is None or digest not in side:
            side = {digest: Side(nodes=1, names=(self._me,))}
            if kind in KINDS:
                self._said[kind] = side
        return side

    def _note(
        self, kind: str, round: int, step: int, digest: str, items: Callable[[], Sequence[tuple[str, str]]]
    ) -> None:
        self._records[kind] = _Record(round, step, digest, items)

    def _accounts(self, round: int) -> Sides:
        if not self._open:
            self._accounted = {}
            return {}
        before = {kind: record for kind, record in self._records.items() if record.round == round - 1}
        self._accounted = {kind: before[kind] for kind in sorted(self._open & before.keys())}
        return {
            kind: {record.digest: Side(nodes=1, names=(self._me,), items=_bounded(record.items()))}
            for kind, record in self._accounted.items()
        }

    # --- after it ---

    def judge(self, total: Contribution, step: int, order: Sequence[str]) -> Divergence | None:
        """What the cluster's sums say after a step.

        Args:
            step: Completed before it.
            order: The members, the most senior first.
        """
        verdict = None
        if not total.accounts and not self._open and all(len(sides) == 1 for sides in total.digests.values()):
            return None
        for kind in sorted(total.accounts, key=_rank):
            verdict = self._verdict(kind, total.accounts[kind], step - 1, order)
            if verdict is not None:
                break
        self._open = {
            kind
            for kind, sides in total.digests.items()
            if len(sides) > 1 and kind.split(" ")[0] not in self._warned
        }
        if verdict is not None:
            self._open.clear()  # It goes on differing until something has been done about it.
            if self._policy == "warn":
                self._warned.add(verdict.kind)
        elif self._policy == "warn":  # Who came after the others were warned is alone in telling more.
            alone = (kind for kind in self._accounted if len(total.accounts.get(kind, ())) < 2)
            self._warned.update(kind.split(" ")[0] for kind in alone)
            self._open = {kind for kind in self._open if kind.split(" ")[0] not in self._warned}
        return verdict

    def mixed(self, total: Contribution) -> str | None:
        """A sentence for people if nodes of several kinds took part in a step; None if none did, or it was told."""
        nodes: dict[str, list[Side]] = {}
        for kind, sides in total.digests.items():
            base, *arithmetic = kind.split(" ")
            if base == STATE:
                nodes.setdefault(arithmetic[0], []).extend(sides.values())
        if len(nodes) < 2 or nodes.keys() <= self._arithmetics:
            return None
        self._arithmetics |= nodes.keys()
        who = ", ".join(f"{_who(sides)}: {arithmetic}" for arithmetic, sides in sorted(nodes.items()))
        return (
            f"nodes that may round differently train together ({who}): only those alike compare their tensors"
        )

    def _verdict(
        self, kind: str, sides: dict[str, Side], step: int, order: Sequence[str]
    ) -> Divergence | None:
        base = kind.split(" ")[0]
        if len(sides) < 2 or base in self._warned:
            return None
        right = _right_side(sides, order)
        rank = sorted(sides, key=lambda digest: (digest != right, -sides[digest].nodes, digest))
        found = first_difference([sides[digest].items for digest in rank])
        if found is None:
            return None
        name, values = found
        by_value: dict[str, list[Side]] = {}
        for digest, value in zip(rank, values, strict=True):
            by_value.setdefault(value, []).append(sides[digest])
        said = [(value, _who(by_value[value])) for value in reversed(by_value)]
        mine = self._accounted.get(kind)
        if base == STATE:
            text = f"is not the same on {' or '.join(who for _, who in said[:-1])} as on {said[-1][1]}"
        else:
            text = "is " + ", ".join(f"{value} on {who}" for value, who in said)
        after = mine.step if mine else step
        sentence = f"replicas differ after step {after}: {name} {text}. {_advice(name)}"
        return Divergence(base, name, sentence, mine is not None and mine.digest != right)

    # --- what is compared ---

    def _settings(self) -> tuple[str, Callable[[], list[tuple[str, str]]]]:
        """All of the optimizer's numbers, and how far the LR scheduler is."""
        groups = self._state.optimizer.param_groups
        try:
            values = self._values_of(groups)
        except KeyError:
            self._sizes = []
            values = self._values_of(groups)
        if values != self._values or not self._values_digest:
            self._values, self._values_digest = values, _digest(map(_plain, values))
        keys = self._keys

        def items() -> list[tuple[str, str]]:
            names = [
                f"optimizer.param_groups[{number}][{key!r}]"
                for number, group in enumerate(keys)
                for key in group
            ]
            names = [name.replace("['params']", "['params'] (their number)") for name in names]
            names.append("lr_scheduler.last_epoch")
            return [(name, repr(_plain(value))) for name, value in zip(names, values, strict=True)]

        return self._values_digest, items

    def _values_of(self, groups: list[dict[str, Any]]) -> list[Any]:
        if self._sizes != list(map(len, groups)):
            self._sizes = list(map(len, groups))
            self._keys = [tuple(sorted(group.keys() - EXECUTION, key=_lr_first)) for group in groups]
        values: list[Any] = []
        for keys, group in zip(self._keys, groups, strict=True):
            for key in keys:
                value = group[key]
                values.append(value if type(value) in PLAIN else _read(key, value))
        values.append(getattr(self._state.lr_scheduler, "last_epoch", None))
        return values

    def _requires_grad(self) -> tuple[str, Callable[[], list[tuple[str, str]]]]:
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            self._flags, self._flags_digest = flags, xxhash.xxh3_64_hexdigest(bytes(flags))

        def items() -> list[tuple[str, str]]:
            names = [f"requires_grad of {name!r}" for name in self._names]
            return [(name, str(flag)) for name, flag in zip(names, flags, strict=True)]

        return self._flags_digest, items


def judged(agreement: Agreement, outcome: StepOutcome, step: int, session: Session) -> Divergence | None:
    """What the cluster's sums say after a step: all see the same, so all find the same. `step`: as of `judge`."""
    total = outcome.commit.total
    if mixed := agreement.mixed(total):
        session.say(mixed)
    verdict = agreement.judge(total, step, [name for name, _ in outcome.deal])
    if verdict is not None:
        session.counters["replicas_differ"] += 1
    return verdict


def _read(key: str, value: Any) -> Any:
    if key == "params":
        return len(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return None  # It is in the window: looking at it here would wait for the device.
    return _plain(value)


def first_difference(sides: Sequence[Sequence[tuple[str, str]]]) -> tuple[str, list[str]] | None:
    """The first item, in the order of the first side, that is not alike on all; its values there."""
    by_name = [dict(items) for items in sides]
    names = dict.fromkeys(name for items in sides for name, _ in items)
    for name in names:
        values = [items.get(name, "absent") for items in by_name]
        if len(set(values)) > 1:
            return name, values
    return None


def _right_side(sides: dict[str, Side], order: Sequence[str]) -> str:
    """The digest that most nodes have; in a tie, that of the most senior node."""
    place = {name: index for index, name in enumerate(order)}

    def rank(digest: str) -> tuple[int, int, str]:
        side = sides[digest]
        return -side.nodes, min((place.get(name, len(order)) for name in side.names), default=0), digest

    return min(sides, key=rank)


def _who(sides: Sequence[Side]) -> str:
    """Names of nodes, as "n0, n1 and 3 more"."""
    names, nodes = sorted(name for side in sides for name in side.names), sum(side.nodes for side in sides)
    shown = names if nodes <= 3 else names[:2]
    if nodes > len(shown):
        return f"{', '.join(shown)} and {nodes - len(shown)} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def _advice(name: str) -> str:
    return next(text for start, text in ADVICE.items() if name.startswith(start))


def _rank(kind: str) -> tuple[int, str]:
    """The order of kinds: a cause comes before its effects."""
    base = kind.split(" ")[0]
    return KINDS.index(base) if base in KINDS else len(KINDS), kind


def _lr_first(key: str) -> tuple[bool, str]:
    return key != "lr", key


def _plain(value: Any) -> Any:
    """The value as text: the same for equal numbers, and for lists and tuples, as loading may change their types."""
    if isinstance(value, bool | int) or value is None or isinstance(value, str | bytes):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple(sorted(((repr(key), _plain(each)) for key, each in value.items()), key=lambda p: p[0]))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())  # A tensor, or numpy's.
    return type(value).__name__


def _digest(values: Iterable[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(repr(list(values)).encode(errors="backslashreplace"))


def _leaves(value: Any, most: int | None) -> list[tuple[str, Any]] | None:
    """The plain values in it, by their place; None if they are more than `most`."""
    found: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any]] = [("extra_state", value)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, dict):
            waiting += [(f"{name}[{key!r}]", each[key]) for key in sorted(each, key=repr, reverse=True)]
        elif isinstance(each, list | tuple):
            waiting += [(f"{name}[{index}]", each[index]) for index in reversed(range(len(each)))]
        elif not isinstance(each, torch.Tensor):  # Those are in the window.
            found.append((name, _plain(each)))
        if most is not None and len(found) + len(waiting) > most:
            return None
    return found


def _bounded(items: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """At most so many, of at most such a length: the rest as one hash, and long ones with one at their end."""
    told = [(_cut(name), _cut(text)) for name, text in items[:MAX_ITEMS]]
    if len(items) > MAX_ITEMS:
        told.append((f"something after {told[-1][0]}"[:MAX_TEXT], _digest(items[MAX_ITEMS:])))
    return tuple(told)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 20]}... {_digest([text])}"
