"""Writes the tables of three pages of the documentation, which the package has as data.

python tests/support/pages.py

What comes before `MARK` in a page stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.installed import versions_in_words
from memtriage.catalogue.remarks import REMARKS
from memtriage.playbook.entries import LADDER, PLAYBOOK, PlaybookAction, PlaybookEntry
from memtriage.report.explanation import describe_rung
from memtriage.report.monitoring.gauges import GAUGES

DOCS: Final = Path(__file__).parents[2] / "docs"
MARK: Final = "<!-- What follows is written by tests/support/pages.py. -->\n"


def playbook() -> Iterator[str]:
    """The lines of the ladder, and of each entry."""
    yield "## The ladder: changes in order of cost"
    yield ""
    yield "| entry | change | saves | speed | result | no help when |"
    yield "|---|---|---|---|---|---|"
    for name in LADDER:
        for rung in PLAYBOOK[name].rungs:
            yield f"| [{name}](#{_anchor(PLAYBOOK[name])}) {_rung(rung)}"
    for entry in PLAYBOOK.values():
        yield ""
        yield f"## {entry.name}. {entry.subject}"
        yield ""
        yield entry.says
        if entry.picture:
            yield f"\n```text\n{entry.picture}```"
        if entry.actions:
            yield ""
            yield from (plain(f"- {each.action}. No help when {each.no_help}.") for each in entry.actions)


def _rung(rung: PlaybookAction) -> str:
    cells = (rung.action, *dict(describe_rung(rung)).values())
    return f"| {' | '.join(map(plain, cells))} |"


def _anchor(entry: PlaybookEntry) -> str:
    heading = f"{entry.name}. {entry.subject}".lower()
    return "".join(char for char in heading if char.isalnum() or char in " -").replace(" ", "-")


def plain(text: str) -> str:
    """Escape what Markdown would take for markup, but for code between backticks.

    >>> plain("max_size, see `max_size`")
    'max\\\\_size, see `max_size`'
    """
    outside_code = re.compile(r"[*_](?=[^`]*(?:`[^`]*`[^`]*)*$)")
    return outside_code.sub(r"\\\g<0>", text).replace("|", "\\|")


def holders() -> Iterator[str]:
    """The lines of each library, and of what is not recognized."""
    for library, group in groupby(BUILT_IN, key=lambda holder: holder.library):
        yield f"## {library[0].upper()}{library[1:]}"
        yield ""
        yield "| name | keeps | cleared |\n|---|---|---|"
        yield from map(_holder, group)
        yield ""
    yield "## Not recognized"
    yield ""
    yield "| library | what keeps memory | what helps |\n|---|---|---|"
    for remark in REMARKS:
        yield f"| {remark.library} | {plain(remark.what)} | {plain(remark.helps)} |"


def _holder(holder: Holder) -> str:
    versions = f". Versions: {versions_in_words(holder.spans)}" if holder.spans else ""
    return f"| `{holder.name}` | {plain(holder.holds + versions)} | {holder.policy} |"


def metrics() -> Iterator[str]:
    """The rows of the gauges."""
    yield "| Prometheus | labels | scalar | meaning |"
    yield "|---|---|---|---|"
    for gauge in GAUGES:
        scalar = "" if gauge.scalar is None else f"`{gauge.scalar.removeprefix('{device}/')}`"
        labels = ", ".join(f"`{label}`" for label in gauge.labels if label != "rank")
        yield f"| `{gauge.prometheus}` | {labels} | {scalar} | {gauge.help} |"


PAGES: Final[dict[str, Callable[[], Iterator[str]]]] = {
    "playbook.md": playbook,
    "holders.md": holders,
    "metric-names.md": metrics,
}


def written(name: str) -> str:
    """The page as it should be."""
    head, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    assert mark, f"docs/{name} lacks the line {MARK}"
    return f"{head}{mark}\n" + "\n".join(PAGES[name]()) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        (DOCS / page).write_text(written(page), encoding="utf-8")
