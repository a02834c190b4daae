"""The playbook as a page of the documentation.

python -m memtriage.report.playbook > docs/playbook.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from memtriage.playbook.entries import LADDER, PLAYBOOK, PlaybookAction, PlaybookEntry
from memtriage.report.explanation import describe_rung

_HEAD = """\
# The playbook

<!-- python -m memtriage.report.playbook > docs/playbook.md: edit src/memtriage/playbook/entries.py -->

How to save memory, for each way of running out of it. Every finding, fix and remedy of memtriage names an
entry; `memtriage explain M8` prints one, with what each of its changes saves and costs.

B is bytes. In formulas: N parameters, b micro-batch, s sequence length, h hidden size, a attention heads,
L layers, V vocabulary, w ranks. *Result*: the trained model is the same, differs by rounding, is an
approximation, or solves a different task.
"""


def markdown() -> str:
    """Return the whole page."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _HEAD
    yield "## The ladder: changes in order of cost"
    yield ""
    yield "| entry | change | saves | speed | result | no help when |"
    yield "|---|---|---|---|---|---|"
    for name in LADDER:
        for rung in PLAYBOOK[name].rungs:
            yield f"| [{name}](#{_anchor(PLAYBOOK[name])}) {_row(rung)}"
    for entry in PLAYBOOK.values():
        yield ""
        yield f"## {entry.name}. {entry.subject}"
        yield ""
        yield entry.says
        if entry.picture:
            yield f"\n```text\n{entry.picture}```"
        if entry.actions:
            yield ""
            yield from map(_item, entry.actions)
    yield ""


def _row(rung: PlaybookAction) -> str:
    cells = (rung.action, *dict(describe_rung(rung)).values())
    return f"| {' | '.join(map(plain, cells))} |"


def _item(action: PlaybookAction) -> str:
    return plain(f"- {action.action}. No help when {action.no_help}.")


def plain(text: str) -> str:
    """Escape what Markdown would take for markup, but for code between backticks.

    >>> plain("max_size, see `max_size`")
    'max\\\\_size, see `max_size`'
    """
    outside_code = re.compile(r"[*_](?=[^`]*(?:`[^`]*`[^`]*)*$)")
    return outside_code.sub(r"\\\g<0>", text).replace("|", "\\|")


def _anchor(entry: PlaybookEntry) -> str:
    kept = "".join(
        char for char in f"{entry.name}. {entry.subject}".lower() if char.isalnum() or char in " -"
    )
    return kept.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(markdown())
