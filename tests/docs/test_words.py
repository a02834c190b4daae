"""The worst patterns of a translated text are in no page: what to write instead is next to each."""

from __future__ import annotations

import re

import pytest

from support import documents
from support.words import REJECTED


def _prose(page: str) -> list[tuple[int, str]]:
    """The lines of a page that are neither a block of code nor what a case's run has said."""
    lines, fenced, said = [], False, False
    generated = re.compile(
        r"<!-- (/|end)?[\w:./ ]* ?-->"
    )  # of a case: tables and words as its last run recorded them
    for number, line in enumerate((documents.ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if marker := generated.fullmatch(line):
            said = not marker[1]
            continue
        if not fenced and not said:
            lines.append((number, re.sub(r"`[^`]*`", "", line)))
    return lines


@pytest.mark.parametrize("page", [documents.name(page) for page in documents.pages()])
def test_pages_are_in_plain_words(page: str) -> None:
    found = [
        f"{page}:{number}: {match[0]!r}: {better}"
        for number, line in _prose(page)
        for pattern, better in REJECTED.items()
        if (match := re.search(pattern, line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("pattern", REJECTED)
def test_every_pattern_is_one(pattern: str) -> None:
    """Each rejects something: a pattern that matches nothing would let everything pass."""
    bad = (
        "It begins anew in place of that, lets go of it, is told by what lies in the file behind it, beside "
        "others that nobody vouches for; 12 bytes a parameter; two censuses; Who stays with it; 1 steps; "
        "it holds of all."
    )
    assert re.search(pattern, bad), pattern
