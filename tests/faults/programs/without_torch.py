"""Imports no torch: hooks of the interpreter, lazy modules, a wakeup descriptor, a loop, a daemon, exits."""

import asyncio
import atexit
import faulthandler
import importlib.util
import os
import signal
import sys
import threading
import time
import traceback
import types

import state


def busy(seconds=0.1):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(50))


def names(trace):
    return [frame.name for frame in traceback.extract_tb(trace)]


class Odd(types.ModuleType):
    def __getattribute__(self, name):
        if name in ("__dict__", "__class__"):
            return object.__getattribute__(self, name)
        print("asked for", name, flush=True)
        raise SystemExit(name)


class Unequal:
    def refuse(self, *arguments):
        print("asked", flush=True)
        raise SystemExit

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __repr__ = refuse


with open("lazy_module.py", "w") as file:
    file.write("print('lazy module loaded')\n")
spec = importlib.util.find_spec("lazy_module")
spec.loader = importlib.util.LazyLoader(spec.loader)
lazy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lazy)
sys.modules.update(lazy_module=lazy, odd=Odd("odd"), gone=None, number=5)
kept = [[0] * 10_000, {"a": Unequal()}, Unequal()]
busy(0.3)

reading, writing = os.pipe()
for end in (reading, writing):
    os.set_blocking(end, False)
print("wakeup", signal.set_wakeup_fd(writing))
seen = []
signal.signal(signal.SIGUSR1, lambda signum, frame: seen.append(signum))
for _ in range(20):
    os.kill(os.getpid(), signal.SIGUSR1)
    busy(0.01)
print(list(os.read(reading, 100)) == seen == [signal.SIGUSR1] * 20, signal.set_wakeup_fd(-1) == writing)

print(faulthandler.is_enabled(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)


async def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        busy(0.01)
        await asyncio.sleep(0)


signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever starts this may have it ignored
try:
    asyncio.run(interrupted())
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler)

ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    busy()
    os.write(done, b"daemon")
    os._exit(3)
os.close(done)
print(os.read(ready, 10), os.waitstatus_to_exitcode(os.wait()[1]))


def in_thread(arguments):
    print("thread", arguments.exc_type.__name__, names(arguments.exc_traceback), flush=True)


def uncaught(kind, error, trace):
    print("uncaught", kind.__name__, names(trace), lazy.__name__, flush=True)
    raise SystemExit(21)


threading.excepthook = in_thread
worker = threading.Thread(target=lambda: 1 / 0)
worker.start()
worker.join()
for end in (reading, writing, ready):
    os.close(end)
for number in range(3):
    atexit.register(print, "at exit", number)
state.show("end")
sys.excepthook = uncaught
busy()
raise RuntimeError
