"""Do all replicas hold the same training state? Compares, names what differs first and on which node.

    before step s:  every node hashes its settings, and a window of its state, into its contribution
    commit of s:    all see the same sums of who has which hash
    step s+1:       where hashes differed, every node says what was behind its own
    commit of s+1:  all name the same first difference: a Verdict

The majority is right; in a tie the side of the most senior member is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..node.outcomes import StepOutcome
from ..node.session import Session
from ..node.state.state_window import EVERY, Averaged, StateWindow, Window
from ..node.state.training_state import TrainingState
from ..protocols.messages import Contribution, Side, Sides
from .replica_settings import Items, ReplicaSettings, Values, digest_of, first_difference

MAX_HEALS = 3  # Of one node, for one thing: what comes back every time is in its script.
HEALS_COUNT_STEPS = 1000  # For so long; all of the state is compared several times meanwhile.
MAX_ITEMS, MAX_TEXT = 1024, 200
MOST_LEAVES = 64  # Of extra_state, compared at every step; larger ones every so often.
KINDS = SETTINGS, FLAGS, EXTRA, STATE = "settings", "requires_grad", "extra_state", "state"
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
        "and every joiner run. Or an optimizer of your own keeps in an attribute what belongs into its state"
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
    items: Callable[[], Items]


class Agreement:
    """One node's part in the comparison; its methods are for the training thread, between two steps."""

    def __init__(
        self, state: TrainingState, averaged: Averaged, me: str, policy: str, window: Window | None = None
    ) -> None:
        self._me, self._policy = me, policy
        self.settings = ReplicaSettings(state)
        self.window = window or StateWindow(state, averaged)
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
        self.settings.forget()
        self.window.forget()

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
        self._note(SETTINGS, round, step, self.settings.settings())
        if trained:  # Who had none may not have come to where the script freezes.
            self._note(FLAGS, round, step, self.settings.requires_grad())
        if extra := self.settings.extra_state(MOST_LEAVES if step % EVERY else None):
            self._note(EXTRA, round, step, extra)
        # By steps of the model: rounds of an evaluation, in which nobody tells anything, must not take one's turn.
        if reading := self.window.read(step):
            self._note(reading.kind, round, step, Values(reading.digest, lambda: reading.pieces))
        return {kind: self._side(kind, record.digest) for kind, record in self._records.items()}, accounts

    def _side(self, kind: str, digest: str) -> dict[str, Side]:
        """This node's entry for `kind`, made only once for as long as its digest stays the same."""
        side = self._said.get(kind)
        if side is None or digest not in side:
            side = {digest: Side(nodes=1, names=(self._me,))}
            if kind in KINDS:
                self._said[kind] = side
        return side

    def _note(self, kind: str, round: int, step: int, values: Values) -> None:
        self._records[kind] = _Record(round, step, *values)

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


def judged(agreement: Agreement, outcome: StepOutcome, step: int, session: Session) -> Divergence | None:
    """What the cluster's sums say after a step: all see the same, so all find the same. `step`: as of `judge`."""
    total = outcome.commit.total
    if mixed := agreement.mixed(total):
        session.say(mixed)
    verdict = agreement.judge(total, step, [name for name, _ in outcome.deal])
    if verdict is not None:
        session.counters["replicas_differ"] += 1
    return verdict


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


def _bounded(items: Items) -> tuple[tuple[str, str], ...]:
    """At most so many, of at most such a length: the rest as one hash, and long ones with one at their end."""
    told = [(_cut(name), _cut(text)) for name, text in items[:MAX_ITEMS]]
    if len(items) > MAX_ITEMS:
        told.append((f"something after {told[-1][0]}"[:MAX_TEXT], digest_of(items[MAX_ITEMS:])))
    return tuple(told)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 20]}... {digest_of([text])}"
