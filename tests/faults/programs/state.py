"""Prints what a watch must not change of a process. Imported by the programs beside it."""

import gc
import os
import signal
import sys
import threading
import time
import tracemalloc


def numbers():
    """Descriptors below the watch's own, but for files that its threads open for an instant."""
    first = links()
    time.sleep(0.01)
    return sorted(number for number, link in first.items() & links().items())


def links():
    found = {}
    for number in range(256):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if not link.startswith(("/proc/", "/sys/")):
            found[number] = link
    return found


def handlers():
    named = {}
    for signum in sorted(signal.valid_signals()):
        handler = signal.getsignal(signum)
        named[int(signum)] = getattr(handler, "__name__", str(handler))
    return named


def show(where):
    torch = sys.modules.get("torch")
    print(
        where,
        [thread.name for thread in threading.enumerate()],
        threading.active_count(),
        numbers(),
        handlers(),
        "collector", gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(),
        "tracing", tracemalloc.is_tracing(), tracemalloc.get_traced_memory(),
        "anomaly", torch and (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "gradients", torch and torch.is_grad_enabled(),
        "trace", sys.gettrace(), sys.getprofile(), threading.gettrace(),
        "switch", sys.getswitchinterval(), "depth", sys.getrecursionlimit(),
        "umask", oct(_umask()), "cwd", os.path.basename(os.getcwd()),
        flush=True,
    )  # fmt: skip


def _umask():
    now = os.umask(0o22)
    os.umask(now)
    return now
