"""How objects of another process are walked is decided by their class, as in the process itself."""

from __future__ import annotations

import sys

import pytest

from memtriage.observe.kinds import ATOM, PLAIN
from memtriage.outside.kinds import Kinds
from support.kind_cases import KIND_CASES, KIND_NAMES
from support.outside_parts import heap_now, known_python, same

pytestmark = known_python


@pytest.mark.parametrize(("klass", "kind"), KIND_CASES, ids=KIND_NAMES)
def test_objects_are_walked_by_their_class(klass: type, kind: int) -> None:
    kinds = Kinds(heap_now(), same)
    assert kinds.of_class(id(klass)) == kind
    assert kinds.known[id(klass)] == kind


def test_what_is_no_class_is_not_walked() -> None:
    kinds = Kinds(heap_now(), same)
    assert [kinds.of_class(address) for address in (0, id("text"), id(sys.modules))] == [ATOM] * 3


def test_only_atoms_whose_place_is_known_are_known_at_once() -> None:
    elsewhere = 1 << 40
    kinds = Kinds(heap_now(), lambda own: elsewhere if own == id(int) else None)
    assert kinds.known == {elsewhere: ATOM}
    assert kinds.of_class(id(str)) == PLAIN
