"""Uses, from step to step of a leak, every mode that a recording borrows."""

import builtins
import os
import sys
import tracemalloc
import warnings

import state
import torch
from training import model, step

warnings.simplefilter("ignore")
kept = []
state.show("before")

caught = 0
for _ in range(16):  # a NaN must be found in every step, and the loss is what it is without a watch
    zero = torch.zeros(3, requires_grad=True)
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            (zero * 0 / 0 * zero).sqrt().sum().backward()
    except RuntimeError:
        caught += 1
    kept.append(model(torch.randn(256, 64)))
    last = step()
print("NaN found", caught, f"{last:.6f}")

lost = 0
for _ in range(16):
    step(kept)
    tracemalloc.start()
    step(kept)
    lost += tracemalloc.get_traceback_limit() != 1
    tracemalloc.take_snapshot()
    tracemalloc.stop()
print("tracing lost", lost)

for number in range(16):
    step(kept)
    child = os.fork()
    if child == 0:
        step()
        print(number, tracemalloc.is_tracing(), torch.is_anomaly_enabled(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)


def refuse(*arguments, **options):
    raise SystemExit("called by the watch")


whole_print, whole_open = builtins.print, builtins.open
builtins.print = builtins.open = refuse
for _ in range(6):
    step(kept)
builtins.print, builtins.open = whole_print, whole_open

loaded = sys.modules.pop("torch")
sys.modules["torch"] = object()
for _ in range(6):
    loaded.autograd.backward(model(loaded.ones(3, 64)).sum())
sys.modules["torch"] = loaded
state.show("after")
