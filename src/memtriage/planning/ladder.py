"""The ladder: every rung, in order of cost."""

from __future__ import annotations

from memtriage.planning.changes import Rung
from memtriage.planning.rungs import settings, sharding
from memtriage.planning.rungs.adapters import LORA
from memtriage.planning.rungs.checkpointing import CHECKPOINTING
from memtriage.planning.rungs.knobs import MICRO_BATCH
from memtriage.planning.rungs.loss import CHUNKED_LOSS
from memtriage.planning.rungs.optimizers import EIGHT_BIT, OFFLOAD, OPTIMIZER_STEP
from memtriage.planning.rungs.precision import AUTOCAST, WHOLE
from memtriage.planning.rungs.settings import ATTENTION, SET_TO_NONE


def ladder(conf: str, world_size: int) -> tuple[Rung, ...]:
    """The rungs for a program whose allocator is configured so, in a job of so many GPUs.

    First what costs no time and changes at most the rounding; then the order of M4; last what changes the
    task, which is taken on request only.
    """
    return (
        settings.allocator_rung(conf),
        settings.primed_rung(conf),
        SET_TO_NONE,
        ATTENTION,
        OPTIMIZER_STEP,
        MICRO_BATCH,
        AUTOCAST,
        CHUNKED_LOSS,
        CHECKPOINTING,
        EIGHT_BIT,
        sharding.rung(world_size),
        WHOLE,
        OFFLOAD,
        LORA,
    )
