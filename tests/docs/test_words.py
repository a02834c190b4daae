"""The worst patterns of a translated text are in no page: what to write instead is next to each."""

from __future__ import annotations

import re
from typing import Final

import pytest

from support import documents

REJECTED: Final = {
    r"\banew\b": "again",
    r"\bin place of\b": "instead of",
    r"\blets? go\b|\bletting go\b": "release, clear",
    r"\bbehind\b": "after, in, next to",
    r"\b(?:is|are|be) told\b|\btold by\b|\bforetold\b": "reported, inferred from, predicted",
    r"\b(?:stands|lies|lie) (?:in|on|under|at|below|above|beside)\b": "is",
    r"\bbeside\b|\bbesides\b": "next to, in addition to",
    r"\bnobody vouches\b|\bfor want of\b|\breckoned\b": "untrusted, for lack of, computed",
    r"\b(?:bytes?|B|[KMG]i?B) a (?:parameter|step|logit|layer|rank|second|micro-batch)\b": "per",
    r"\b[Tt]wo censuses\b": "at step 9 and step 13",
    r"\b(?:Who|What) (?:stays|keeps|looks|goes) with\b": "If you ...",
    r"\b1 (?:storages|steps|tensors|ranks)\b": "1 storage, 1 step",
    r"\bhold(?:s)? of\b": "keep, know",
}
"""Patterns, and what to write instead."""


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
