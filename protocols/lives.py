"""Which process has a name now: one may end, and another be started under the same name."""

from __future__ import annotations

from .messages import View, ViewKey


class Lives:
    """What a node knows of the lives of others: of the processes of one name, one after the other.

    A process that was started again under the id of a member is not that member: it lives in a later `life`. Its
    number is greater; if its clock was set back, what it tells is numbered after all that it has heard of others
    (`LinkReporter.outdo`), and so is later than they.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.past: dict[str, int] = {}  # Of each node that was in an earlier view.
        self.latest: dict[str, tuple[int, int]] = {}  # Of each node heard of: its newest news, and the life.
        self.left: dict[str, tuple[int, ViewKey]] = {}  # Who said farewell: the life, and its last view.
        self.failed: dict[str, int] = {}  # Of these, whose script had ended with an error: the life.
        self.declared: dict[str, int] = {}  # Declared dead by a person: the life.
        self.reborn: set[str] = set()  # Nodes of the view, or an earlier one, whose name a later process has.
        self.departed: set[str] = set()  # Nodes of earlier views.

    def enter(self, view: View) -> None:
        """A view is in force: names mean the lives in it."""
        before, self.view = self.view, view
        self.departed = (self.departed | (before.node_set - view.node_set)) - view.node_set
        for node, life in before.lives - view.lives:
            self.past[node] = life
            self._compare(node)
        for node, _ in view.lives - before.lives:
            self._compare(node)

    def listens(self, view: View) -> None:
        """This node begins to listen in a view: the lives in it live, whatever we have heard.

        A process whose clock was set back lives in an earlier life than the one before it, if all others have
        forgotten that.
        """
        for node, life in view.lives:
            self.latest[node] = (max(self.greatest(node), life), life)
        self.reborn -= view.node_set
        for node in view.node_set.intersection(self.left):
            del self.left[node]
            self.failed.pop(node, None)

    def heard(self, node: str, version: int, life: int) -> bool:
        """A node has told something, numbered `version`, in this life (0: it does not say).

        Returns: does a later process have its name now, which it had not before, or the other way round?
        """
        if not life or version <= self.newest(node)[0]:
            return False
        self.latest[node] = (version, life)
        return self._compare(node)

    def farewell(self, node: str, life: int, key: ViewKey, error: bool = False) -> None:
        """A node has left for good.

        `key`: of the last view that it acted in; `error`: did its script end with one?
        """
        if error:
            self.failed[node] = life
        told = [(life, key), self.left.pop(node, (0, (0, 0)))]
        self.left[node] = max(told, key=lambda each: (each[0] == self.of(node), each))

    def declare(self, node: str, life: int) -> None:
        """A person says that this life is over."""
        self.declared[node] = life

    def settled(self) -> set[str]:
        """Forget nodes that have departed and do not live again. Returns: these nodes."""
        gone, self.departed = self.departed - self.reborn, self.departed & self.reborn
        for node in gone:
            for known in (self.left, self.failed, self.past, self.latest, self.declared):
                known.pop(node, None)
        return gone

    def forget_strangers(self, most: int) -> None:
        """Of nodes that were in no view, keep the `most` last heard of."""
        for known in (self.left, self.failed, self.latest):
            if len(known) > 2 * most + len(self.view.node_set) + len(self.past):
                for node in [name for name in known if not self.was_in_view(name)][:-most]:
                    del known[node]

    def was_in_view(self, node: str) -> bool:
        """Is the node in the view, or was it in an earlier one?"""
        return node in self.view.node_set or node in self.past

    def of(self, node: str) -> int:
        """The node's life in the view, or in the last view that it was in; 0 if there is none."""
        member = self.view.find(node)
        return member.life if member is not None else self.past.get(node, 0)

    def newest(self, node: str) -> tuple[int, int]:
        """The number of the node's newest news, and the life that told it; zeros if there is none."""
        return self.latest.get(node, (0, 0))

    def is_outlived(self, node: str, life: int) -> bool:
        """Is this life over, as a later one of the same name was heard of, or news of one with a greater number?"""
        newest, latest = self.newest(node)
        return life < max(self._left_in(node), self.of(node), newest if latest != life else 0)

    def greatest(self, node: str) -> int:
        """The greatest number that any life of that name has, or has told us; 0 if none was heard of."""
        return max(self._left_in(node), self.of(node), *self.newest(node))

    def left_by(self, key: ViewKey) -> set[str]:
        """Nodes that have said farewell in their present life, in that view or an older one."""
        return {node for node, (life, last) in self.left.items() if life == self.of(node) and last <= key}

    def farewells(self) -> tuple[tuple[str, int, ViewKey, bool], ...]:
        """Of those in views, in the lives that are meant there: who, which life, its last view, was it an error."""
        return tuple(
            (node, life, key, self.failed.get(node) == life)
            for node, (life, key) in sorted(self.left.items())
            if life == self.of(node)
        )

    def is_news(self, node: str, life: int, key: ViewKey, error: bool) -> bool:
        """That the life of it that is meant has said farewell, or acted in a later view before.

        Of an error the view is each node's own to say.
        """
        known = self.left.get(node, (0, (0, 0)))
        return life == self.of(node) and (life > known[0] if error else (life, key) > known)

    @property
    def declared_dead(self) -> set[str]:
        """Nodes whose present life a person has declared dead."""
        return {node for node, life in self.declared.items() if life == self.of(node)}

    def _left_in(self, node: str) -> int:
        """The life in which the node said farewell."""
        return self.left.get(node, (0, (0, 0)))[0]

    def _compare(self, node: str) -> bool:
        """Has a later process taken the name of this node of a view? True if that is new, or no longer so."""
        was_reborn = node in self.reborn
        newest, latest = self.newest(node)
        is_reborn = self.was_in_view(node) and newest > self.of(node) and latest != self.of(node)
        (self.reborn.add if is_reborn else self.reborn.discard)(node)
        return is_reborn is not was_reborn
