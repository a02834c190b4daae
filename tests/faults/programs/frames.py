"""What reaches into frames: tracers that raise, tracebacks, recursion to its limit, functions replaced."""

import gc
import linecache
import os
import profile
import signal
import sys
import threading
import time
import traceback

import state
import torch
from training import model, step


class Stop(Exception):
    pass


def refused(*args, **kwargs):
    raise Stop


kept = []
asked = [(os, "stat"), (linecache, "checkcache", "getline"), (traceback, "extract_stack", "walk_stack")]
whole = [(module, name, getattr(module, name)) for module, *names in asked for name in names]
for number in range(16):  # as a file system made up for tests does, from the second step on
    step(kept)
    if number == 1:
        for module, name, _ in whole:
            setattr(module, name, refused)
for each in whole:
    setattr(*each)

lost = 0
for number in range(12):
    events = 0

    def tracer(frame, event, argument, limit=50 * number):
        global events
        events += 1
        if events > limit and "training" in frame.f_code.co_filename:
            raise Stop
        return tracer

    def profiler(frame, event, argument):
        return None

    try:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        for _ in range(100):
            step(kept)
        lost += 1
    except Stop:
        pass
    finally:
        sys.settrace(None)
        sys.setprofile(None)
print("lost", lost)
profiler = profile.Profile()
profiler.runcall(lambda: [step(kept) for _ in range(4)])
print({name: count[0] for (file, _, name), count in profiler.timings.items() if file.endswith("training.py")})


def depth(at=1):
    try:
        return depth(at + 1)
    except RecursionError:
        return at


def below(frames):
    return below(frames - 1) if frames else step(kept)


print(depth(), sys.getrecursionlimit(), below(850) > 0)
for limit in (0, "text", 300):
    try:
        sys.setrecursionlimit(limit)
    except (TypeError, ValueError) as error:
        print(type(error).__name__, error)
print(depth(), sys.getrecursionlimit())


def refuse(gradient):
    raise Stop


for run in (lambda result: result.backward(), torch.autograd.backward, lambda result: model(result).sum()):
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(refuse)
    try:
        run(y.sum())
    except (Stop, RuntimeError) as error:
        print([each.name for each in traceback.extract_tb(error.__traceback__)])
for handler in (refused, signal.default_int_handler):
    signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except (Stop, KeyboardInterrupt) as error:
        print([each.name for each in traceback.extract_tb(error.__traceback__)])


def counted(name, function):
    def called(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)

    return called


calls = []
replaced = [(time, "perf_counter", "monotonic", "thread_time", "time"), (gc, "get_objects", "get_referents"),
            (os, "getpid", "fstat"), (threading, "get_ident", "main_thread", "enumerate")]  # fmt: skip
for make in (counted, lambda name, function: refused):
    were = []
    for module, *names in replaced:
        for name in names:
            were.append((module, name, getattr(module, name)))
            setattr(module, name, make(name, getattr(module, name)))
    for _ in range(6):
        model(torch.randn(8, 64)).sum().backward()
        kept.append(model(torch.randn(256, 64)))
    for module, name, function in were:
        setattr(module, name, function)
print("calls", calls)


class Refusing:
    def __getattr__(self, name):
        print("asked for", name, flush=True)
        raise SystemExit(name)


loaded = sys.modules["torch"]
sys.modules["torch"] = Refusing()
for _ in range(4):
    loaded.autograd.backward(model(loaded.ones(3, 64)).sum())
sys.modules["torch"] = loaded
state.show("after")
sys.setrecursionlimit(60)
