"""The ranks of a run in groups: which behave alike, and which stand out."""

from __future__ import annotations

from typing import Literal

import msgspec

RankFigureName = Literal["growth", "allocated", "reserved", "peak", "resident", "steps", "marks"]
"""Figures by which ranks are compared: `growth` in bytes per step, `steps` and `marks` counts, the others in
bytes."""


class RankFigures(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of one rank. Sizes in bytes, None where unknown, or where the rank did not come so far.

    Attributes:
        rank: its number.
        steps: completed optimizer steps.
        marks: lines of marks that it recorded.
        killed: it wrote no end and is gone.
        growth: bytes per step by which allocated keeps rising; 0 when it does not.
        base: allocated without what has grown since warm-up, at the mark where ranks are compared; None when
            the rank did not come as far as that mark.
        allocated, reserved: at that mark, on the rank's fullest device.
        peak: that allocator's own highest figure, of the whole run.
        resident: the process's resident set at that mark.
    """

    rank: int
    steps: int = 0
    marks: int = 0
    killed: bool = False
    growth: int | None = None
    base: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    resident: int | None = None


class RankDifference(msgspec.Struct, kw_only=True):
    """One figure in which a rank is far from its peers.

    Attributes:
        figure: which.
        value: the rank's.
        usual: the median of its peers.
        spread: the median absolute deviation of its peers.
        peers: how many those are: all other ranks for `growth`, `steps` and `marks`, for the rest the other
            ranks of the group that the rank belongs to.
    """

    figure: RankFigureName
    value: int
    usual: int
    spread: int
    peers: int


class RankSpan(msgspec.Struct, kw_only=True):
    """A figure over the ranks of a group: its lowest, its median and its highest value."""

    low: int
    usual: int
    high: int


class RankGroup(msgspec.Struct, kw_only=True):
    """Ranks that behave alike: the stages of a pipeline, for example, are a group each.

    Attributes:
        ranks: their numbers, ascending; those that stand out are not among them.
        figures: what they have, by the figure's name; a figure that no rank has is left out.
    """

    ranks: list[int]
    figures: dict[str, RankSpan]


class RankOutlier(msgspec.Struct, kw_only=True):
    """A rank that stands out.

    Attributes:
        rank: its number.
        group: which of the groups it is compared with; None when it did not come as far as the others.
        killed: it wrote no end and is gone.
        last_step: completed optimizer steps.
        differs: in what, what matters most first; empty when being killed is all.
    """

    rank: int
    group: int | None = None
    killed: bool = False
    last_step: int
    differs: list[RankDifference] = msgspec.field(default_factory=list)


class RankGroups(msgspec.Struct, kw_only=True):
    """All ranks of a run in groups.

    Attributes:
        step: the step at which they are compared; None when no two ranks have a mark to compare at.
        mark: the name of that mark.
        device: whose memory is compared: `cuda` (of each rank the fullest GPU), or `cpu`, where `allocated`
            is what malloc has handed out and `reserved` what it has from the kernel; None where some ranks
            have a GPU and others have none.
        groups: the largest first.
        outliers: by rank.
        figures: what the ranks were compared by, by rank.
    """

    step: int | None = None
    mark: str | None = None
    device: str | None = None
    groups: list[RankGroup] = msgspec.field(default_factory=list)
    outliers: list[RankOutlier] = msgspec.field(default_factory=list)
    figures: list[RankFigures] = msgspec.field(default_factory=list)
