"""Workspaces of cuBLAS, and operands that it cannot read."""

import pytest
import torch

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import Lifetimes
from memtriage.prediction.scratch.products import Workspaces, configured_size, copies, readable

aten = torch.ops.aten
MIB = 1 << 20


def workspaces(version=(2, 11)):
    lifetimes = Lifetimes(lambda: False)
    return lifetimes, Workspaces(machine("h200"), version, lifetimes)


def kept(lifetimes):
    return [(block.op, block.size) for block in lifetimes.recording.blocks]


def test_each_thread_keeps_one():
    lifetimes, made = workspaces()
    operands = (torch.empty(4, 4), torch.empty(4, 4))
    for phase in ("forward", "backward", "forward", "optimizer", "backward"):
        lifetimes.enter(phase, 0)
        made.keep(aten.mm.default, operands)
    assert kept(lifetimes) == [("cublas", 32 * MIB), ("cublas", 32 * MIB)]


def test_cleared_workspaces_are_freed_and_made_again():
    lifetimes, made = workspaces()
    operands = (torch.empty(4, 4), torch.empty(4, 4))
    made.keep(aten.mm.default, operands)
    made.clear()
    assert lifetimes.live == 0
    made.keep(aten.mm.default, operands)
    assert lifetimes.live == 32 * MIB


def test_a_bias_goes_through_cublaslt():
    biased = (torch.empty(4), torch.empty(4, 4), torch.empty(4, 4))
    lifetimes, made = workspaces()
    made.keep(aten.addmm.default, biased)
    assert kept(lifetimes) == [("cublas", 32 * MIB), ("cublasLt", MIB)]
    lifetimes, made = workspaces(version=(2, 13))
    made.keep(aten.addmm.default, biased)
    assert kept(lifetimes) == [("cublas", 32 * MIB)]


def test_the_environment_decides_the_size(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    lifetimes, made = workspaces()
    made.keep(aten.mm.default, (torch.empty(4, 4), torch.empty(4, 4)))
    assert kept(lifetimes) == [("cublas", 128 * 1024)]
    assert configured_size(None) is None


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (torch.empty(4, 8), True),
        (torch.empty(8, 4).t(), True),
        (torch.empty(4, 16)[:, :8], True),
        (torch.empty(4, 16)[:, ::2], False),
        (torch.empty(1).expand(4, 8), False),
        (torch.empty(2, 4, 8).transpose(1, 2), True),
    ],
)
def test_what_cublas_can_read(matrix, expected):
    assert readable(matrix) is expected


def test_what_it_cannot_read_is_copied():
    spread = torch.empty(1).expand(4, 8)
    biased = (torch.empty(2), torch.empty(4, 8), torch.empty(1).expand(8, 2))
    assert copies(aten.addmm.default, biased) == [8 * 2 * 4]
    assert copies(aten.mm.default, (spread, torch.empty(8, 2))) == [4 * 8 * 4]
    assert copies(aten.mm.default, (torch.empty(4, 8), torch.empty(8, 2))) == []
