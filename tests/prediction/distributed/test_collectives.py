"""Collectives of one rank: what they hold beside their tensors, until when, and for which groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memtriage.prediction.distributed import collectives
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.trace import trace
from support.traced import traced
from support.training import training

RANKS = 4
SIZE = 1 << 12


def make(device, count=SIZE):
    return torch.empty(count, dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    ("call", "scratch"),
    [
        (lambda d: dist.all_reduce(make(d)), []),
        (lambda d: dist.broadcast(make(d), 0), []),
        (lambda d: dist.all_gather([make(d) for _ in range(RANKS)], make(d)), [RANKS * SIZE]),
        (lambda d: dist.all_gather([make(d, SIZE + n) for n in range(RANKS)], make(d)), []),
        (lambda d: dist.reduce_scatter(make(d), [make(d) for _ in range(RANKS)]), [RANKS * SIZE]),
        (lambda d: dist.all_gather_into_tensor(make(d, RANKS * SIZE), make(d)), []),
        (lambda d: dist.all_to_all([make(d) for _ in range(RANKS)], [make(d) for _ in range(RANKS)]), []),
    ],
    ids=[
        "all_reduce",
        "broadcast",
        "all_gather",
        "uneven",
        "reduce_scatter",
        "into tensor",
        "to all",
    ],
)
def test_lists_of_tensors_of_one_size_are_flattened_for_a_moment(call, scratch):
    run = traced(call, world_size=RANKS, rank=1)
    blocks = run.trace.recording.blocks
    assert [block.size for block in blocks if block.owner == "workspace"] == scratch
    assert run.trace.communicators == [RANKS]


def test_work_is_done_and_has_the_tensors_of_the_caller():
    def run(device):
        given = make(device)
        work = dist.all_reduce(given, async_op=True)
        future = work.get_future().wait()
        gathered = [make(device) for _ in range(RANKS)]
        dist.all_gather(gathered, given)
        return work.wait(), work.is_completed(), future[0].data_ptr() == given.data_ptr(), str(given.device)

    assert traced(run, world_size=RANKS).answer == (True, True, True, "cuda:0")


def test_each_group_that_is_used_has_a_communicator():
    def run(device):
        pairs, unused = dist.new_group([0, 1]), dist.new_group([0, 2])
        for group in (None, pairs, pairs):
            dist.all_reduce(make(device), group=group)
        return unused is not None

    assert traced(run, world_size=RANKS).trace.communicators == [RANKS, 2]


def replicated(steps, **options):
    def build(device):
        model = DistributedDataParallel(nn.Linear(64, 64).to(device), device_ids=[device], **options)
        return training(model, lambda: model(torch.empty(2, 64, device=device)).sum())

    return trace(build, machine("h200"), (2, 13), steps, world_size=2)


@pytest.mark.parametrize(
    ("steps", "until", "held"),
    [(1, None, 0), (2, None, 4 * (64 * 64 + 64)), (3, None, 4 * (64 * 64 + 64)), (3, 0, 0)],
)
def test_the_bucket_of_the_first_step_is_held_until_the_second_backward(monkeypatch, steps, until, held):
    if until is not None:
        monkeypatch.setattr(collectives, "HOLDS_UNTIL_STEP", until)
    found = replicated(steps)
    assert found.held == held
