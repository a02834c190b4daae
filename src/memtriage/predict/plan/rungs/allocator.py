"""Expandable segments: holes between live blocks, which no request fits into, do not come about."""

from __future__ import annotations

from typing import Final

from memtriage.predict.plan.changes import Change, Offer, Rung
from memtriage.predict.plan.facts import Facts

_SETTING: Final = "expandable_segments:True"


def rung(conf: str) -> Rung:
    """The rung for a program whose allocator is configured so."""

    def offer(facts: Facts) -> Offer:
        if "expandable_segments" in conf:
            return Offer(absent=f"the allocator's options set it already: {conf}")
        if "max_split_size_mb" in conf:
            return Offer(absent="it does not go together with max_split_size_mb: drop that option first")
        variable = f"PYTORCH_CUDA_ALLOC_CONF={','.join(filter(None, (conf, _SETTING)))}"
        return Offer(
            (
                (
                    Change(
                        rung="expandable segments",
                        action=f"PYTORCH_CUDA_ALLOC_CONF={_SETTING}",
                        speed="about none in steady training; 33 to 40 % a step were reported where weights "
                        "travel between processes by CUDA IPC (M8)",
                        maths="same",
                        code={"torch": f"export {variable}  # in the shell, before the process starts"},
                        conf=_SETTING,
                    ),
                ),
            )
        )

    return Rung("expandable segments", "M8", offer, configures=True)
