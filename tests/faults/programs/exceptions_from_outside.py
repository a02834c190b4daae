"""Exceptions of signal handlers and of other threads, which a watch must neither keep nor lose."""

import ctypes
import os
import signal
import sys
import threading
import traceback

import state
from training import step


class Stop(Exception):
    pass


class InTime(Exception):
    pass


def handler(signum, frame):
    raise InTime


def ignored_by_python(unraisable):
    """Python ignores what is raised while it calls back for a weak reference that died, watched or not."""
    lines = traceback.extract_tb(unraisable.exc_traceback)
    if not any("memtriage" in line.filename for line in lines):
        lost[unraisable.exc_type] -= 1


kept = []
big = [[number] for number in range(100_000)]
signal.signal(signal.SIGUSR1, handler)
signal.signal(signal.SIGUSR2, lambda signum, frame: None)
signal.siginterrupt(signal.SIGUSR2, False)
sys.unraisablehook = ignored_by_python
lost = {InTime: 0, Stop: 0}
step()  # the first imports more of torch, which goes on whatever is raised meanwhile
for number in range(14):  # while another thread sends a signal at some instant of a step
    sender = threading.Timer(0.002 * (number % 7), os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        sender.start()
        since = 0
        while since < 20:
            step(kept if number % 2 else None)
            since += not sender.is_alive()
        lost[InTime] += 1
    except InTime:
        sender.join()

for _ in range(6):
    running, sent = threading.Event(), threading.Event()

    def train(running=running, sent=sent):
        try:
            since = 0
            while since < 20:
                step(kept)
                running.set()
                since += sent.is_set()
            lost[Stop] += 1
        except Stop:
            pass

    thread = threading.Thread(target=train)
    thread.start()
    running.wait()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
    sent.set()
    thread.join()
print("lost", lost[InTime], lost[Stop])
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
state.show("after")
