"""The cut that is advised: the smallest change that stops the growth."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.diagnose.cuts import as_found, cuts_of, fix_of
from memtriage.diagnose.held import Held
from memtriage.model.census import CutKind, CutSeen
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from support.judged import a_holder
from support.paths import items_of

MIB = 1 << 20
LOSSES = items_of("main", "losses")


def cut(change: CutKind, releases: int, at: HolderPath = LOSSES, **facts: Any) -> CutSeen:
    return CutSeen(cut=change, at=at, releases=releases, of=100 * MIB, **facts)


def attributes(*names: str) -> HolderPath:
    return tuple(PathSegment(SegmentKind.ATTRIBUTE, name) for name in names)


def held(*cuts: CutSeen, path: HolderPath = LOSSES, attached: bool = True, **facts: Any) -> Held:
    return a_holder(path, attached=attached, cuts=list(cuts), entries_grow=True, **facts)


@pytest.mark.parametrize(
    ("releases", "first"),
    [
        ({"detach": 99, "clone": 50, "bound": 100}, "detach"),
        ({"detach": 1, "clone": 95, "bound": 100}, "clone"),
        ({"detach": 50, "clone": 50, "bound": 100}, "bound"),
        ({"detach": 99, "context": 95, "bound": 100}, "detach"),
        pytest.param({"detach": 1, "clone": 0, "bound": 60}, "bound", id="none does"),
        pytest.param({"detach": 60, "bound": 61}, "detach", id="none does, and both leave as much"),
    ],
)
def test_the_smallest_change_that_stops_the_growth_comes_first(
    releases: dict[CutKind, int], first: str
) -> None:
    found = cuts_of(held(*(cut(kind, part * MIB) for kind, part in releases.items())))
    assert found[0].cut == first
    assert {each.cut for each in found} == set(releases)


@pytest.mark.parametrize(("remains", "first"), [(512, "detach"), (4096, "bound")])
def test_a_log_of_numbers_may_go_on(remains: int, first: str) -> None:
    """Only nodes of a graph are kept: an entry without them is a large part, and little."""
    facts = held(cut("detach", 80 * MIB), cut("bound", 100 * MIB), rate=remains / 0.2)
    assert cuts_of(facts)[0].cut == first


@pytest.mark.parametrize(
    ("kind", "entries", "remains"),
    [("bound", 1, 0), ("bound", 5, round(MIB / 20)), ("detach", 1, round(MIB / 100))],
)
def test_the_entries_in_use_at_a_census_are_none_that_remain(kind: str, entries: int, remains: int) -> None:
    """A hundred entries of 1 MiB, one per step; variables of the loop keep the last ones."""
    facts = held(cut(kind, (100 - entries) * MIB), rate=MIB)
    (found,) = (each for each in as_found(facts) if each.cut == kind)
    assert found.remains_per_event == remains


def test_the_fix_says_what_is_released_and_what_remains() -> None:
    facts = held(cut("detach", 99 * MIB), cut("bound", 100 * MIB), stored_value="loss", rate=50 * 1024.0)
    assert fix_of(facts) == (
        "store `loss.detach()` (or `loss.item()`) instead of the tensor itself in losses: it keeps its whole "
        "graph: releases 99.0 MiB of 100.0 MiB; 512 B per step remain"
    )
    first, second = as_found(facts)
    assert (first.cut, first.releases, first.remains_per_event) == ("detach", 99 * MIB, 512)
    assert (second.cut, second.remains_per_event) == ("bound", 0)


def test_the_fix_does_not_reach_into_private_parts_of_other_objects() -> None:
    path = (*items_of("main", "trainer")[:-1], *attributes("_connector", "model", "outputs"), ANY_ITEM)
    assert fix_of(held(path=path, attached=False)).startswith("bound outputs: ")
    path = (*items_of("main", "trainer")[:-1], *attributes("model", "_outputs"), ANY_ITEM)
    assert fix_of(held(path=path, attached=False)).startswith("bound trainer.model._outputs: ")


def test_the_fix_does_not_reach_into_objects_of_c_code() -> None:
    path = (*items_of("main", "preview")[:-1], *attributes("<_tee_dataobject>", "<list>"), ANY_ITEM)
    facts = held(cut("bound", 100 * MIB, path, kind="list"), path=path, attached=False)
    assert fix_of(facts).startswith("bound preview: take an old entry out ")


def test_without_figures_the_path_decides() -> None:
    assert [each.cut for each in cuts_of(held())] == ["detach", "bound"]
    assert [each.cut for each in cuts_of(held(attached=False))] == ["bound"]
    assert all(each.releases is None and each.remains_per_event is None for each in as_found(held()))


def test_a_container_around_the_one_that_grows_is_not_bounded() -> None:
    inner = (*LOSSES, PathSegment(SegmentKind.ATTRIBUTE, "steps"), ANY_ITEM)
    found = cuts_of(
        held(cut("bound", 40 * MIB), cut("bound", 99 * MIB, at=inner), path=inner, attached=False)
    )
    assert [(each.at, each.releases) for each in found] == [(inner, 99 * MIB)]


def test_what_is_registered_under_numbers_is_bounded_there() -> None:
    inner = (*LOSSES, PathSegment(SegmentKind.ATTRIBUTE, "adapter_*"))
    weight = (*inner, PathSegment(SegmentKind.ATTRIBUTE, "weight"))
    facts = held(cut("bound", 99 * MIB), cut("bound", 98 * MIB, at=inner), path=weight, attached=False)
    assert [(each.at, each.releases) for each in cuts_of(facts)] == [(inner, 98 * MIB)]


def test_a_state_that_is_detached_at_each_step_no_longer_grows() -> None:
    state = LOSSES[:-1]
    facts = a_holder(state, attached=True, cuts=[cut("detach", 60 * MIB, at=state)], rate=1e6)
    (found,) = as_found(facts)
    assert found.remains_per_event == 0
    assert "`losses = losses.detach()`" in fix_of(facts)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("dict", "`losses = {key: each.detach() for key, each in losses.items()}`"),
        ("tuple", "`losses = tuple(each.detach() for each in losses)`"),
    ],
)
def test_a_container_that_is_carried_is_detached_entry_by_entry(kind: str, words: str) -> None:
    facts = a_holder(
        LOSSES, attached=True, holder_kind=kind, entries_grow=False,
        cuts=[cut("detach", 60 * MIB, at=(*LOSSES[:-1], PathSegment(SegmentKind.ITEM, "'lm'")))],
    )  # fmt: skip
    assert words in fix_of(facts)
    assert "releases 60.0 MiB of 60.0 MiB" in fix_of(facts)


def test_others_that_keep_the_same_graph_are_named() -> None:
    norms = items_of("main", "norms")
    fix = fix_of(held(cut("detach", 99 * MIB, together=[norms]), stored_value="loss"))
    assert "(and the same in norms)" in fix
    any_list = (*LOSSES[:1], PathSegment(SegmentKind.VARIABLE, "*"), ANY_ITEM)
    assert "and the same" not in fix_of(held(cut("detach", 99 * MIB, together=[norms]), path=any_list))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("list", "deque(maxlen=...)"),
        ("OrderedDict", "losses.pop(next(iter(losses)))"),
        ("Queue", "take an old"),
    ],
)
def test_a_container_is_bounded_as_its_type_allows(kind: str, words: str) -> None:
    assert words in fix_of(held(cut("bound", 100 * MIB, kind=kind), attached=False))
