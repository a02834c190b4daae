"""memtriage in Lightning, for programs that import `lightning.pytorch`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from memtriage._needs import needs
from memtriage.integrations.lightning_hooks import LightningHooks

with needs("lightning", "lightning", "Lightning's callback"):
    from lightning.pytorch import Callback


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
