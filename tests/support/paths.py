"""Holder paths for tests that compare or print paths."""

from __future__ import annotations

from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind


def named(name: str) -> HolderPath:
    """A path of one segment that prints as its name."""
    return (PathSegment(SegmentKind.VARIABLE, name),)


def local(function: str, variable: str) -> HolderPath:
    """A variable of a running function."""
    return PathSegment(SegmentKind.FRAME, function), *named(variable)


def items_of(function: str, variable: str) -> HolderPath:
    """What is in a container that a running function's variable refers to."""
    return *local(function, variable), ANY_ITEM


def of_module(module: str, variable: str) -> HolderPath:
    """A module's variable."""
    return PathSegment(SegmentKind.MODULE, module), *named(variable)


def attribute(*names: str) -> HolderPath:
    """Attributes, each of the one before it."""
    return tuple(PathSegment(SegmentKind.ATTRIBUTE, name) for name in names)


def item(place: str) -> PathSegment:
    """An item of a container: its place or key as Python writes it."""
    return PathSegment(SegmentKind.ITEM, place)


def graph(node: str, saved: str) -> HolderPath:
    """What a node of the autograd graph saved."""
    return PathSegment(SegmentKind.GRAD_FN, node), PathSegment(SegmentKind.SAVED, saved)
