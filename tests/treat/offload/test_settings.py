"""Settings of an offloaded optimizer: the limits of each, and which go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memtriage.treat.offload.settings import OffloadSettings

USUAL = OffloadSettings(
    state_dtype=torch.float32,
    gradients="device",
    overlap_backward=False,
    max_norm=None,
    reduce_gradients=True,
    tile_elements=1 << 22,
    ring_depth=4,
    pin_memory=True,
    kernel="auto",
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state_dtype": torch.int8}, "state_dtype must be one of"),
        ({"gradients": "disk"}, "gradients must be 'device' or 'host', not 'disk'"),
        ({"kernel": "triton"}, "kernel must be one of"),
        ({"max_norm": 0.0}, "max_norm must be positive or None, not 0.0"),
        ({"max_norm": float("nan")}, "max_norm must be positive or None, not nan"),
        ({"tile_elements": 0}, "tile_elements must be a multiple of 64, not 0"),
        ({"tile_elements": 100}, "tile_elements must be a multiple of 64, not 100"),
        ({"ring_depth": 0}, "ring_depth must be at least 1, not 0"),
        ({"overlap_backward": True, "max_norm": 1.0}, "max_norm needs all gradients before the first update"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(USUAL, **changes).check(partitioned=False)


def test_ranks_that_share_the_state_cannot_overlap_backward() -> None:
    USUAL.check(partitioned=True)
    with pytest.raises(ValueError, match="overlap_backward works without process_group"):
        replace(USUAL, overlap_backward=True).check(partitioned=True)
