"""Trains nothing, so that marks are made over time: timeouts by signal, forks and threads meanwhile."""

import cProfile
import os
import profile
import pstats
import signal
import sys
import threading
import time

import state
import torch

state.show("before")


class Late(Exception):
    """Raised by the alarm."""


def late(signum, frame):
    global alarms
    alarms += 1
    raise Late(alarms, frame.f_code.co_filename == __file__)


alarms = 0
caught = []
signal.signal(signal.SIGALRM, late)
for _ in range(150):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        while True:
            sum(range(100))
    except Late as error:
        caught.append(error.args)
print("alarms", caught == [(number, True) for number in range(1, 151)])

model = torch.nn.Linear(64, 64)
worker = threading.Thread(target=lambda: [sum(range(1000)) for _ in range(5000)])
worker.start()
status = set()
for _ in range(30):
    child = os.fork()
    if child == 0:
        os._exit(len({sum(range(200)) for _ in range(500)}) + 2)
    status.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
worker.join()
print("children", status)


def busy():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        sum(range(100))


def tracer(frame, event, argument):
    traced.add(frame.f_code.co_filename == __file__)
    return tracer


traced = set()
sys.settrace(tracer)
busy()
sys.settrace(None)
print("traced", traced)
profiler = profile.Profile()  # which fails where a call has no return
profiler.runcall(busy)
print("profiled", {name for file, _, name in profiler.timings if "triage" in file})
profiler = cProfile.Profile()
profiler.runcall(busy)
seen = {name: entry[4] for (_, _, name), entry in pstats.Stats(profiler).stats.items()}
print(sorted(name for _, _, name in seen["<built-in method time.monotonic>"]), [*seen].count("read"))

x = torch.ones(4, requires_grad=True)
for _ in range(500):  # a loop without optimizer, in which hooks of Python run inside the engine
    y = x * 2
    y.register_hook(lambda gradient: gradient * sum(range(50)) / 1225)
    (gradient,) = torch.autograd.grad(y.sum(), x)
print("gradient", gradient.tolist())
state.show("after")
