"""memtriage in Lightning, for programs that import `lightning.pytorch`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from lightning.pytorch import Callback

from memtriage.integrations.lightning_hooks import LightningHooks


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
