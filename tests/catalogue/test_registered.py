"""Entries that the program registers itself: named, measured and cleared like the others."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtriage
from memtriage.catalogue.catalogue import holders

CACHE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    CACHE["rope"] = torch.ones(1000)
    yield
    CACHE.clear()
    gc.unfreeze()


def test_it_is_cleared_with_the_others_until_it_is_removed() -> None:
    registration = memtriage.register_holder("rope tables", lambda: CACHE, CACHE.clear)
    try:
        (outcome,) = memtriage.clear_caches(["rope tables"]).entries
        assert (outcome.status, outcome.freed) == ("cleared", {"cpu": 4000})
        CACHE["rope"] = torch.ones(1000)
        assert "rope tables" in [holder.name for holder in memtriage.clear_caches().cleared]
        assert CACHE == {}
    finally:
        registration.remove()
    registration.remove()
    assert "rope tables" not in [holder.name for holder in holders()]
    with pytest.raises(ValueError, match="rope tables"):
        memtriage.clear_caches(["rope tables"])


def test_one_without_an_action_is_told_and_left_alone() -> None:
    registration = memtriage.register_holder("rope tables", lambda: CACHE)
    try:
        (outcome,) = memtriage.clear_caches(["rope tables"]).entries
        assert (outcome.status, outcome.before) == ("skipped", {"cpu": 4000})
    finally:
        registration.remove()


def test_one_on_request_waits_for_its_kind() -> None:
    registration = memtriage.register_holder("rope tables", lambda: CACHE, CACHE.clear, automatic=False)
    try:
        assert "rope tables" in [holder.name for holder in memtriage.clear_caches().skipped]
        assert CACHE
        assert memtriage.clear_caches(["registered"]).cleared[0].freed == {"cpu": 4000}
    finally:
        registration.remove()


def test_a_name_registered_again_replaces_the_first() -> None:
    first = memtriage.register_holder("rope tables", lambda: None)
    second = memtriage.register_holder("rope tables", lambda: CACHE, CACHE.clear)
    try:
        first.remove()  # is no longer the one of that name
        assert memtriage.clear_caches(["rope tables"]).cleared
    finally:
        second.remove()


def test_a_census_names_it() -> None:
    registration = memtriage.register_holder("rope tables", lambda: CACHE, CACHE.clear)
    try:
        address = CACHE["rope"].data_ptr()
        (record,) = [storage for storage in memtriage.census().storages if storage.address == address]
    finally:
        registration.remove()
    assert (record.known, record.owner) == ("rope tables", "known cache")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"forbidden": ["sometimes"]}, "sometimes"),
        ({"kind": "nonsense"}, "nonsense"),
        ({"name": "workspace"}, "workspace"),
        ({"name": ""}, "called"),
    ],
)
def test_what_cannot_be_registered_is_an_error_that_says_why(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        memtriage.register_holder(**({"name": "rope", "values": lambda: CACHE} | options))
