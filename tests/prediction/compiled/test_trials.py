"""What trials of kernels allocate."""

from __future__ import annotations

import pytest
import torch

from memtriage.prediction.compiled import trials
from memtriage.prediction.compiled.trials import Kernel, KernelTrials
from memtriage.prediction.lifetimes import FREE, Lifetimes

CACHE = 4096


def lifetimes():
    return Lifetimes(lambda: True)


def sizes_of(recorded):
    """Sizes in order, negative where the block goes."""
    size = {}
    changes = []
    for event in recorded.recording.events:
        if event.size != FREE:
            size[event.block] = event.size
        changes.append(size[event.block] if event.size != FREE else -size[event.block])
    return changes


def test_what_is_timed_runs_before_and_with_the_buffer_that_clears_the_cache():
    recorded = lifetimes()
    tried = KernelTrials(recorded, CACHE)
    tried.time([512])
    assert sizes_of(recorded) == [512, -512, CACHE, 512, -512, -CACHE]
    assert tried.most == CACHE + 512


def test_a_padded_product_is_timed_after_the_plain_one_on_the_same_operands():
    recorded = lifetimes()
    KernelTrials(recorded, CACHE).pad([1024, 512], 256, [], [640, 320])
    plain = [256, -256, CACHE, 256, -256, -CACHE]
    padded = [640, 320, -320, -640, CACHE, 640, 320, -320, -640, -CACHE]
    assert sizes_of(recorded) == [1024, 512, *plain, *padded, -512, -1024]


def tuned(configurations, written=(), spares_memory=False):
    return trials._Tuned(
        configurations, ("in_out_ptr0", "out_ptr0", "xnumel"), frozenset(written), spares_memory
    )


@pytest.mark.parametrize(("configurations", "expected"), [(1, []), (2, [CACHE, -CACHE])])
def test_a_kernel_is_tried_once_and_only_if_there_is_a_choice(monkeypatch, configurations, expected):
    monkeypatch.setattr(trials, "_tuned", lambda name, source: tuned(configurations))
    recorded = lifetimes()
    kernel = Kernel("add", "", KernelTrials(recorded, CACHE))
    for _ in range(2):
        kernel.run(torch.empty(4), torch.empty(4), 4, stream=0)
    assert sizes_of(recorded) == expected


def test_an_operand_that_is_written_is_copied_with_its_gaps(monkeypatch):
    monkeypatch.setattr(trials, "_tuned", lambda name, source: tuned(2, ["in_out_ptr0"]))
    recorded = lifetimes()
    given = torch.empty_strided((2, 3), (8, 1))
    Kernel("add", "", KernelTrials(recorded, CACHE)).run(given, torch.empty(6), 6, stream=0)
    copy = (8 + 2 + 1) * 4
    assert sizes_of(recorded) == [copy, -copy, CACHE, copy, -copy, -CACHE]


def test_copies_that_would_raise_the_peak_go_to_the_host(monkeypatch):
    monkeypatch.setattr(trials, "_tuned", lambda name, source: tuned(2, ["in_out_ptr0"], spares_memory=True))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 64)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    recorded = lifetimes()
    Kernel("add", "", KernelTrials(recorded, CACHE)).run(torch.empty(32), torch.empty(32), 32, stream=0)
    assert sizes_of(recorded) == [CACHE, -CACHE]
