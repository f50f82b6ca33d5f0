"""docs/troubleshoot.md tells of every notice and error that people may see."""

from __future__ import annotations

import re

from told import ROOT, clause, kinds, longest_part, parts, plain, sentences, texts

from chaosnet.protocols.sentences import SENTENCES

PAGE = (ROOT / "docs" / "troubleshoot.md").read_text()
TEXT = plain(PAGE)

# In the sources, and told to nobody: texts in files, reasons of bugs, parts of what is told on other pages.
NOT_TOLD = {
    "-m chaosnet.launching.launched",
    "exec …… -m chaosnet.launching.launched",
    "No module named",
    "# chaosnet key. Who reads the last line can act as this node: keep it to yourself.",
    "…\n# Its public key: …\n…",
    "checkpoint under way",
    "no part of the last checkpoint:",
    "forward_s=…, backward_s=…, width=…",
    "nobody has planned the trees",
}


def test_every_sentence_is_on_the_page():
    missing = [
        f"{place}: {longest_part(text)}"
        for place, text in sentences()
        if text.strip() not in NOT_TOLD and clause(longest_part(text)) not in TEXT
    ]
    assert not missing, "docs/troubleshoot.md lacks (quote at least the first clause of each):\n" + "\n".join(
        missing
    )


def test_every_kind_of_notice_is_on_the_page():
    found = dict.fromkeys(kind for _, kind in kinds())
    assert len(found) > 10, "Happened is called otherwise now, and told.py does not find it"
    told = {kind: SENTENCES[kind].format(node="…", detail="…") for kind in found}
    assert not [kind for kind, text in told.items() if f"`{text}" not in PAGE and text != "… …"]


def test_the_page_quotes_nothing_that_nobody_says():
    """So that it does not rot."""
    said = "\n".join(plain(text) for _, text in texts())
    cells = re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE)
    quoted = [each.strip() for cell in cells for each in re.findall(r"(?:^|, )`+(.*?)`+(?=, `|$)", cell)]
    assert len(quoted) > 200
    stale = [each for each in quoted if any(part not in said for part in parts(each))]
    assert not stale, "docs/troubleshoot.md quotes what is in the sources no more:\n" + "\n".join(stale)
