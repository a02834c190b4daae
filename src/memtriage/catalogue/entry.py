"""What an entry of the catalogue is: words, rules for clearing, and a finder. No library is imported here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtriage.model.census import Owner
from memtriage.model.holders import ClearPolicy, Condition, HolderKind


@dataclass(slots=True)
class Place:
    """One object of the program that holds memory for an entry. It keeps that object, but no tensor, alive.

    Attributes:
        path: where it is, in words of the program.
        values: gives the objects in which the tensors are; called again each time.
        clear: releases them. None where the whole entry has one action (`Holder.clear_all`), or none.
        entries: how many values it caches; None where that means nothing.
        other: bytes that are no tensor's, by device (`cuda:N`, `host`).
    """

    path: str
    values: Callable[[], Iterable[Any]] = tuple
    clear: Callable[[], object] | None = None
    entries: int | None = None
    other: Mapping[str, int] = field(default_factory=dict)


if TYPE_CHECKING:
    from memtriage.catalogue.scene import Scene

PlaceFinder = Callable[["Scene"], Iterable[Place]]
"""Finds an entry's places by what is loaded and by attributes: no import, no call into the library."""


@dataclass(frozen=True, slots=True)
class Span:
    """Versions that have an entry: from `since` on, and before `before` (None: no end); `site` says where."""

    since: tuple[int, ...] = ()
    before: tuple[int, ...] | None = None
    site: str = ""

    def covers(self, version: tuple[int, ...]) -> bool:
        """Whether a release, such as (2, 14, 1), is one of these."""
        return self.since <= version and (self.before is None or version < self.before)


@dataclass(frozen=True, slots=True)
class Site:
    """The library's functions that allocate what an entry keeps, as a recorded stack shows them.

    Attributes:
        path: a part of their files' paths, e.g. `transformer_engine/`.
        functions: their names.
    """

    path: str
    functions: frozenset[str]


@dataclass(frozen=True, slots=True)
class Holder:
    """An entry of the catalogue: one known way in which a library keeps memory.

    Attributes:
        name: how it is called everywhere, e.g. `te.fp8_workspaces`.
        library: the library in words.
        package: the module of `sys.modules` without which there is nothing to find; empty: always looked for.
        kind: what it keeps.
        symbol: the name in the library's source.
        holds: what it holds.
        find: finds it.
        clears: what clears it, in words; empty where nothing does.
        refills: how it fills again.
        policy: whether `clear_caches` may clear it.
        why: why the policy is not `automatic`.
        forbidden: conditions under which it must not be cleared.
        clear_all: clears all places at once, where no place has an action of its own.
        after_collection: cleared when garbage has been collected: it frees memory, and drops no references.
        distributions: names under which it may be installed: the first that is gives its version.
        spans: versions that have it; empty: all.
        owner: what its storages are, where it knows better than their place tells.
        transient: keeps graphs of finished steps alive: a graph that only it holds is not pending.
        sites: where the library allocates it: recordings have stacks, and no objects.
        keeps: it keeps what it leads to; False for a mark on tensors that others hold.
    """

    name: str
    library: str
    package: str
    kind: HolderKind
    symbol: str
    holds: str
    find: PlaceFinder
    clears: str = ""
    refills: str = ""
    policy: ClearPolicy = "automatic"
    why: str = ""
    forbidden: tuple[Condition, ...] = ("graphs",)
    clear_all: Callable[[], object] | None = None
    after_collection: bool = False
    distributions: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    owner: Owner | None = None
    transient: bool = False
    sites: tuple[Site, ...] = ()
    keeps: bool = True
