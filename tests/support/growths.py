"""What counters and censuses show of a program that grows, for tests of its judgment."""

from __future__ import annotations

from typing import Any

from memtriage.diagnose.growth.history import HeldSize, Holding
from memtriage.diagnose.growth.holders import DataGrowth, GrowingData, HolderGrowth
from memtriage.diagnose.growth.proof import Proof
from memtriage.diagnose.growth.trend import GrowthEstimate
from memtriage.diagnose.judge import ScaleEvidence
from memtriage.model.census import HolderGroup
from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from memtriage.model.position import Scale, TrainingPosition
from memtriage.model.units import MIB
from support.paths import items_of, of_module

LOSSES = items_of("main", "losses")
HOLDER = (*LOSSES, PathSegment(SegmentKind.GRAD_FN, "MulBackward0"), PathSegment(SegmentKind.SAVED, "self"))
TEXTS = (*of_module("train", "texts"), ANY_ITEM)
PROVEN = Proof("proven", MIB, 3, 4)


def evidence(
    rate: float | None = None, *, scale: Scale = "step", counter: str = "cpu", limit: int | None = None,
    used: int | None = None, step: int = 20, microbatches: int = 1, into_step: int = 0,
    collector_off: bool = False, state: Any = "growing",
) -> ScaleEvidence:  # fmt: skip
    """Evidence of a run whose counter grows by `rate` from position 4 on; without a rate there is none."""
    estimates = {} if rate is None else {counter: GrowthEstimate(state, rate, 0.9 * rate, 1.1 * rate, 4)}
    return ScaleEvidence(
        scale,
        TrainingPosition(
            step=step, microbatch=into_step, microbatches_per_step=microbatches, time_s=float(step)
        ),
        estimates,
        {} if limit is None else {counter: limit},
        {} if used is None else {counter: used},
        collector_off,
    )


def grown(
    anchor: HolderPath = LOSSES, holder: HolderPath = HOLDER, *, count: int = 1, device: str = "cpu",
    owner: str = "saved for backward", proof: Proof = PROVEN, nodes: int = 0,
    known: dict[str, int] | None = None,
) -> HolderGrowth:  # fmt: skip
    """A holder of a storage of 1 MiB at position 4, and `count` more at each of 8, 12 and 16."""
    sizes = tuple(
        HeldSize(at, at // 4 * MIB, at // 4 * nodes * 100, 1 + (at // 4 - 1) * count, at // 4 * nodes)
        for at in (4, 8, 12, 16)
    )
    group = HolderGroup(
        device=device, anchor=anchor, path=holder, count=sizes[-1].count, nbytes=4 * MIB,
        by_path={holder: 4 * MIB}, owners={owner: 3 * MIB, "variable": MIB}, attached=holder != anchor,
        known=known or {},
    )  # fmt: skip
    return HolderGrowth(Holding(group, holder, sizes), proof, lengthens=count == 0)


def data_of(proof: Proof = PROVEN, native: str | None = None, path: HolderPath = TEXTS) -> DataGrowth:
    """A list that has one entry of 1 MiB per position."""
    entries = tuple((float(at), at) for at in (4, 8, 12, 16))
    return DataGrowth(GrowingData(path, "list", native, MIB, entries, "train.py:9 in train"), proof)
