"""memtriage in Lightning, for programs that import `pytorch_lightning`.

trainer = Trainer(..., callbacks=[MemtriageCallback()])
"""

from __future__ import annotations

from pytorch_lightning import Callback

from memtriage.integrations.lightning_hooks import LightningHooks


class MemtriageCallback(LightningHooks, Callback):
    __doc__ = LightningHooks.__doc__
