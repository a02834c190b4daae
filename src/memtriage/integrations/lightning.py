"""memtriage in Lightning, for programs that import `lightning.pytorch`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from memtriage.integrations.lightning_hooks import LightningHooks
from memtriage.process.optional import needs

with needs("lightning", "lightning", "Lightning's callback"):
    from lightning.pytorch import Callback


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
