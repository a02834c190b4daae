"""The playbook as a page of the documentation.

python -m memtriage.report.playbook > docs/playbook.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from memtriage.playbook.entries import LADDER, PLAYBOOK, PlaybookAction, PlaybookEntry
from memtriage.report.explanation import describe_rung

_HEAD = """\
# The playbook

<!-- python -m memtriage.report.playbook > docs/playbook.md: edit src/memtriage/playbook/entries.py -->

What is known about each way to run out of memory, or to need less of it. Every finding, fix and remedy of
memtriage names an entry; `memtriage explain M8` prints one.

B is bytes. In formulas: N parameters, b micro-batch, s sequence length, h hidden size, a attention heads,
L layers, V vocabulary, w ranks. *Result* says what a change does to the result of training: nothing (same),
other rounding, an approximation, or another task (different).
"""


def markdown() -> str:
    """Return the whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "## The ladder: changes in order of cost"
    yield ""
    yield "| entry | change | saves | speed | result |"
    yield "|---|---|---|---|---|"
    for name in LADDER:
        for rung in PLAYBOOK[name].rungs:
            cells = (rung.action, rung.saves, rung.costs, rung.maths)
            yield f"| [{name}](#{_anchor(PLAYBOOK[name])}) | {' | '.join(plain(cell) for cell in cells)} |"
    for entry in PLAYBOOK.values():
        yield ""
        yield f"## {entry.name}. {entry.subject}"
        yield ""
        yield entry.says
        for rung in (*entry.rungs, *entry.actions):
            yield ""
            yield from _change(rung)
    yield ""


def _change(rung: PlaybookAction) -> Iterator[str]:
    yield f"**{plain(rung.action)}**"
    yield ""
    for label, value in describe_rung(rung):
        yield f"- {label}: {plain(value)}"


def plain(text: str) -> str:
    """Text that Markdown takes as it stands."""
    return text.replace("*", "\\*").replace("|", "\\|").replace("_", "\\_")


def _anchor(entry: PlaybookEntry) -> str:
    kept = "".join(
        char for char in f"{entry.name}. {entry.subject}".lower() if char.isalnum() or char in " -"
    )
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(markdown())
