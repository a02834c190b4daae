"""Random state, defaults and modes of torch and the interpreter, warnings as errors, logging to stdout."""

import decimal
import gc
import hashlib
import logging
import os
import random
import sys
import threading
import warnings
import weakref

import numpy
import state
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training import model, step

environment = dict(os.environ)
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s %(message)s")
warnings.simplefilter("error")
numpy.seterr(all="raise")
random.seed(1)
numpy.random.seed(2)
decimal.getcontext().prec = 3
decimal.getcontext().traps[decimal.Inexact] = True
kept, calls, dead = [], [], []


def drawn():
    torchs = hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()
    return torchs, random.random(), numpy.random.rand(), torch.initial_seed()


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        calls.append(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        calls.append(str(function))
        return function(*args, **(kwargs or {}))


class Resource:
    def __del__(self):
        dead.append("resource")
        raise ValueError


sys.unraisablehook = lambda unraisable: dead.append(repr(unraisable.exc_value))
for mode in (Functions(), Dispatches()):
    with mode:
        for _ in range(4):
            step(kept)
    print(type(mode).__name__, len(calls), hashlib.md5(repr(calls).encode()).hexdigest())
    calls.clear()
torch.use_deterministic_algorithms(True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    step(kept)
with torch.inference_mode():
    torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1).step()
torch.set_default_device("meta")
model(torch.randn(32, 64, device="cpu")).pow(2).mean().backward()
torch.set_default_device(None)
gc.freeze()
step(kept)
print(gc.get_freeze_count() > 0)
gc.unfreeze()
gc.disable()
for _ in range(5):
    resource, tensor = Resource(), torch.ones(1000)
    reference = weakref.ref(tensor)
    step(kept)
    dead.append(sys.getrefcount(tensor))
    del resource, tensor
    dead.append(reference() is None)
print(dead, gc.isenabled())
gc.enable()
print(drawn(), decimal.getcontext().prec, numpy.geterr(), torch.get_num_threads())
print(torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu"))
print(environment == dict(os.environ), sys.flags, sys.warnoptions, len(sys.meta_path), len(sys.path_hooks))
print(sys.excepthook, threading.excepthook, sys.displayhook, sys.breakpointhook, sys.path[1:])
print(len(logging.root.handlers), [name for name in logging.root.manager.loggerDict if "triage" in name])
print(len(gc.callbacks), len(gc.garbage), sorted(torch.optim.SGD(model.parameters(), lr=0.1).__dict__))
state.show("after")
