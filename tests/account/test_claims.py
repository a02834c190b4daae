"""Storages as ranges of addresses that no two share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.account.claims import disjoint_claims, outside_segments, overlaps
from memtriage.model.blocks import DEFAULT_POOL, Segment
from memtriage.model.census import StorageRecord
from support.paths import named


def storage(address: int, nbytes: int, name: str = "x") -> StorageRecord:
    return StorageRecord(
        device="cuda:0", address=address, nbytes=nbytes, owner="variable", path=named(name) if name else None
    )


def claims(*ranges: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Start and end of each claim, and the address of its storage."""
    made = disjoint_claims([storage(address, nbytes) for address, nbytes in ranges])
    return [(claim.start, claim.end, claim.storage.address) for claim in made]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(10, 5), (30, 5)], [(10, 15, 10), (30, 35, 30)]),
        ([(30, 5), (10, 5)], [(10, 15, 10), (30, 35, 30)]),
        ([(10, 5), (15, 5)], [(10, 15, 10), (15, 20, 15)]),
        ([(10, 5), (12, 5)], [(10, 15, 10), (15, 17, 12)]),
        ([(10, 9), (12, 5)], [(10, 19, 10)]),
        ([(10, 5), (10, 9)], [(10, 19, 10)]),
        ([(10, 0), (0, 9), (20, 1)], [(20, 21, 20)]),
        ([], []),
    ],
)
def test_a_byte_belongs_to_the_storage_that_begins_first(
    ranges: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert claims(*ranges) == expected


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), max_size=12))
def test_claims_cover_each_byte_of_a_storage_once(ranges: list[tuple[int, int]]) -> None:
    covered = [byte for start, end, _ in claims(*ranges) for byte in range(start, end)]
    assert covered == sorted({byte for address, size in ranges for byte in range(address, address + size)})


@pytest.mark.parametrize(
    ("start", "end", "shared"),
    [
        (0, 100, [(10, 5), (20, 5)]),
        (12, 22, [(10, 3), (20, 2)]),
        (15, 20, []),
        (14, 15, [(10, 1)]),
        (24, 30, [(20, 1)]),
        (25, 30, []),
        (0, 10, []),
        (0, 11, [(10, 1)]),
    ],
)
def test_claims_that_reach_into_a_range(start: int, end: int, shared: list[tuple[int, int]]) -> None:
    made = disjoint_claims([storage(10, 5), storage(20, 5)])
    assert [(claim.start, size) for claim, size in overlaps(made, start, end)] == shared


def test_what_lies_outside_every_segment_is_told_by_its_holder() -> None:
    segments = [
        Segment(device=0, address=start, size=size, stream=0, pool=(0, 0), expandable=False, blocks=())
        for start, size in ((10, 10), (30, 10))
    ]
    made = disjoint_claims(
        [storage(5, 10, "begins before"), storage(18, 14, "between"), storage(32, 4), storage(90, 7, "")]
    )
    parts = outside_segments(made, segments)
    assert [(part.pool, part.owner, part.label, part.size) for part in parts] == [
        (DEFAULT_POOL, "variable", "begins before", 5),
        (DEFAULT_POOL, "variable", "between", 10),
        (DEFAULT_POOL, "variable", "holder unknown", 7),
    ]
