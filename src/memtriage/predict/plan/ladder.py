"""The ladder: every rung, in order of cost."""

from __future__ import annotations

from memtriage.predict.plan.changes import Rung
from memtriage.predict.plan.rungs import allocator, sharding
from memtriage.predict.plan.rungs.adapters import LORA
from memtriage.predict.plan.rungs.attention import ATTENTION
from memtriage.predict.plan.rungs.checkpointing import CHECKPOINTING
from memtriage.predict.plan.rungs.gradients import SET_TO_NONE
from memtriage.predict.plan.rungs.knobs import MICRO_BATCH, SHORTER
from memtriage.predict.plan.rungs.loss import CHUNKED_LOSS
from memtriage.predict.plan.rungs.optimizer_state import EIGHT_BIT, OFFLOAD
from memtriage.predict.plan.rungs.optimizer_step import OPTIMIZER_STEP
from memtriage.predict.plan.rungs.precision import AUTOCAST, WHOLE
from memtriage.predict.plan.rungs.quantized import QLORA


def ladder(conf: str, world_size: int) -> tuple[Rung, ...]:
    """The rungs for a program whose allocator is configured so, in a job of so many GPUs.

    First what costs no time and changes at most the rounding; then the order of M4; last what changes the
    task, which is taken on request only.
    """
    return (
        allocator.rung(conf),
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
        QLORA,
        SHORTER,
    )
