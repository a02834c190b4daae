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

How to save memory, for each way of running out of it. Every finding, fix and remedy of memtriage names an
entry; `memtriage explain M8` prints one.

B is bytes. In formulas: N parameters, b micro-batch, s sequence length, h hidden size, a attention heads,
L layers, V vocabulary, w ranks. *Costs* says what becomes slower, and whether the trained model differs: by
rounding, as an approximation, or because it solves a different task. An empty cell means: nothing.
"""


def markdown() -> str:
    """Return the whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "## The ladder: changes in order of cost"
    yield ""
    yield "| entry | change | saves | costs | no help when |"
    yield "|---|---|---|---|---|"
    for name in LADDER:
        for rung in PLAYBOOK[name].rungs:
            yield f"| [{name}](#{_anchor(PLAYBOOK[name])}) {_row(rung)}"
    for entry in PLAYBOOK.values():
        yield ""
        yield f"## {entry.name}. {entry.subject}"
        yield ""
        yield entry.says
        if entry.actions:
            yield ""
            yield "| change | saves | costs | no help when |"
            yield "|---|---|---|---|"
            yield from map(_row, entry.actions)
    yield ""


def _row(action: PlaybookAction) -> str:
    said = dict(describe_rung(action))
    costs = [said["speed"], f"result: {said['result']}"]
    worth_saying = " · ".join(cost for cost in costs if cost not in ("none", "result: same"))
    cells = (action.action, said["saves"], worth_saying, said["no help when"])
    return f"| {' | '.join(map(plain, cells))} |"


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
