"""Which entries the installed versions have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.catalogue.catalogue import BUILT_IN
from memtriage.catalogue.entry import Span
from memtriage.catalogue.installed import holders_here, installed_version, release, versions_in_words
from support.builds import versions_of_torch

ENTRIES = {holder.name: holder for holder in BUILT_IN}


@pytest.mark.parametrize(
    ("version", "applies"),
    [(None, False), ("1.13.0", False), ("2.1.0", True), ("2.14.1+cu130", True), ("2.15.0", False)],
)
def test_the_leak_of_tensor_objects_is_told_by_version(version: str | None, applies: bool) -> None:
    (here,) = holders_here([ENTRIES["te.tensor_objects"]], lambda holder: version)
    assert (here.applies, here.version) == (applies, version)
    assert here.reason


def test_an_entry_without_a_library_applies_everywhere() -> None:
    assert all(holder.applies for holder in holders_here([ENTRIES["generic.lru_cache"]]))


def test_the_version_of_torch_is_the_installed_one() -> None:
    assert installed_version(ENTRIES["torch.pinned_cache"]) in versions_of_torch()


@given(
    numbers=st.lists(st.integers(0, 99), min_size=1, max_size=4),
    suffix=st.sampled_from(["", "+cu130", "rc1"]),
)
def test_a_release_is_its_leading_numbers(numbers: list[int], suffix: str) -> None:
    text = ".".join(map(str, numbers)) + suffix
    assert release(text) == tuple(numbers)


def test_spans_in_words() -> None:
    assert versions_in_words([]) == "all"
    assert versions_in_words([Span(since=(2, 0), before=(2, 15))]) == "from 2.0 on, fixed in 2.15"
    assert versions_in_words([Span(before=(2, 15), site="Class"), Span(since=(3,))]) == (
        "Class (fixed in 2.15); from 3 on"
    )
