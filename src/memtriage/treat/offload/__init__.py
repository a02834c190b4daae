"""AdamW with its state on the host: `OffloadedAdamW`."""

from memtriage.treat.offload.optimizer import OffloadedAdamW
from memtriage.treat.offload.pinned import PinningFailed

__all__ = ["OffloadedAdamW", "PinningFailed"]
