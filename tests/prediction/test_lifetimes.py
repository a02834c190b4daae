"""A traced program allocates and frees what the same program does with real tensors, in the same order."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.lifetimes import FREE, LifetimeEvent, Lifetimes, Marker, StreamUse
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


def test_a_storage_is_noted_once_and_freed_with_its_last_view():
    lifetimes = Lifetimes(lambda: True)
    whole = torch.empty(8)
    assert lifetimes.see(whole.untyped_storage(), "aten::empty")
    part = whole[2:]
    assert not lifetimes.see(part.untyped_storage(), "aten::slice")
    del whole
    assert lifetimes.live == 32
    del part
    assert lifetimes.live == 0
    assert [event.size for event in lifetimes.recording.events] == [32, FREE]


def test_a_resized_storage_is_another_block():
    lifetimes = Lifetimes(lambda: False)
    grown = torch.empty(8)
    lifetimes.see(grown.untyped_storage(), "aten::empty")
    grown.untyped_storage().resize_(64)
    lifetimes.resized(grown.untyped_storage(), "aten::resize_")
    assert [event.size for event in lifetimes.recording.events] == [32, 64, FREE]
    assert lifetimes.live == 64


def test_nothing_is_noted_of_what_is_empty_or_comes_after_the_end():
    lifetimes = Lifetimes(lambda: False)
    empty = torch.empty(0)
    lifetimes.see(empty.untyped_storage(), "aten::empty")
    kept = torch.empty(4)
    lifetimes.see(kept.untyped_storage(), "aten::empty")
    lifetimes.close()
    del empty, kept
    assert [event.size for event in lifetimes.recording.events] == [16]


def sizes(lifetimes):
    return [event.size for event in lifetimes.recording.events]


def test_buffers_of_an_operator_are_released_the_last_one_first():
    lifetimes = Lifetimes(lambda: False)
    buffers = lifetimes.scratch([256, 0, -1, 512], "aten::mm")
    assert [lifetimes.recording.blocks[block].owner for block in buffers] == ["workspace", "workspace"]
    assert lifetimes.live == 768
    lifetimes.release(buffers)
    assert [(event.block, event.size) for event in lifetimes.recording.events] == [
        (0, 256), (1, 512), (1, FREE), (0, FREE),
    ]  # fmt: skip
    assert (lifetimes.live, lifetimes.highest) == (0, 768)
    lifetimes.scratch([100], "aten::mm")
    assert (lifetimes.live, lifetimes.highest) == (100, 768)


def test_a_block_has_what_held_when_it_was_made():
    recording, seen = [False], []
    lifetimes = Lifetimes(lambda: recording[0])
    lifetimes.begun = lambda: seen.append("begun")
    lifetimes.allocated = seen.append
    lifetimes.freed = lambda identity: seen.append(("freed", identity))
    first, second = torch.empty(4), torch.empty(8)
    lifetimes.see(first.untyped_storage(), "aten::empty")
    lifetimes.owner, lifetimes.stream, recording[0] = "parameter", 7, True
    lifetimes.enter("forward", 0)
    lifetimes.see(second.untyped_storage(), "aten::mm")
    assert [
        (block.size, block.op, block.phase, block.recorded, block.owner, block.stream)
        for block in lifetimes.recording.blocks
    ] == [(16, "aten::empty", "build", False, None, 0), (32, "aten::mm", "forward", True, "parameter", 7)]
    identity = first.untyped_storage()._cdata
    del first
    assert seen == ["begun", 0, 1, ("freed", identity)]


def test_the_newest_block_is_known_by_what_made_it():
    lifetimes = Lifetimes(lambda: False)
    first, second, elsewhere = (torch.empty(4).untyped_storage() for _ in range(3))
    lifetimes.see(first, "aten::empty_like")
    assert (lifetimes.block_of(first), lifetimes.block_of(elsewhere)) == (0, None)
    assert lifetimes.is_newest(first, "empty")
    assert not lifetimes.is_newest(first, "zeros")
    lifetimes.see(second, "aten::empty_like")
    assert lifetimes.is_newest(second, "empty") and not lifetimes.is_newest(first, "empty")
    assert not lifetimes.is_newest(elsewhere, "empty")


def test_a_storage_of_the_same_size_stays_its_block():
    lifetimes = Lifetimes(lambda: False)
    kept, elsewhere = torch.empty(8), torch.empty(8)
    lifetimes.see(kept.untyped_storage(), "aten::empty")
    lifetimes.resized(kept.untyped_storage(), "aten::resize_")
    lifetimes.resized(elsewhere.untyped_storage(), "aten::resize_")
    assert sizes(lifetimes) == [32]


def test_phases_begin_once_and_steps_with_their_first_phase():
    lifetimes = Lifetimes(lambda: False)
    for step in range(2):
        for phase in ("forward", "forward", "backward"):
            lifetimes.enter(phase, step)
            lifetimes.release(lifetimes.scratch([8], "aten::mm"))
    assert lifetimes.recording.markers == [
        Marker(0, "build", -1),
        Marker(0, "forward", 0),
        Marker(4, "backward", 0),
        Marker(6, "forward", 1),
        Marker(10, "backward", 1),
    ]
    assert lifetimes.recording.starts(2) == [0, 6]
    assert lifetimes.recording.starts(1) == [0]


def test_other_streams_use_a_block_until_they_have_passed():
    lifetimes = Lifetimes(lambda: False)
    own, other, empty = torch.empty(8), torch.empty(8), torch.empty(0)
    for tensor in (own, empty):
        lifetimes.see(tensor.untyped_storage(), "aten::empty")
    lifetimes.stream_passed(3)  # nothing was put on it
    for tensor, stream in ((own, 0), (own, 3), (other, 3), (empty, 3)):
        lifetimes.used_on(tensor.untyped_storage(), stream)
    assert lifetimes.recording.uses == [StreamUse(1, 3, 0)]
    del own
    lifetimes.stream_passed(3)
    lifetimes.stream_passed(4)
    assert lifetimes.recording.uses[1:] == [StreamUse(2, 3, None)]
    lifetimes.enter("forward", 0)  # a new phase waits for all streams
    assert lifetimes.recording.uses[2:] == [StreamUse(2, 3, None)]
    lifetimes.close()
    lifetimes.stream_passed(3)
    assert len(lifetimes.recording.uses) == 3


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
