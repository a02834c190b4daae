"""The objects that the collector of another process follows, read again where most kept their order."""

from __future__ import annotations

import random
import struct

import pytest

from memtriage.outside import interpreter
from memtriage.outside.interpreter import InterpreterLayout, RemoteInterpreter, own_layout
from memtriage.outside.memory import OutsideError
from memtriage.outside.objects import RemoteHeap
from memtriage.outside.python_layout import PythonLayout
from support.remote_memory import SIZE, START, FakeMemory

_FOUND = InterpreterLayout(runtime=START, modules=8, collector=16, permanent=80, thread_id=0, native_id=0)
_STATE = START + 4096
_OBJECTS = [START + 8192 + 32 * at for at in range(20_000)]
_LAYOUT = PythonLayout()


def _interpreter(generations: list[list[int]]) -> RemoteInterpreter:
    """An interpreter whose collector has these objects, by their words for the collector."""
    data = bytearray(SIZE)

    def put(address: int, value: int) -> None:
        struct.pack_into("<Q", data, address - START, value)

    put(START + _LAYOUT.runtime_interpreters, _STATE)
    put(_STATE + _FOUND.modules, START)
    heads = [_STATE + _FOUND.collector + offset for offset in (0, 24, 48, 80)]
    for head, members in zip(heads, [*generations, []], strict=True):
        for at, after in zip([head, *members], [*members, head], strict=True):
            put(at, after)
    heap = RemoteHeap(FakeMemory(bytes(data)), _LAYOUT, lambda own: own)
    return RemoteInterpreter(heap, _FOUND, lambda own: own)


@pytest.mark.parametrize("seed", range(4))
def test_what_kept_its_order_is_found_at_once(seed: int) -> None:
    chance = random.Random(seed)
    order = chance.sample(_OBJECTS, 18_000)
    before = _interpreter([order[:10], order[10:1000], order[1000:]]).tracked()
    assert before.tolist() == [at + _LAYOUT.collector_head for at in order]
    made = sorted(set(_OBJECTS) - set(order))
    old = [at for at in order[1000:] if chance.random() < 1 - seed / 1000]
    now = [made[:500], order[10:20], [*old, *made[500:], *order[20:1000]]]
    again = _interpreter(now)
    expected = [at + _LAYOUT.collector_head for generation in now for at in generation]
    assert again.tracked(before).tolist() == expected
    assert again.tracked().tolist() == expected
    assert not again.cut


def test_a_list_that_leads_back_into_itself_ends() -> None:
    order = _OBJECTS[:12_000]
    before = _interpreter([[], [], order]).tracked()
    now = _interpreter([order[:5000], [], order])  # the same objects are in two lists
    found = now.tracked(before).tolist()
    assert now.cut
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", ["is_special_build", "layout_of"])
def test_a_python_that_is_not_known_is_refused_in_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = name == "is_special_build"
    monkeypatch.setattr(interpreter, name, (lambda: True) if special else (lambda version: None))
    with pytest.raises(
        OutsideError, match=r"expected a 64-bit release of CPython .*; start the job"
    ) as error:
        own_layout()
    assert ("a debug or free-threaded build" in str(error.value)) == special
    assert "\n" not in str(error.value)
