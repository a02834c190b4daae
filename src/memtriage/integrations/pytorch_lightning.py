"""memtriage in Lightning, for programs that import `pytorch_lightning`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from memtriage._needs import needs
from memtriage.integrations.lightning_hooks import LightningHooks

with needs("pytorch_lightning", "lightning", "Lightning's callback"):
    from pytorch_lightning import Callback


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
