"""The sentences in the sources: what people may be told, as notices, errors and reasons.

A sentence is a text of three words or more that is no docstring, goes to no log, and is not of an error that only we
see. What is filled in is `…`. Of an error that says what was expected, the part before that counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("chaosnet", "node", "protocols", "scheduler")

# What tells people nothing of a cluster that trains: commands' own tables and helps, the planner, which has a page of
# its own, as have integrations (compared by a test), helps of metrics, and the plans of trees and shards, whose
# errors are bugs.
ELSEWHERE = (
    "chaosnet/commands/", "chaosnet/terminal/console.py", "chaosnet/terminal/tables.py", "chaosnet/__init__.py",
    "chaosnet/integrations/",
    "chaosnet/settings/table.py", "chaosnet/terminal/top_app.py",
    "scheduler/elastic/", "scheduler/shard_plan.py", "scheduler/sync_plan.py",
    "scheduler/sync_time.py", "scheduler/tree_packing.py", "scheduler/trees.py", "protocols/messages/",
    "protocols/data_cursor.py", "node/iperf3_probe.py",
    "chaosnet/page/metrics.py", "chaosnet/page/server.py",
)  # fmt: skip
OURS = {  # Errors that say what we, or a peer, did wrong in a protocol: dropped and counted, or a bug's traceback.
    "AssertionError", "AttributeError", "KeyError", "LocalProtocolError", "MalformedMessage", "NotImplementedError",
    "OSError", "RemoteProtocolError", "RuntimeError", "TypeError", "ValueError",
}  # fmt: skip
EXPECTED = re.compile(r"[ (;]\(?expected ")
ENOUGH = 25  # Characters.
WORD = re.compile(r"[A-Za-z]{2,}")


class Sentences(ast.NodeVisitor):
    """Of one module: (line, text)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_Raise(self, node: ast.Raise) -> None:
        if not (isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", "") in OURS):
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if not (isinstance(of, ast.Name) and of.id == "log"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for each in node.body:
            self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "help":
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """What an option expects is said behind "(expected"."""
        if not any(getattr(each, "id", getattr(each, "attr", "")) == "expected" for each in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.found.append((node.lineno, re.sub(r"\{\w+\}", "…", node.value)))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values]
        self.found.append((node.lineno, "".join(parts)))
        for each in node.values:
            if isinstance(each, ast.FormattedValue):
                self.visit(each.value)


def texts() -> Iterator[tuple[str, str]]:
    """Place and text, of any length."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if not name.startswith(ELSEWHERE):
                module = Sentences()
                module.visit(ast.parse(file.read_text()))
                yield from ((f"{name}:{line}", text) for line, text in module.found)


def sentences() -> Iterator[tuple[str, str]]:
    """Place and sentence."""
    for place, text in texts():
        head = EXPECTED.split(text)[0]
        if " " in head.strip() and len(WORD.findall(head.replace("…", " "))) >= 3:
            yield place, head


def kinds() -> Iterator[tuple[str, str]]:
    """Place and kind of what `Happened` tells all nodes."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Happened":
                    for each in ast.walk(node.args[0]):
                        if isinstance(each, ast.Constant) and isinstance(each.value, str):
                            yield f"{file.relative_to(ROOT).as_posix()}:{node.lineno}", each.value


def plain(text: str) -> str:
    """Without marks of code, and with one space wherever there is any."""
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def parts(sentence: str) -> list[str]:
    """What of it is the same every time: what stands between what is filled in."""
    return [plain(part).strip(" :;,.()'\"") for part in sentence.split("…")]


def longest_part(sentence: str) -> str:
    return max(parts(sentence), key=len)


def clause(part: str) -> str:
    """Its beginning, up to where it makes sense by itself: what a page has to quote at least."""
    ends = [match.start() for match in re.finditer(r"[;:.,] | \(|\(", part) if match.start() >= ENOUGH]
    return part[: min(ends, default=len(part))]
