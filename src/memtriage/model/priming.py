"""What `memtriage.prime` expects: blocks to allocate before a program, and what they change."""

from __future__ import annotations

import msgspec

from memtriage.model.units import size


class PrimingCheck(msgspec.Struct, kw_only=True, frozen=True):
    """One simulated trace, without and with the blocks. Sizes are bytes of large segments.

    Attributes:
        name: how the trace differs from the program's own.
        before, after: most bytes reserved without and with the blocks.
    """

    name: str
    before: int
    after: int


class Priming(msgspec.Struct, kw_only=True):
    """The blocks to allocate and free before the model is built, and what is expected of them.

    Sizes are bytes.

    Attributes:
        blocks: sizes, in the order in which they are allocated; empty where priming would not help.
        allocated: most bytes of live blocks.
        reserved_before, reserved_after: most bytes of segments without and with the blocks.
        steps: how many steps these figures are for; 0 where steps are unknown.
        checks: the traces that the choice was simulated on. Without a choice, `after` equals `before`.
        reason: why priming would not help; None where it does.
        allocator_conf: the allocator's settings that the figures are for.
        seconds: how long prediction and search took.
        notes: what was assumed.
        primed: whether the blocks were allocated and freed in this process.
    """

    blocks: list[int]
    allocated: int
    reserved_before: int
    reserved_after: int
    steps: int
    checks: list[PrimingCheck]
    reason: str | None
    allocator_conf: str
    seconds: float
    notes: list[str]
    primed: bool = False

    @property
    def helps(self) -> bool:
        """Whether there are blocks to allocate."""
        return bool(self.blocks)

    def in_words(self) -> str:
        """One line: what is done and expected, or why nothing is."""
        if self.reason is not None:
            return f"priming would not help: {self.reason}"
        blocks = f"{len(self.blocks)} block{'s' if len(self.blocks) > 1 else ''}"
        return (
            f"{blocks} of {size(sum(self.blocks))} in all; expected reserved {size(self.reserved_after)} "
            f"instead of {size(self.reserved_before)} ({self._ratio(self.reserved_after)} instead of "
            f"{self._ratio(self.reserved_before)} of allocated)"
        )

    def _ratio(self, reserved: int) -> str:
        return f"{reserved / self.allocated:.3f}" if self.allocated else "n/a"


def no_priming(reason: str) -> Priming:
    """No blocks, because nothing could be predicted."""
    return Priming(
        blocks=[],
        allocated=0,
        reserved_before=0,
        reserved_after=0,
        steps=0,
        checks=[],
        reason=reason,
        allocator_conf="",
        seconds=0.0,
        notes=[],
    )
