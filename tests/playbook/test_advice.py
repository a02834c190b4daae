"""Each text of advice is whole, and names an entry of the playbook."""

from __future__ import annotations

from typing import get_args

import pytest

from memtriage.model.explanation import Label
from memtriage.playbook import mechanisms, out_of_memory, residue, snapshots
from memtriage.playbook.entries import PLAYBOOK


def test_every_cause_has_its_advice() -> None:
    assert out_of_memory.ADVICE.keys() == set(get_args(out_of_memory.Cause))
    assert snapshots.ADVICE.keys() == set(get_args(snapshots.SnapshotCause))
    assert snapshots.FREE_MEMORY.keys() == set(get_args(snapshots.FreeMemory))
    assert residue.ADVICE.keys() == set(get_args(residue.ResidueCause))
    assert all(text.mechanism for text in mechanisms.MECHANISMS.values())
    assert out_of_memory.FIRST.keys() <= set(get_args(Label))


@pytest.mark.parametrize("advice", [*out_of_memory.ADVICE.values(), *snapshots.ADVICE.values()])
def test_advice_names_an_entry(advice: out_of_memory.Advice | snapshots.SnapshotAdvice) -> None:
    assert advice.entry in PLAYBOOK
    assert advice.why and advice.fix


def test_residue_names_an_entry() -> None:
    assert residue.ENTRY in PLAYBOOK
    assert all(text.mechanism and text.fix for text in residue.ADVICE.values())
