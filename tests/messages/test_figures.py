"""The rules on figures: each one decides where it should, at its threshold and in its order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.figures import judge_figures
from memtriage.messages.grammar.message import OomFields

MIB = 1024**2
GIB = 1024**3
OTHERS = "other_process_or_outside_allocator"

FULL = OomFields(
    requested=2 * GIB, total=80 * GIB, free=GIB, allocated=78 * GIB, reserved_unallocated=256 * MIB
)
"""A card that is plainly full."""


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        pytest.param({}, ("does_not_fit",), id="full"),
        pytest.param({"requested": 2**46}, ("absurd_request",), id="absurd"),
        pytest.param({"allocated": 81 * GIB}, ("system_memory_fallback", "does_not_fit"), id="spilled"),
        pytest.param({"requested": 81 * GIB}, ("does_not_fit",), id="larger-than-the-card"),
        pytest.param({"allowed": 78 * GIB}, ("allocator_limit",), id="cap"),
        pytest.param({"allowed": 79 * GIB}, ("does_not_fit",), id="cap-of-nearly-all"),
        pytest.param({"allowed": 40 * GIB, "allocated": 20 * GIB}, (OTHERS,), id="cap-not-reached"),
        pytest.param(
            {"free": None, "allocated": GIB, "requested": 4 * GIB},
            ("driver_refused_though_free", OTHERS, "unknown"),
            id="free-unknown-with-room",
        ),
        pytest.param({"free": None}, ("unknown", "does_not_fit", OTHERS), id="free-unknown"),
        pytest.param({"allocated": None}, ("unknown", "does_not_fit", OTHERS), id="allocated-unknown"),
        pytest.param({"total": None}, ("unknown", "does_not_fit", OTHERS), id="total-unknown"),
        pytest.param(
            {"free": 4 * GIB, "allocated": 70 * GIB}, ("driver_refused_though_free", OTHERS), id="refused"
        ),
        pytest.param(
            {"free": 2 * GIB + 64 * MIB, "allocated": 76 * GIB},
            ("driver_refused_though_free", "does_not_fit"),
            id="refused-narrowly",
        ),
        pytest.param(
            {"free": 2 * GIB + 63 * MIB, "allocated": 76 * GIB},
            ("does_not_fit", "driver_refused_though_free"),
            id="covered-on-a-full-card",
        ),
        pytest.param(
            {"allocated": 70 * GIB, "reserved_unallocated": 7 * GIB, "requested": 9 * GIB},
            ("does_not_fit",),
            id="holes-too-small",
        ),
        pytest.param({"allocated": 30 * GIB}, (OTHERS,), id="others"),
        pytest.param(
            {"allocated": 30 * GIB, "reserved_unallocated": 20 * GIB},
            (OTHERS, "fragmentation"),
            id="others-and-holes",
        ),
        pytest.param(
            {"private_pools": 3 * GIB}, ("private_pools", "does_not_fit"), id="parked-in-graph-pools"
        ),
        pytest.param(
            {"allocated": 50 * GIB, "reserved_unallocated": 28 * GIB}, ("fragmentation",), id="fragmentation"
        ),
        pytest.param(
            {"allocated": 67 * GIB, "reserved_unallocated": 11 * GIB}, ("fragmentation",), id="below-live"
        ),
        pytest.param(
            {"allocated": 68 * GIB, "reserved_unallocated": 10 * GIB},
            ("fragmentation", "does_not_fit"),
            id="mostly-live",
        ),
        pytest.param(
            {"allocated": 75 * GIB, "reserved_unallocated": 3 * GIB},
            ("fragmentation", "does_not_fit"),
            id="fragmentation-on-a-full-card",
        ),
        pytest.param(
            {"allocated": 60 * GIB, "reserved_unallocated": 10 * GIB, "free": 9 * GIB, "requested": 12 * GIB},
            ("fragmentation", "does_not_fit"),
            id="holes-and-free-together",
        ),
    ],
)
def test_rules(change: dict[str, int | None], labels: tuple[str, ...]) -> None:
    assert judge_figures(replace(FULL, **change)) == labels


SMALL_MARGIN = {"free": 4 * GIB, "allocated": 68 * GIB, "allowed": 80 * GIB}
HOLES_AND_FREE = {"allocated": 67 * GIB, "reserved_unallocated": 10 * GIB, "free": 3 * GIB}
OTHERS_HAVE = {"reserved_unallocated": GIB, "free": GIB}


@pytest.mark.parametrize(
    ("change", "labels"),
    [
        pytest.param({"requested": 2**46 - 1}, ("does_not_fit",), id="nearly-absurd"),
        pytest.param(
            {"allocated": 80 * GIB, "reserved_unallocated": 64 * MIB}, ("does_not_fit",), id="all-allocated"
        ),
        pytest.param(
            {"allocated": 80 * GIB, "reserved_unallocated": 64 * MIB + 1},
            ("system_memory_fallback", "does_not_fit"),
            id="more-reserved-than-the-card",
        ),
        pytest.param(
            {"allocated": None, "free": 2 * GIB + 64 * MIB},
            ("driver_refused_though_free", "unknown"),
            id="free-alone-refused",
        ),
        pytest.param(
            {"allocated": None, "free": 2 * GIB + 64 * MIB - 1},
            ("unknown", "does_not_fit", OTHERS),
            id="free-alone-barely",
        ),
        pytest.param(
            {"requested": 80 * GIB, "allocated": 0, "free": 80 * GIB - 64 * MIB, "reserved_unallocated": 0},
            (OTHERS, "does_not_fit"),
            id="as-large-as-the-card",
        ),
        pytest.param(
            {"free": None, "reserved_unallocated": 4 * GIB, "allocated": 40 * GIB, "requested": 4 * GIB},
            ("driver_refused_though_free", OTHERS, "unknown"),
            id="room-at-60-percent",
        ),
        pytest.param(
            {"free": None, "reserved_unallocated": 4 * GIB, "allocated": 40 * GIB, "requested": 4 * GIB + 1},
            ("unknown", "does_not_fit", OTHERS),
            id="no-room-above-60-percent",
        ),
        pytest.param(
            {"free": None, "requested": 2 * GIB}, ("unknown", "does_not_fit", OTHERS), id="just-fits"
        ),
        pytest.param({"free": None, "requested": 2 * GIB + 1}, ("does_not_fit",), id="a-byte-too-much"),
        pytest.param(
            {"allocated": 60 * GIB, "reserved_unallocated": GIB, "requested": GIB, "free": 0},
            (OTHERS, "fragmentation"),
            id="large-holes",
        ),
        pytest.param(
            {"allocated": 60 * GIB, "reserved_unallocated": GIB - 1, "requested": GIB - 1, "free": 0},
            (OTHERS,),
            id="small-holes",
        ),
        pytest.param(
            HOLES_AND_FREE | {"requested": 9 * GIB}, ("fragmentation",), id="compaction-leaves-5-percent"
        ),
        pytest.param(
            HOLES_AND_FREE | {"requested": 9 * GIB + 1},
            ("fragmentation", "does_not_fit"),
            id="compaction-leaves-less",
        ),
        pytest.param(
            {"free": 2 * GIB + 256 * MIB - 1, "allocated": 76 * GIB},
            ("driver_refused_though_free", "does_not_fit"),
            id="close",
        ),
        pytest.param(
            {"free": 2 * GIB + 256 * MIB, "allocated": 76 * GIB},
            ("driver_refused_though_free",),
            id="not-close",
        ),
        pytest.param(
            {"total": 20 * GIB, "free": GIB + 205 * MIB, "requested": GIB, "allocated": 18 * GIB},
            ("driver_refused_though_free",),
            id="not-close-on-a-small-card",
        ),
        pytest.param(
            {"total": 20 * GIB, "free": GIB + 204 * MIB, "requested": GIB, "allocated": 18 * GIB},
            ("driver_refused_though_free", "does_not_fit"),
            id="close-on-a-small-card",
        ),
        pytest.param(
            SMALL_MARGIN | {"reserved_unallocated": 6 * GIB},
            ("driver_refused_though_free", "fragmentation"),
            id="not-near-the-cap",
        ),
        pytest.param(
            SMALL_MARGIN | {"reserved_unallocated": 6 * GIB + 1},
            ("driver_refused_though_free", "allocator_limit", "fragmentation"),
            id="near-the-cap",
        ),
        pytest.param(
            OTHERS_HAVE | {"allocated": 61 * GIB + 1},
            ("does_not_fit", "fragmentation", OTHERS),
            id="others-have-nearly-a-fifth",
        ),
        pytest.param(
            OTHERS_HAVE | {"allocated": 61 * GIB}, (OTHERS, "fragmentation"), id="others-have-a-fifth"
        ),
        pytest.param(
            OTHERS_HAVE | {"allocated": 73 * GIB + 1, "requested": 3 * GIB},
            ("does_not_fit",),
            id="others-have-little",
        ),
        pytest.param(
            OTHERS_HAVE | {"allocated": 73 * GIB, "requested": 3 * GIB},
            ("does_not_fit", OTHERS),
            id="others-cannot-be-ruled-out",
        ),
    ],
)
def test_each_threshold_decides_at_its_value(change: dict[str, int | None], labels: tuple[str, ...]) -> None:
    assert judge_figures(replace(FULL, **change)) == labels


def test_holes_that_were_cut_off_matter_only_where_they_decide() -> None:
    full = replace(FULL, reserved_unallocated=None)
    assert judge_figures(full)[0] == "does_not_fit"
    open_question = replace(full, allocated=40 * GIB)
    assert judge_figures(open_question) == ("unknown", "fragmentation", OTHERS)


AMOUNT = st.none() | st.integers(0, 2**47)


@settings(deadline=None)
@given(st.builds(OomFields, st.none(), AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT))
def test_any_figures_get_one_to_three_different_labels(fields: OomFields) -> None:
    labels = judge_figures(fields)
    assert 1 <= len(labels) <= 3
    assert len(set(labels)) == len(labels)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_request_that_free_memory_covers_never_does_not_fit(
    asked: int, free: int, live: int, holes: int
) -> None:
    fields = OomFields(
        requested=asked * MIB,
        total=(asked + free + live + holes + 128) * MIB,
        free=(asked + 64 + free) * MIB,
        allocated=live * MIB,
        reserved_unallocated=holes * MIB,
    )
    assert judge_figures(fields)[0] == "driver_refused_though_free"


@pytest.mark.parametrize(
    ("outside", "labels"),
    [
        pytest.param(858993460, (OTHERS, "does_not_fit"), id="forty-percent-alone"),
        pytest.param(858993459, ("does_not_fit", OTHERS), id="less-than-forty"),
        pytest.param(512 * MIB, ("does_not_fit", OTHERS), id="a-quarter-cannot-be-ruled-out"),
        pytest.param(512 * MIB - 1, ("does_not_fit",), id="less-than-a-quarter"),
    ],
)
def test_a_small_card_has_what_one_process_takes_outside(outside: int, labels: tuple[str, ...]) -> None:
    allocated = 2 * GIB - 256 * MIB - outside
    small = OomFields(
        requested=512 * MIB, total=2 * GIB, free=256 * MIB, allocated=allocated, reserved_unallocated=0
    )
    assert judge_figures(small) == labels


def test_a_request_of_all_that_is_free_is_covered_barely() -> None:
    full = replace(FULL, free=2 * GIB, allocated=77 * GIB, reserved_unallocated=0)
    assert judge_figures(full) == ("does_not_fit", "driver_refused_though_free")
    assert judge_figures(replace(full, free=2 * GIB - 1)) == ("does_not_fit",)
