"""What `memtriage.prime` expects: blocks to allocate before a program, and what they change."""

from __future__ import annotations

from typing import Final

import msgspec

from memtriage.model.units import size

POOLS_BY_THREAD: Final = (2, 8)
"""Version of torch from which a pool serves only the thread that asks for it."""


class PrimingCheck(msgspec.Struct, kw_only=True, frozen=True):
    """One simulated trace, or the program under other settings, without and with the blocks.

    Sizes are bytes of large segments.

    Attributes:
        name: how the trace differs from the program's own, or the settings.
        before, after: peak of reserved bytes without and with the blocks.
    """

    name: str
    before: int
    after: int


class StatePool(msgspec.Struct, kw_only=True, frozen=True):
    """A pool for the states of an optimizer.

    Attributes:
        size: bytes of its segment.
        parameters: bytes of the optimizer's parameters, by which the program's optimizer is recognized.
    """

    size: int
    parameters: int


class Priming(msgspec.Struct, kw_only=True):
    """The blocks to allocate and free before the model is built, and what is expected of them.

    Sizes are bytes.

    Attributes:
        blocks: sizes, in the order in which they are allocated; empty if priming would not help.
        allocated: most bytes of live blocks.
        reserved_before, reserved_after: most bytes of segments without and with the blocks.
        steps: how many steps these figures are for; 0 if unknown.
        checks: the traces that the choice was simulated on. If nothing was chosen, `after` equals `before`.
        settings: allocator settings to use along with the blocks, in the syntax of `PYTORCH_CUDA_ALLOC_CONF`;
            empty if they would not help more.
        pools: pools for the states of optimizers, in the order of the optimizers' first steps; empty if they
            would not help more.
        reserved_without_pools: `reserved_after` if no pool can be made: on another stream, in a capture or
            without memory for it. 0 without pools.
        tried: the result of the best blocks under the program's settings (without a name), under others and
            with pools. If no blocks pass the checks, `after` is the figure of the unchanged program.
        reason: why priming would not help; None if it does.
        allocator_conf: the program's own settings of the allocator.
        seconds: how long prediction and search took.
        notes: what was assumed.
        primed: whether the blocks were allocated and freed in this process.
    """

    blocks: list[int] = []
    allocated: int = 0
    reserved_before: int = 0
    reserved_after: int = 0
    steps: int = 0
    checks: list[PrimingCheck] = []
    settings: str = ""
    pools: list[StatePool] = []
    reserved_without_pools: int = 0
    tried: list[PrimingCheck] = []
    reason: str | None = None
    allocator_conf: str = ""
    seconds: float = 0.0
    notes: list[str] = []
    primed: bool = False

    @property
    def helps(self) -> bool:
        """Whether there is something to do."""
        return bool(self.blocks or self.settings or self.pools)

    def in_words(self) -> str:
        """One line: what is done and what is expected of it, or why nothing is done."""
        if self.reason is not None:
            return f"priming would not help: {self.reason}"
        count = len(self.blocks)
        blocks = f"{count} block{'s' if count > 1 else ''} of {size(sum(self.blocks))} in all"
        pooled = size(sum(pool.size for pool in self.pools))
        pools = f"{pooled} for the optimizer's states" if self.pools else ""
        without = f", {size(self.reserved_without_pools)} if no pool can be made" if self.pools else ""
        done = " and ".join(filter(None, (blocks if count else "", pools, self.settings)))
        return (
            f"{done}; expected reserved {size(self.reserved_after)} "
            f"instead of {size(self.reserved_before)} ({self._ratio(self.reserved_after)} instead of "
            f"{self._ratio(self.reserved_before)} of allocated){without}"
        )

    def _ratio(self, reserved: int) -> str:
        return f"{reserved / self.allocated:.3f}" if self.allocated else "n/a"
