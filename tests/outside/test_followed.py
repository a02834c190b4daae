"""Censuses of a process that is read again and again, as lines of a record."""

from __future__ import annotations

import pytest

from memtriage.outside.census import OutsideCensus
from memtriage.outside.followed import FollowedOutside


@pytest.mark.parametrize(
    ("missing", "proves"), [([], True), (["searched 10 objects until the time was over"], False)]
)
def test_a_part_that_was_cut_short_does_not_prove_that_a_holder_is_gone(
    missing: list[str], proves: bool
) -> None:
    census = OutsideCensus(
        groups=[], storages=[], details={}, at=1.0, objects=10, nodes=0, moved=None, seconds=0.1,
        stopped_s=0.0, missing=missing, notes=[],
    )  # fmt: skip
    assert FollowedOutside().add(census, 1.0, program_only=True).between is proves
