"""Censuses for tests: made up, or left out of a watch, where a real one would walk all objects of pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.model.census import Census, HolderGroup
from memtriage.model.paths import ANY_ITEM, HolderPath
from memtriage.session.schedule.investigation import Investigator
from support.paths import named


def group(
    name: str,
    nbytes: int,
    count: int = 1,
    *,
    token: int = 0,
    device: str = "cpu",
    nodes: int = 0,
    kept: int = 0,
    by_path: Mapping[HolderPath, int] | None = None,
    witnesses: Iterable[int] = (),
    entries: int = 0,
) -> HolderGroup:
    """A group of storages.

    Args:
        name: of its anchor; `losses[*]` for the items of a container.
        nbytes, count: of its storages.
        token: of the object that holds them; 0: unknown.
        device: where they are.
        nodes, kept: autograd nodes that it keeps alive, and their bytes.
        by_path: bytes by whole path; attached to a graph if a path is not the anchor.
        witnesses: tokens of some of the storages.
        entries: objects that the anchor names.
    """
    variable = named(name.removesuffix("[*]"))
    anchor = (*variable, ANY_ITEM) if name.endswith("[*]") else variable
    paths = dict(by_path or {anchor: nbytes})
    return HolderGroup(
        device=device, anchor=anchor, path=max(paths, key=lambda path: paths[path]), count=count,
        nbytes=nbytes, by_path=paths, owners={"variable": nbytes},
        attached=nodes > 0 or any(path != anchor for path in paths),
        holders={token: nbytes} if token else {}, objects=nodes, kept=kept,
        witnesses=frozenset(witnesses), entries=entries,
    )  # fmt: skip


def census(*groups: HolderGroup) -> Census:
    """A census of some groups, without a record of each storage."""
    return Census(storages=[], groups=list(groups), objects=0, nodes=0, seconds=0.0)


def looks_at(*found: Census) -> Callable[[], Any]:
    """Stands for `Look`: each look finds the next of these, then the last one again."""
    left = list(found)

    def look() -> Any:
        now = left.pop(0) if len(left) > 1 else left[0]
        return nullcontext(SimpleNamespace(census=lambda: now))

    return look


def leave_out(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Make all censuses find nothing. Returns what each was asked to do with its view."""
    asked: list[object] = []

    def looked(self: Investigator, also: object, *more: object) -> Census:
        asked.append(also)
        return census()

    monkeypatch.setattr(Investigator, "look", looked)
    return asked
