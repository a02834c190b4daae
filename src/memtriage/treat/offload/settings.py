"""The settings of an `OffloadedAdamW`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch

from memtriage.treat.offload.kernel import hyper_of
from memtriage.treat.offload.native.choice import Kernel
from memtriage.treat.offload.resident import STATE_DTYPES
from memtriage.treat.offload.tiles import ALIGNMENT

Gradients = Literal["device", "host"]

TILE_ELEMENTS: Final = 1 << 22
"""8 MiB: the kernel takes longer over it than the moving thread takes to launch its copies."""

RING_DEPTH: Final = 4
"""One tile is being computed, one is going up, two are coming down."""


@dataclass(frozen=True, slots=True)
class OffloadSettings:
    """The settings that are not those of a parameter group; described at `OffloadedAdamW`."""

    state_dtype: torch.dtype
    gradients: Gradients
    overlap_backward: bool
    max_norm: float | None
    reduce_gradients: bool
    tile_elements: int
    ring_depth: int
    pin_memory: bool
    kernel: Kernel

    def check(self, *, partitioned: bool) -> None:
        """Raise ValueError for values that cannot be used or combined; it names the setting."""
        if self.state_dtype not in STATE_DTYPES:
            raise ValueError(f"state_dtype must be one of {STATE_DTYPES}, not {self.state_dtype}")
        if self.gradients not in ("device", "host"):
            raise ValueError(f"gradients must be 'device' or 'host', not {self.gradients!r}")
        if self.kernel not in get_args(Kernel):
            raise ValueError(f"kernel must be one of {get_args(Kernel)}, not {self.kernel!r}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive or None, not {self.max_norm}")
        if self.tile_elements < ALIGNMENT or self.tile_elements % ALIGNMENT:
            raise ValueError(f"tile_elements must be a multiple of {ALIGNMENT}, not {self.tile_elements}")
        if self.ring_depth < 1:
            raise ValueError(f"ring_depth must be at least 1, not {self.ring_depth}")
        if self.overlap_backward and partitioned:
            raise ValueError(
                "overlap_backward works without process_group: the ranks' backward passes "
                "may finish their gradients in different orders"
            )
        if self.overlap_backward and self.gradients == "device" and self.max_norm is not None:
            raise ValueError(
                "max_norm needs all gradients before the first update, which overlap_backward takes earlier: "
                "use gradients='host' with it, or one of the two"
            )


def check_group(group: Mapping[str, Any]) -> None:
    """Raise ValueError for invalid settings, with the setting's name, as `torch.optim.AdamW` does."""
    if group["amsgrad"]:
        raise ValueError("amsgrad=True is not supported: it would take 4 more bytes per parameter")
    hyper = hyper_of(group)
    for name in ("lr", "eps", "weight_decay"):
        if not getattr(hyper, name) >= 0.0:
            raise ValueError(f"{name} must not be negative, got {getattr(hyper, name)}")
    for name in ("beta1", "beta2"):
        if not 0.0 <= getattr(hyper, name) < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {getattr(hyper, name)}")
