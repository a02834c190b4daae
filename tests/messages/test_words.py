"""What `explain` prints is in plain words, whatever the message."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memtriage import explain
from memtriage.model.explanation import Explanation
from support.message_texts import TEXTS
from support.words import REJECTED


def _sentences(explanation: Explanation) -> Iterator[str]:
    """What is said of a text, without what is quoted from it."""
    yield from (sentence for sentence in explanation.evidence if "form: " not in sentence)
    yield from (f"{fix.action}; {fix.why}; {fix.costs}" for fix in explanation.fixes)
    if explanation.settle is not None:
        yield explanation.settle.fact
    if explanation.stale_advice is not None:
        yield explanation.stale_advice


def test_explanations_are_in_plain_words() -> None:
    said = {sentence for text in TEXTS.values() for sentence in _sentences(explain(text))}
    assert len(said) > 200
    found = [
        f"{sentence!r}: {better}"
        for sentence in sorted(said)
        for pattern, better in REJECTED.items()
        if re.search(pattern, sentence)
    ]
    assert not found, "\n".join(found)
