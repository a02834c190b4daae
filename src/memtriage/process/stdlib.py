"""Modules of the standard library as they were when the watch was loaded.

The watch imports them from here wherever it runs in a program's process. A program may replace `time.time`
(tests do, with a list of results that is used up), `os.write` or `threading.get_ident`: it must not see calls
of the watch there, and what such a function raises must not come out of a hook.
"""

from __future__ import annotations

import gc as _gc
import os as _os
import threading as _threading
import time as _time
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["gc", "os", "threading", "time"]


def _copy(module: ModuleType) -> ModuleType:
    """Return a module with the same contents, which stay when the original's are replaced."""
    copied = ModuleType(module.__name__, module.__doc__)
    vars(copied).update(vars(module))
    return copied


if TYPE_CHECKING:
    import gc
    import os
    import threading
    import time
else:
    gc, os, threading, time = _copy(_gc), _copy(_os), _copy(_threading), _copy(_time)
