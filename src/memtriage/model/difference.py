"""What two runs, predictions or snapshots hold at their peaks, and the difference. Sizes are bytes."""

from __future__ import annotations

from typing import Literal

import msgspec

Compared = Literal["run", "prediction", "snapshot"]
"""What is compared with another of its kind."""


class HeldRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that have the same owner, module, line, phase and rank.

    Attributes:
        owner: what they are: `parameter`, `activation`, ...
        module: path of the module, or of what the program holds; None if unknown.
        site: `file.py:line in function` that made them; None if unknown.
        phase: in which they were made; None if unknown.
        rank: whose they are; None in a job without ranks.
        bytes: how many.
    """

    owner: str
    module: str | None = None
    site: str | None = None
    phase: str | None = None
    rank: int | None = None
    bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side: all that is held at one instant.

    Attributes:
        of: what it is.
        name: what it was read from.
        instant: when, such as `the peak of backward`.
        total: the sum of the rows.
        rows: the bytes.
        others: the same for other instants, by their names: where the peak has moved, its rows are compared
            with what the first side had at that instant.
        figures: figures that the total does not have, such as `reserved`.
        context: what the figures depend on: versions, settings, arguments, shapes.
    """

    of: Compared
    name: str
    instant: str
    total: int
    rows: list[HeldRow]
    others: dict[str, list[HeldRow]] = {}
    figures: dict[str, int] = {}
    context: dict[str, str] = {}


class DifferenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; what it says of the place is that of the second side, if that has it.

    Attributes:
        owner, module, site, phase, rank: as in `HeldRow`.
        before, after: bytes of the two sides.
        difference: `after - before`.
    """

    owner: str
    module: str | None
    site: str | None
    phase: str | None
    rank: int | None
    before: int
    after: int
    difference: int


class FigureChange(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that is not in the table, on both sides; None where a side does not have it."""

    before: int | None
    after: int | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Why one needs more memory than the other.

    Attributes:
        of: what was compared.
        difference: bytes that the second holds at its peak beyond the first; negative if it holds less.
        summary: the answer in one sentence.
        rows: what makes the difference: first what goes the same way, largest first. They sum to it.
        suspects: what else differs: versions, settings, arguments, shapes, in words.
        before, after: bytes at the two peaks.
        figures: other figures of both, by name.
    """

    schema: int = 1
    of: Compared
    difference: int
    summary: str
    rows: list[DifferenceRow]
    suspects: list[str]
    before: int
    after: int
    figures: dict[str, FigureChange]


class GateResult(Difference, frozen=True, kw_only=True):
    """A difference, and whether it is too much.

    Attributes:
        limit: the bound that is nearest to what it bounds, or furthest below it.
        peak: that: the allocated bytes at the peak, against those of the base and the tolerance; or the
            device memory in all, against the budget.
        exceeded: whether it is above the limit.
    """

    limit: int
    peak: int
    exceeded: bool
