"""What rank 0 broadcasts is what the others receive, if rank 0 was traced before."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memtriage.cli import app
from memtriage.prediction.distributed.broadcasts import LIMIT, Broadcasts
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.trace import trace

RANKS = 4


def traced(seen, rank, received=None, group=None):
    """Trace a program that broadcasts numbers, and return its broadcasts."""
    broadcasts = Broadcasts(received)

    def build(device):
        numbers = torch.tensor([3, 5] if rank == 0 else [-1, -1], device=device)
        dist.broadcast(numbers, src=0, group=group and dist.new_group(group))
        on_host = torch.full((2,), 7 if rank == 0 else -1)
        dist.broadcast(on_host, src=0)
        seen.extend([*numbers.tolist(), *on_host.tolist()])
        model = nn.Linear(8, 8, device=device)
        return model, torch.optim.SGD(model.parameters()), lambda: None

    trace(build, machine("h200"), (2, 13), 1, RANKS, rank, broadcasts=broadcasts)
    return broadcasts


@pytest.mark.parametrize("group", [None, [0, 2]])
def test_a_rank_receives_what_rank_0_sent(group):
    first, alone, second = [], [], []
    sent = traced(first, 0, group=group).sent
    missing = traced(alone, 2, group=group)
    received = traced(second, 2, sent, group)
    assert first == second == [3, 5, 7, 7]
    assert alone == [-1] * 4
    assert (missing.missed, received.missed, received.sent) == (True, False, {})


def test_unknown_large_and_other_ranks_numbers_are_left_alone():
    def program(rank, seen, received=None):
        broadcasts = Broadcasts(received)

        def build(device):
            model = nn.Linear(8, 8, device=device)
            dist.broadcast((model.weight.detach() > 0).int(), src=0)  # not known
            dist.broadcast(torch.arange(LIMIT + 1, device=device), src=0)
            dist.broadcast(model.weight.detach(), src=0)
            other = torch.tensor([rank], device=device)
            dist.broadcast(other, src=1)
            last = torch.tensor([rank], device=device)
            dist.broadcast(last, src=0)
            seen.extend([other.item(), last.item()])
            return model, torch.optim.SGD(model.parameters()), lambda: None

        trace(build, machine("h200"), (2, 13), 1, RANKS, rank, broadcasts=broadcasts)
        return broadcasts.sent

    seen = []
    sent = program(0, seen)
    assert [*sent.values()] == [[None, None, None, [0]]]
    program(3, seen, sent)
    assert seen == [0, 0, 3, 0]
    program(3, seen, {name: numbers[:3] for name, numbers in sent.items()})  # rank 0 ended earlier
    assert seen[4:] == [3, 3]


PROGRAM = """
import torch
import torch.distributed as dist

def build(device):
    rank = dist.get_rank()
    agreed = [2048 if rank == 0 else None]
    dist.broadcast_object_list(agreed, src=0)
    rows = torch.tensor([4 if rank == 0 else -1], device=device)
    dist.broadcast(rows, src=0)
    model = torch.nn.Linear(agreed[0], agreed[0], device=device)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.ones(rows.item(), agreed[0], device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
"""


@pytest.mark.parametrize("choice", ["2 --rank 1", "2 --all-ranks", "1"])
def test_the_command_traces_rank_0_where_another_needs_it(choice, tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    assert app.main(["predict", f"{file}:build", "--json", "--world-size", *choice.split()]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["by_owner"]["parameter"] == 4 * (2048 * 2048 + 2048)
