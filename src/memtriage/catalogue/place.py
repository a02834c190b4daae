"""Where an entry of the catalogue was found: one object of the program that holds memory for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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
