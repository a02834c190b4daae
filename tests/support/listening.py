"""What a listener answers in tests."""

from __future__ import annotations

import os
from collections.abc import Callable

from memtriage.model.asked import Answer
from memtriage.session.remote.listen import Listener

Answering = Callable[[float, bool], Answer]
Start = Callable[[Answering], Listener]


def answering(within_s: float, follow: bool) -> Answer:
    return Answer(pid=os.getpid(), step=7, waited_s=within_s)
