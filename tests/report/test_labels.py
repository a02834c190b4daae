"""The labels of findings: the same as text and on pages."""

from __future__ import annotations

import pytest

from memtriage.playbook.entries import PLAYBOOK
from memtriage.report.labels import detected, playbook_entry, size_label


def test_a_playbook_entry_has_its_subject() -> None:
    assert playbook_entry("M8", " · ") == f"M8 · {PLAYBOOK['M8'].subject} · memtriage explain M8"
    assert playbook_entry("M99", " · ") == "M99"


@pytest.mark.parametrize(
    ("step", "label"), [(None, "size"), (0, "size at step 0"), (1200, "size at step 1,200")]
)
def test_a_size_may_be_of_a_step(step: int | None, label: str) -> None:
    assert size_label(step) == label


@pytest.mark.parametrize(
    ("step", "phase", "words"),
    [
        (1200, "forward", "at step 1,200, in forward"),
        (0, None, "at step 0"),
        (None, "forward", "in forward"),
        (None, None, ""),
    ],
)
def test_when_a_finding_was_made(step: int | None, phase: str | None, words: str) -> None:
    assert detected(step, phase) == words
