"""Classes of an earlier reading are taken over, unless they have changed."""

from __future__ import annotations

import os
import sys

import pytest

from memtriage.outside.memory import ProcessMemory
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import layout_of

pytestmark = pytest.mark.skipif(
    layout_of(sys.version_info[:2]) is None, reason="reading from outside does not know this Python"
)


class _Kept:
    __slots__ = ("value",)


class _Renamed:
    pass


def _read(before: RemoteHeap | None = None) -> RemoteHeap:
    layout = layout_of(sys.version_info[:2])
    assert layout is not None
    return RemoteHeap(ProcessMemory(os.getpid()), layout, lambda address: address, before)


def test_only_a_class_that_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _read()
    for klass in (_Kept, _Renamed):
        known = first.class_at(id(klass))
        assert known is not None and known.name == klass.__name__
    _Renamed.__name__ = "Other"
    kept = _Kept()
    kept.value = [1]
    second = _read(first)
    read = []
    monkeypatch.setattr(second, "_read_class", lambda address: read.append(address))
    second.class_at(id(_Kept))
    second.class_at(id(_Renamed))
    assert id(_Renamed) in read
    assert id(_Kept) not in read
    third = _read(first)
    renamed, same = third.class_at(id(_Renamed)), third.class_at(id(_Kept))
    assert renamed is not None and renamed.name == "Other"
    assert same is not None and same.name == "_Kept"
    assert id(kept.value) in third.referents(id(kept))  # read in the new memory
