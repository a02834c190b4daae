"""memtriage in Lightning, for programs that import `pytorch_lightning`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from memtriage.integrations.lightning_hooks import LightningHooks
from memtriage.process.optional import needs

with needs("pytorch_lightning", "lightning", "Lightning's callback"):
    from pytorch_lightning import Callback


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
