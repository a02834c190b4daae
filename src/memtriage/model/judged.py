"""Whether growth on a device could be judged, and how small a leak would have been detected."""

from __future__ import annotations

from typing import Literal

import msgspec

from memtriage.model.bounds import Whole

JudgedScale = Literal["step", "microbatch", "time"]
"""What a counter was followed by: optimizer steps, backwards (where no optimizer is seen), or seconds."""


class DetectionLimit(msgspec.Struct, frozen=True):
    """The smallest steady growth that would have been found, 99 times in 100.

    Attributes:
        bytes: growth per step or second.
        per: `step` also where the program has no optimizer and each of its backwards counts as a step.
    """

    bytes: Whole
    per: Literal["step", "second"]


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What the judgment of one device rests on.

    Attributes:
        scale: None where nothing could be followed.
        points: readings of the counter on that scale.
        detection_limit: None where growth was not judged, or is there.
        reason: in one sentence, why growth was not judged; None where it was.
        note: what is no leak, and explains why the counter goes up and down; None where there is nothing.
    """

    scale: JudgedScale | None = None
    points: Whole = 0
    detection_limit: DetectionLimit | None = None
    reason: str | None = None
    note: str | None = None
