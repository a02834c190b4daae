"""Events are counted while a program runs, and nothing of that is left."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.utils.data import DataLoader, dataloader

from memtriage.observe.events import EventCounts


class Program:
    """How many backwards a program has made, and what malloc has handed out."""

    backwards = 0
    in_use = 0


@pytest.fixture
def program() -> Iterator[tuple[Program, EventCounts]]:
    program = Program()
    counts = EventCounts(lambda: program.backwards, lambda: program.in_use)
    counts.install()
    try:
        yield program, counts
    finally:
        counts.remove()


def test_what_is_replaced_is_put_back() -> None:
    owners = [
        (torch, "save"),
        (torch.serialization, "save"),
        (nn.Module, "train"),
        (dataloader._BaseDataLoaderIter, "__next__"),
        (torch.no_grad, "__enter__"),
        (torch.inference_mode, "__enter__"),
    ]
    before = [getattr(owner, name) for owner, name in owners]
    counts = EventCounts(lambda: 0, lambda: None)
    counts.install()
    assert all(getattr(owner, name) is not old for (owner, name), old in zip(owners, before, strict=True))
    counts.remove()
    assert [getattr(owner, name) for owner, name in owners] == before


def test_files_of_one_checkpoint_are_one_save(program: tuple[Program, EventCounts]) -> None:
    state, counts = program
    for step in (1, 2, 3):
        state.backwards = step
        for _ in range(2):
            torch.save({"step": step}, io.BytesIO())
    assert counts.now()["save"] == 3


def test_an_evaluation_is_a_switch_of_all_models_together(program: tuple[Program, EventCounts]) -> None:
    state, counts = program
    models = [nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for _ in range(2)]
    for step in (1, 2):
        state.backwards = step
        for model in models:
            model.eval()
            model.eval()
        for model in models:
            model.train()
    assert counts.now() == {"evaluation": 2}


def test_memory_that_comes_during_an_evaluation_or_before_a_save_is_theirs(
    program: tuple[Program, EventCounts],
) -> None:
    state, counts = program
    model = nn.Dropout()
    state.backwards, state.in_use = 1, 1000
    model.eval()
    state.in_use = 1500
    model.train()
    state.in_use = 1700
    torch.save(1, io.BytesIO())
    assert counts.came_with == {"evaluation": 500, "save": 200}


def test_batches_and_epochs_are_counted_and_a_pass_without_gradients_is_an_evaluation(
    program: tuple[Program, EventCounts],
) -> None:
    state, counts = program
    loader = DataLoader(list(range(6)), batch_size=2)
    state.backwards = 1
    assert sum(len(batch) for batch in loader) == 6
    counts.epoch_begins()
    with torch.no_grad():
        counts.epoch_begins()
    assert counts.now() == {"batch": 3, "epoch": 1, "evaluation": 1}


def test_outermost_blocks_without_gradients_are_calls_of_a_program_that_never_trains(
    program: tuple[Program, EventCounts],
) -> None:
    state, counts = program
    for _ in range(4):
        with torch.inference_mode(), torch.no_grad():
            torch.ones(1)
    assert counts.now() == {"call": 4}
    state.backwards = 1
    with torch.no_grad():
        pass
    assert counts.now() == {"call": 4}


def test_a_function_of_the_program_without_gradients_is_a_call_whoever_calls_it(
    program: tuple[Program, EventCounts],
) -> None:
    """As a module's `forward`, which torch calls; what torch does without gradients is none of its calls."""

    class Model(nn.Module):
        @torch.inference_mode()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = Model()
    for _ in range(3):
        model(torch.ones(1))
        nn.init.zeros_(torch.ones(1))
    assert program[1].now() == {"call": 3}


def test_an_exception_of_a_replaced_function_has_no_frame_of_the_watch(
    program: tuple[Program, EventCounts],
) -> None:
    class Unsaved:
        def __reduce__(self) -> str:
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one") as caught:
        torch.save(Unsaved(), io.BytesIO())
    assert not [entry for entry in caught.traceback if "memtriage" in str(entry.path)][1:]
