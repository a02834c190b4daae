"""Bytes by site, at an instant and over steps."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.replay import ReplayedTrace
from memtriage.model.recording import OWNERS, OwnedBytes, Stack
from memtriage.snapshots.sites import SiteIndex, alive_at, index_sites, owned_bytes, site_series

EVENTS = 60


@st.composite
def lives(draw: st.DrawFn) -> ReplayedTrace:
    pairs = draw(
        st.lists(st.tuples(st.integers(-1, EVENTS - 1), st.integers(1, EVENTS)), min_size=1, max_size=30)
    )
    born = np.array([one for one, _ in pairs], np.int32)
    died = np.array([one + length if one + length < EVENTS else -1 for one, length in pairs], np.int32)
    died = np.where(died == 0, 1, died)
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    values = dict.fromkeys(names) | {"born": born, "died": died, "size": np.arange(1, len(pairs) + 1) * 512}
    return ReplayedTrace(**values)


def index(count: int) -> SiteIndex:
    return SiteIndex(("a", "b", "c"), np.arange(count) % 3)


@given(
    replayed=lives(), ends=st.sets(st.integers(1, EVENTS), min_size=1, max_size=20), most=st.integers(2, 30)
)
def test_a_series_is_what_is_alive_at_each_end(replayed: ReplayedTrace, ends: set[int], most: int) -> None:
    marks, sites = sorted(ends), index(len(replayed.born))
    series = site_series(replayed, sites, marks, most)
    assert len(series.steps) <= most
    assert series.steps[-1] == len(marks)
    for column, step in enumerate(series.steps.tolist()):
        alive = alive_at(replayed, marks[step - 1] - 1)
        for site in range(3):
            here = alive & (sites.of_life == site)
            assert series.bytes[site, column] == replayed.size[here].sum()
            assert series.blocks[site, column] == here.sum()


@given(replayed=lives(), event=st.integers(-1, EVENTS - 1))
def test_owned_bytes_sum_to_what_is_alive(replayed: ReplayedTrace, event: int) -> None:
    alive = alive_at(replayed, event)
    owners = (np.arange(len(replayed.born)) % 2).astype(np.uint8)
    rows = owned_bytes(alive, replayed.size, owners, index(len(replayed.born)))
    assert sum(row.bytes for row in rows) == replayed.size[alive].sum()
    assert sum(row.count for row in rows) == alive.sum()
    assert [row.bytes for row in rows] == sorted((row.bytes for row in rows), reverse=True)
    assert len({(row.owner, row.site) for row in rows}) == len(rows)


def test_owner_and_site_are_told_in_words() -> None:
    alive = np.array([True, True, False])
    rows = owned_bytes(alive, np.array([512, 1024, 4096]), np.array([1, 1, 1], np.uint8), index(3))
    assert rows == (OwnedBytes(OWNERS[1], "b", 1024, 1), OwnedBytes(OWNERS[1], "a", 512, 1))


def test_a_life_is_alive_from_its_allocation_to_its_free() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    born, died = np.array([-1, 2, 3], np.int32), np.array([4, -1, 3], np.int32)
    replayed = ReplayedTrace(
        **dict.fromkeys(names) | {"born": born, "died": died, "size": np.array([1, 2, 4])}
    )
    alive = [alive_at(replayed, event).tolist() for event in (-1, 1, 2, 3, 4)]
    assert alive == [
        [True, False, False], [True, False, False], [True, True, False], [True, True, False],
        [False, True, False],
    ]  # fmt: skip
    series = site_series(replayed, index(3), [2, 3, 5], 9)
    assert series.steps.tolist() == [1, 2, 3]
    assert series.bytes.tolist() == [[1, 1, 0], [0, 2, 2], [0, 0, 0]]


def test_steps_looked_at_are_evenly_spread_and_end_with_the_last() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    one = {"born": np.array([0], np.int32), "died": np.array([-1], np.int32), "size": np.array([8])}
    replayed = ReplayedTrace(**dict.fromkeys(names) | one)
    series = site_series(replayed, index(1), list(range(1, 102)), 5)
    assert series.steps.tolist() == [1, 26, 51, 76, 101]


def test_sites_are_the_innermost_lines() -> None:
    names = {field.name for field in dataclasses.fields(ReplayedTrace)}
    replayed = ReplayedTrace(**dict.fromkeys(names) | {"stack": np.array([2, 0, 1, 2])})
    stacks = [Stack(site, ()) for site in ("a", "b", "a")]
    sites = index_sites(replayed, stacks)
    assert (sites.names, sites.of_life.tolist()) == (("a", "b"), [0, 0, 1, 0])
