"""A prediction beside the record of a run."""

import msgspec
import pytest
import torch
from torch import nn

from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.model.marks import Mark
from memtriage.prediction.api import predict_program
from memtriage.store.layout import identify, record_path
from memtriage.store.records import Start
from memtriage.store.writer import RankWriter
from support.training import training

WIDTH = 256
WEIGHT = WIDTH * WIDTH * 4
WORKSPACE = 64 << 20
SEGMENTS = 70 << 20
SCALAR = 4
CONTEXT = 500 << 20


def build(device):
    model = nn.Linear(WIDTH, WIDTH, bias=False).to(device)
    return training(
        model,
        lambda: model(torch.randn(64, WIDTH, device=device)).sum(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


def mark(name, step, allocated):
    return Mark(
        name=name,
        step=step,
        microbatch=1,
        rank=None,
        time_s=float(step),
        device="cuda:0",
        allocated=allocated,
        reserved=SEGMENTS,
    )


def row(name, count, owner=None):
    return LedgerRow(row=name, bytes=count, owner=owner)


AT_STEP_END = [
    row("requested", WORKSPACE, "c++ only"),
    row("requested", WEIGHT, "parameter"),
    row("requested", WEIGHT, "gradient"),
    row("requested", WEIGHT, "optimizer state"),
    row("requested", 1000, "saved for backward"),
    row("requested", 3000, "variable"),
    row("rounding", 96),
    row("releasable", 1 << 20),
    row("stranded", SEGMENTS - WORKSPACE - 3 * WEIGHT - 4096 - (1 << 20)),
    row("context", CONTEXT),
]


@pytest.fixture
def record(tmp_path):
    def write(ledger=None, steps=4, device="cuda:0"):
        path = record_path(tmp_path, identify({}, pid=1, time_s=0.0))
        writer = RankWriter(path)
        writer.write("start", Start(time=1.0, argv=["train.py"]))
        for step in range(1, steps + 1):
            for name, done in (("backward", step - 1), ("step", step)):
                made = mark(name, done, WORKSPACE + (2 if step == 1 else 3) * WEIGHT)
                writer.write("mark", msgspec.structs.replace(made, device=device))
        if ledger is not None:
            rows = Ledger(device="cuda:0", total=SEGMENTS + CONTEXT, source="test", rows=ledger)
            writer.write("ledger", rows)
        writer.close()
        return tmp_path

    return write


def test_marks_stand_beside_the_same_instants(record):
    against = predict_program(build, against=record()).against
    assert [(each.name, each.step, each.recorded_step) for each in against.marks] == [
        ("backward", 1, 1),
        ("step", 1, 1),
        ("backward", 2, 4),
        ("step", 2, 4),
    ]
    first_backward, first_step, backward, step = against.marks
    # Momentum is there from the first optimizer step on; the gradient until after it.
    assert 0 <= first_backward.predicted_allocated - (WORKSPACE + 2 * WEIGHT) < 8 << 10
    assert 0 <= first_step.predicted_allocated - (WORKSPACE + 3 * WEIGHT) < 8 << 10
    # The loss is there until backward returns.
    assert backward.predicted_allocated - 512 == step.predicted_allocated == first_step.predicted_allocated
    assert backward.allocated == WORKSPACE + 3 * WEIGHT
    assert {each.reserved for each in against.marks} == {SEGMENTS}
    assert against.owners == []
    assert any("no ledger" in note for note in against.notes)


def test_a_ledger_is_compared_owner_by_owner(record):
    prediction = predict_program(build, against=record(AT_STEP_END))
    against = prediction.against
    by_owner = {owner.owner: (owner.recorded, owner.predicted) for owner in against.owners}
    for owner, count in (
        ("workspace", WORKSPACE),
        ("parameter", WEIGHT),
        ("gradient", WEIGHT),
        ("optimizer state", WEIGHT),
    ):
        assert by_owner[owner] == (count, count)
    assert by_owner["activation"] == (1000, SCALAR)
    assert by_owner["other tensors"] == (3000, 0)
    assert by_owner["outside the allocator"] == (CONTEXT, prediction.outside_allocator)
    assert sum(recorded for recorded, _ in by_owner.values()) == SEGMENTS + CONTEXT
    # Of the instants with all of these, the one with the loss comes nearest to the other tensors.
    assert against.instant == "end of backward in step 2"


def test_a_ledger_without_owners_says_so(record):
    rows = [row("requested", WORKSPACE + 3 * WEIGHT), row("context", CONTEXT)]
    by_owner = {
        owner.owner: owner.recorded for owner in predict_program(build, against=record(rows)).against.owners
    }
    assert by_owner["parameter"] is None
    assert by_owner["owner not recorded"] == WORKSPACE + 3 * WEIGHT


def test_a_short_record_is_compared_as_far_as_it_goes(record):
    against = predict_program(build, against=record(steps=1)).against
    assert {each.step for each in against.marks} == {1}
    assert any("ends after step 1" in note for note in against.notes)


def test_a_record_that_cannot_be_used(record, tmp_path):
    with pytest.raises(ValueError, match="no memtriage record"):
        predict_program(build, against=tmp_path)
    with pytest.raises(ValueError, match="no marks of a GPU"):
        predict_program(build, against=record(device="cpu"))
