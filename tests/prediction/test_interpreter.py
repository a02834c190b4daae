"""What the mode of a trace does in threads."""

import gc
import threading
import weakref

import torch
from torch import nn

import memtriage


def test_a_thread_that_outlives_the_trace_keeps_nothing_of_it():
    ended = threading.Event()
    models, threads, sums = [], [], []

    def monitor():
        ended.wait()
        sums.append(torch.ones(3).sum().item())

    def build(device):
        threads.append(threading.Thread(target=monitor))
        threads[0].start()
        model = nn.Linear(8, 8, device=device)
        models.append(weakref.ref(model))
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, lambda: model(torch.ones(8, 8, device=device)).sum().backward()

    try:
        memtriage.predict(build, gpu="h100", steps=1)
        gc.collect()
        kept = models[0]()
    finally:
        ended.set()
        threads[0].join()
    assert kept is None
    assert sums == [3]
