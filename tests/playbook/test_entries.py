"""The playbook is whole, refers to itself correctly, and says of every change what it does to the result."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args

import pytest

from memtriage.model.explanation import Maths
from memtriage.playbook.entries import ACTIONS, LADDER, PLAYBOOK, PlaybookAction, PlaybookEntry

RUNGS = [
    pytest.param(rung, id=f"{name}.{i}")
    for name, entry in PLAYBOOK.items()
    for i, rung in enumerate((*entry.rungs, *entry.actions))
]


def words(entry: PlaybookEntry) -> str:
    changes = (*entry.rungs, *entry.actions)
    told = [value for rung in changes for value in dataclasses.astuple(rung) if value is not None]
    return " ".join([entry.subject, entry.says, *told])


def test_the_entries_are_m1_to_m21_under_their_own_names() -> None:
    assert list(PLAYBOOK) == [f"M{number}" for number in range(1, 22)]
    assert all(entry.name == name for name, entry in PLAYBOOK.items())


@pytest.mark.parametrize("entry", PLAYBOOK.values(), ids=PLAYBOOK.keys())
def test_an_entry_has_a_title_and_whole_sentences(entry: PlaybookEntry) -> None:
    assert entry.subject and not entry.subject.endswith(".")
    assert entry.says.endswith(".")
    assert "  " not in words(entry)
    assert words(entry).isascii()


def test_entries_referred_to_exist() -> None:
    mentioned = {name for entry in PLAYBOOK.values() for name in re.findall(r"\bM\d+\b", words(entry))}
    assert mentioned <= PLAYBOOK.keys()
    assert {"M5", "M7"} <= mentioned


def test_the_ladder_has_every_rung_once() -> None:
    assert len(set(LADDER)) == len(LADDER)
    assert set(LADDER) == {name for name, entry in PLAYBOOK.items() if entry.rungs}


def test_the_ladder_entry_names_its_rungs_in_order() -> None:
    assert tuple(re.findall(r"\bM\d+\b", PLAYBOOK["M4"].says)) == LADDER


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_tells_its_saving_its_cost_and_its_limits(rung: PlaybookAction) -> None:
    assert all((rung.action, rung.saves, rung.costs, rung.no_help))
    assert rung.maths in get_args(Maths)


def test_changes_of_the_task_are_called_so() -> None:
    different = {
        name for name, entry in PLAYBOOK.items() for rung in entry.rungs if rung.maths == "different"
    }
    assert different == {"M11", "M13"}
    assert [rung.maths for rung in PLAYBOOK["M11"].rungs] == ["rounding", "different"]


def test_every_action_is_known_by_one_key() -> None:
    rungs = [rung for entry in PLAYBOOK.values() for rung in (*entry.rungs, *entry.actions)]
    assert len(ACTIONS) == len(rungs)
    for key, (entry, rung) in ACTIONS.items():
        assert rung.key == key
        assert rung in (*entry.rungs, *entry.actions)
