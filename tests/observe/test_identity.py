"""Tokens of holding objects: an object keeps its own, no other gets it, nothing stays behind."""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import Any

import pytest

from memtriage.account.census import Look
from memtriage.model.paths import in_words
from memtriage.observe.identity import Identities
from memtriage.observe.kinds import FrameLocals
from memtriage.observe.malloc import malloc_info

torch = pytest.importorskip("torch")

PRELUDE = """
import collections, torch
def T():
    return torch.ones(100)
class Thing:
    def __init__(self):
        self.kept = [T()]
        self.best = T()
"""


@pytest.fixture
def identities() -> Identities:
    return Identities()


def holders(identities: Identities) -> dict[str, set[int]]:
    """By printed anchor, the tokens of what a census of the program `train` finds."""
    with Look((), identities) as view:
        groups = view.census().groups
        assert all(sum(group.holders.values()) == group.nbytes for group in groups)
        return {in_words(group.anchor): set(group.holders) for group in groups}


def one(tokens: set[int]) -> int:
    (token,) = tokens
    return token


def test_an_object_keeps_its_token_under_another_name(program: Any, identities: Identities) -> None:
    program.run(PRELUDE)
    program.run(
        "a_list, a_dict, a_deque = [T()], {'x': T()}, collections.deque([T()])\n"
        "thing, net = Thing(), torch.nn.Linear(4, 4)"
    )
    before = holders(identities)
    program.run(
        "b_list, b_dict, b_deque, other, model = a_list, a_dict, a_deque, thing, net\n"
        "del a_list, a_dict, a_deque, thing, net\nb_list.append(T())"
    )
    after = holders(identities)
    names = {
        "train.a_list[*]": "train.b_list[*]",
        "train.a_dict['x']": "train.b_dict['x']",
        "train.a_deque[*]": "train.b_deque[*]",
        "train.thing.kept[*]": "train.other.kept[*]",
        "train.thing.best": "train.other.best",
        "train.net.weight": "train.model.weight",
    }
    assert {name: before[name] for name in names} == {old: after[new] for old, new in names.items()}
    tokens = [one(after[new]) for new in names.values()]
    assert len(set(tokens)) == len(tokens)


def test_another_object_under_the_same_name_has_another_token(program: Any, identities: Identities) -> None:
    program.run(PRELUDE)
    program.run("kept, recent, thing = [T()], collections.deque([T()]), Thing()")
    before = holders(identities)
    program.run("kept, recent, thing = [T()], collections.deque([T()]), Thing()")
    after = holders(identities)
    for name in ("train.kept[*]", "train.recent[*]", "train.thing.best", "train.thing.kept[*]"):
        assert before[name].isdisjoint(after[name])


def test_the_outermost_container_of_entries_has_a_token_of_its_own(
    program: Any, identities: Identities
) -> None:
    program.run(PRELUDE)
    program.run("jobs, rows = collections.deque([{'x': T(), 'y': [T()]}]), [{'x': T()}]")

    def within() -> list[int | None]:
        with Look((), identities) as view:
            tokens = {in_words(group.anchor): group.within for group in view.census().groups}
        names = ("train.jobs[*]['x']", "train.jobs[*]['y'][*]", "train.rows[*]['x']")
        return [tokens[name] for name in names]

    first = within()
    program.run("jobs.append({'x': T(), 'y': [T()]}); jobs.popleft(); rows[:] = [{'x': T()}]")
    assert within() == first == [first[0], first[0], None] and first[0] is not None
    program.run("jobs = collections.deque(jobs)")
    assert within()[0] not in (first[0], None)


def test_a_module_is_itself_whatever_its_variables_are(program: Any, identities: Identities) -> None:
    program.run(PRELUDE)
    program.run("total = T()")
    before = holders(identities)
    program.run("total = total + 1")
    assert holders(identities)["train.total"] == before["train.total"]


def token(identities: Identities, kept: list[Any]) -> int:
    """A list's token in a new walk."""
    identities.begin()
    return identities.token(kept, identities.witnesses(kept))


def test_a_reused_address_is_no_identity(identities: Identities) -> None:
    """A list whose whole content is other storages may as well be another list at the same address."""
    kept = [torch.ones(8), torch.ones(8)]
    first = token(identities, kept)
    kept.append(torch.ones(8))
    assert token(identities, kept) == first
    kept[:] = [torch.ones(8)]
    assert token(identities, kept) != first


def test_each_run_of_a_function_is_known_again_by_what_its_variables_hold(identities: Identities) -> None:
    runs: list[tuple[FrameType, Any]] = []

    def run(deeper: int) -> None:
        kept = torch.ones(8)
        runs.append((sys._getframe(), kept))
        if deeper:
            run(deeper - 1)

    def tokens() -> list[int]:
        identities.begin()
        return [
            identities.token(FrameLocals(frame, None), identities.witnesses([kept])) for frame, kept in runs
        ]

    run(2)
    first = tokens()
    assert len(set(first)) == 3 and tokens() == first


def test_an_object_that_one_walk_did_not_see_is_new(identities: Identities) -> None:
    kept = [torch.ones(8)]
    first = token(identities, kept)
    identities.begin()
    assert token(identities, kept) != first


def test_nothing_stays_alive_and_nothing_stays_behind(program: Any, identities: Identities) -> None:
    program.run(PRELUDE)
    program.run("thing, leaf, net = Thing(), torch.ones(4, requires_grad=True), torch.nn.Linear(4, 4)")
    holders(identities)
    gone = weakref.ref(program["thing"])
    with pytest.raises(RuntimeError, match="weakref"):  # what a weak reference to a tensor would do
        refused = weakref.ref(other := torch.ones(4))
        torch.utils.swap_tensors(other, torch.zeros(4))
    del refused
    torch.utils.swap_tensors(program["leaf"], torch.zeros(4, requires_grad=True))
    torch.utils.swap_tensors(program["net"].weight, torch.nn.Parameter(torch.zeros(4, 4)))
    witness = weakref.ref(program["thing"].kept[0])
    program.run("del thing")
    gc.collect()
    assert gone() is None and witness() is None


def test_what_dies_after_a_walk_leaves_nothing_in_malloc(identities: Identities) -> None:
    """C++ keeps the record of a storage, some hundred bytes, as long as it has a weak pointer to it."""
    if malloc_info() is None:
        pytest.skip("needs glibc's counters")
    kept = [(torch.ones(4), torch.ones(4)) for _ in range(20_000)]
    identities.begin()
    for pair in kept:
        identities.witnesses(pair)
    before = malloc_info().in_use
    for number in range(len(kept)):
        kept[number] = torch.ones(4), torch.ones(4)
    assert malloc_info().in_use - before < 50 * len(kept)


def test_a_census_without_identities_names_none() -> None:
    kept = [torch.ones(8)]
    with Look() as view:
        assert not any(group.holders for group in view.census().groups)
    assert kept
