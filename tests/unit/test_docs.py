"""What pages refer to exists: files, and the benchmarks of the papers' figures. `make site` looks at the rest."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from chaosnet.commands.bench import BENCHMARKS

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
NAMED = re.compile(r"[ `](chaos|chameleon|elaswave)-([a-z0-9-]+)`")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Those of its headings."""
    plain = [re.sub(r"[^\w\s-]", "", each).strip().lower() for each in HEADING.findall(page.read_text())]
    return {re.sub(r"[-\s]+", "-", each) for each in plain}


def test_links_lead_to_files_and_headings():
    pages = [*chain(ROOT.glob("*.md"), ROOT.glob("docs/**/*.md"), ROOT.glob("examples/*.md"))]
    assert len(pages) > 25
    gone = []
    for page in pages:
        for target, heading in LINK.findall(CODE.sub("", page.read_text())):
            there = (page.parent / target).resolve() if target else page
            if ":" in target or (there.exists() and not (heading and heading not in anchors(there))):
                continue
            gone.append(f"{page.relative_to(ROOT)}: {target}{heading and '#'}{heading}")
    assert not gone


def test_each_figure_of_a_paper_is_on_its_page():
    page = (ROOT / "docs" / "papers.md").read_text()
    told = {f"{paper}-{figure}" for paper, figure in re.findall(NAMED, page)}
    for paper, first, last in re.findall(r"`chaosnet bench (\w+)-fig(\d+)` to `\1-fig(\d+)`", page):
        told |= {f"{paper}-fig{number}" for number in range(int(first), int(last) + 1)}
    made = {name for name in BENCHMARKS if name.startswith(("chaos-", "chameleon-", "elaswave-"))}
    assert told == made
