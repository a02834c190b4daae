"""A traced program allocates and frees what the same program does with real tensors, in the same order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, LifetimeEvent, Lifetimes
from memtriage.prediction.operators import facts, tensors_in
from memtriage.prediction.trace import trace
from support.training import training

USES_OF_ONE_TENSOR = 2
"""Of its storage: by itself, and by what is asked here."""


def uses_of_storage(tensor):
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.wide = nn.Linear(size, 4 * size)
        self.narrow = nn.Linear(4 * size, size)

    def forward(self, hidden):
        return hidden + self.narrow(F.gelu(self.wide(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.embedding = nn.Embedding(97, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 97)
        self.checkpointed = checkpointed

    def forward(self, ids):
        hidden = self.embedding(ids)
        for block in self.blocks:
            if self.checkpointed:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            else:
                hidden = block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def program(device, checkpointed):
    model = Model(checkpointed).to(device)
    model.ids = torch.arange(64, device=device).view(4, 16)
    return training(
        model,
        lambda: model(model.ids),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    )


class Real(TorchDispatchMode):
    """Notes the storages of real tensors."""

    def __init__(self, lifetimes):
        super().__init__()
        self.lifetimes = lifetimes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        meeting = func is torch.ops.aten.add.Tensor and torch._C._current_graph_task_id() != -1
        if meeting and uses_of_storage(args[0]) == USES_OF_ONE_TENSOR:
            # Without this mode the engine adds in place, unless the first gradient is a view with a base.
            return args[0].add_(args[1])
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            self.lifetimes.see(tensor.untyped_storage(), facts(func).name)
        return made


def told(recording, begin=0):
    """Allocations and frees as (size, made by), but those of kernels and libraries."""
    return [
        (event.size != FREE, block.size, block.op)
        for event in recording.events[begin:]
        if (block := recording.blocks[event.block]).owner is None
    ]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_sequence_is_that_of_real_tensors(checkpointed):
    recording = trace(lambda device: program(device, checkpointed), machine("a100"), (2, 11), 2).recording
    first = next(marker.event for marker in recording.markers if marker.step == 1)

    lifetimes = Lifetimes(torch.is_grad_enabled)
    model, optimizer, step = program("cpu", checkpointed)
    step()
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    for tensor in (*model.parameters(), *buffers, model.ids):
        lifetimes.see(tensor.untyped_storage(), "before")
    before = len(lifetimes.recording.events)
    with Real(lifetimes):
        step()
    traced = told(recording, first)
    real = told(lifetimes.recording, before)
    assert traced == real
    assert len(traced) > 100


def in_pool(lifetimes, count):
    """Tensors of one float in pool 1."""
    lifetimes.pool = 1
    tensors = [torch.empty(1) for _ in range(count)]
    for tensor in tensors:
        lifetimes.see(tensor.untyped_storage(), "aten::empty")
    lifetimes.pool = 0
    return tensors


def test_a_block_is_freed_once_though_two_storages_have_it():
    lifetimes = Lifetimes(lambda: False)
    (tensor,) = in_pool(lifetimes, 1)
    other = torch.empty(1)
    lifetimes.adopt(other.untyped_storage(), 0)
    assert lifetimes.block_of(other.untyped_storage()) == 0
    del other
    assert lifetimes.live == 4
    lifetimes.disown(tensor.untyped_storage()._cdata)
    assert lifetimes.live == 0
    del tensor
    assert lifetimes.recording.events == [LifetimeEvent(0, 4), LifetimeEvent(0, FREE)]


def test_using_a_tensor_whose_memory_was_reused_fails():
    lifetimes = Lifetimes(lambda: False)
    tensor, other = in_pool(lifetimes, 2)
    lifetimes.overwritten[tensor.untyped_storage()._cdata] = "overwritten"
    lifetimes.check_intact([other])
    with pytest.raises(RuntimeError, match="overwritten"):
        lifetimes.check_intact([other, tensor])
    del tensor
    assert not lifetimes.overwritten
