"""Let a process that is not watched answer requests: `memtriage install-listener` arms it."""

from __future__ import annotations

import atexit
import sys
from typing import Any, Final

from memtriage.model.asked import Answer
from memtriage.process import active
from memtriage.process.stdlib import os, threading, time
from memtriage.session.progress import TrainingProgress
from memtriage.session.remote.answer import Responder
from memtriage.session.remote.listen import Listener
from memtriage.store.layout import identify

_OWN_PROGRAM: Final = "memtriage.cli.app"


def arm() -> None:
    """Listen in this process until it ends, and print nothing.

    Does nothing in a watched process, which listens if run with `--listen`, and in memtriage's own.
    """
    if active.session is not None or active.listener is not None or _OWN_PROGRAM in sys.modules:
        return
    lock: Any = threading.RLock()
    responder = Responder(
        identity=identify(os.environ, pid=os.getpid(), time_s=time.time()),
        argv=list(sys.argv),
        progress=TrainingProgress(),
        lock=lock,
        running=lambda: True,
        baselines={},
        script_root=None,
    )

    def answer(within_s: float, follow: bool) -> Answer:
        found = responder.answer(within_s, follow)
        found.run_id = found.step = found.microbatch = found.doing = None  # nothing counts them
        return found

    listener = Listener(answer)
    listener.start()
    atexit.register(listener.stop)
