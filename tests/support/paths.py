"""Holder paths for tests of what only tells one path from another, or prints it."""

from __future__ import annotations

from memtriage.model.paths import ANY_ITEM, HolderPath, Segment, SegmentKind


def named(name: str) -> HolderPath:
    """A path of one segment that prints as its name."""
    return (Segment(SegmentKind.VARIABLE, name),)


def local(function: str, variable: str) -> HolderPath:
    """A variable of a running function."""
    return Segment(SegmentKind.FRAME, function), *named(variable)


def items_of(function: str, variable: str) -> HolderPath:
    """What is in a container that a running function's variable refers to."""
    return *local(function, variable), ANY_ITEM


def of_module(module: str, variable: str) -> HolderPath:
    """A module's variable."""
    return Segment(SegmentKind.MODULE, module), *named(variable)
