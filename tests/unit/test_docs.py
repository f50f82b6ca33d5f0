"""What pages refer to exists: files, and the benchmarks of the papers' figures. `make site` looks at the rest."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from chaosnet.commands.bench import BENCHMARKS

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)")
NAMED = re.compile(r"[ `](chaos|chameleon|elaswave)-([a-z0-9-]+)`")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def test_links_lead_to_files():
    pages = [*chain(ROOT.glob("*.md"), ROOT.glob("docs/**/*.md"), ROOT.glob("examples/*.md"))]
    assert len(pages) > 25
    gone = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in LINK.findall(CODE.sub("", page.read_text()))
        if ":" not in target and not (page.parent / target).exists()
    ]
    assert not gone


def test_each_figure_of_a_paper_is_on_its_page():
    page = (ROOT / "docs" / "papers.md").read_text()
    told = {f"{paper}-{figure}" for paper, figure in re.findall(NAMED, page)}
    for paper, first, last in re.findall(r"`chaosnet bench (\w+)-fig(\d+)` to `\1-fig(\d+)`", page):
        told |= {f"{paper}-fig{number}" for number in range(int(first), int(last) + 1)}
    made = {name for name in BENCHMARKS if name.startswith(("chaos-", "chameleon-", "elaswave-"))}
    assert told == made
