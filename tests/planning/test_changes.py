"""A changed program: with the arguments of its changes, and their edits in the order that each needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.planning.changes import Change, changed
from memtriage.prediction.build import BuildError, Built


def change(action: str = "", **options: Any) -> Change:
    return Change(rung="rung", action=action, speed="", maths="same", code={"torch": ""}, **options)


class Program:
    """A build function that notes what it and its step were given, and who edited it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def build(self, device: str, micro_batch: int = 8, depth: int = 4) -> Any:
        self.seen.append((device, micro_batch, depth))
        model = nn.Linear(1, 1, device="meta")  # any device but the host's
        return model, torch.optim.SGD(model.parameters(), lr=0.1), self.step

    def step(self, length: int = 512, fast: bool = False) -> str:
        self.seen.append((length, fast))
        return "loss"

    def editing(self, name: str) -> Callable[[Built], Built]:
        def edit(built: Built) -> Built:
            self.seen.append(name)
            return built

        return edit


def test_arguments_of_all_changes_reach_build_and_step_the_last_one_first() -> None:
    program = Program()
    changes = (
        change(build_arguments={"micro_batch": 4, "depth": 2}, step_arguments={"length": 256}),
        change(build_arguments={"micro_batch": 2}, step_arguments={"fast": True}),
    )
    model, optimizers, step = changed(program.build, changes)("cuda")
    assert isinstance(model, nn.Linear) and len(optimizers) == 1
    assert step() == "loss"
    assert program.seen == [("cuda", 2, 2), (256, True)]


def test_a_step_without_arguments_is_the_program_s_own() -> None:
    program = Program()
    _, _, step = changed(program.build, (change(),))("cuda")
    assert step == program.step
    assert program.seen == [("cuda", 8, 4)]


def test_edits_are_made_in_order_and_the_outermost_last() -> None:
    program = Program()
    changes = [
        change(name, edit=program.editing(name), outermost=name in ("shard", "accumulate"))
        for name in ("shard", "attention", "accumulate", "checkpoint")
    ]
    changed(program.build, tuple(changes))("cuda")
    assert program.seen[1:] == ["attention", "checkpoint", "shard", "accumulate"]


def test_what_an_edit_returns_is_the_program() -> None:
    other = Built(nn.Linear(2, 2), (), lambda: "other")
    program = Program()
    assert changed(program.build, (change(edit=lambda built: other),))("cuda") == (
        other.model,
        (),
        other.step,
    )


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(BuildError):
        changed(lambda device: None, ())("cuda")


@pytest.mark.parametrize(
    ("options", "traced"),
    [
        ({}, True),
        ({"build_arguments": {"a": 1}}, True),
        ({"conf": "expandable_segments:True"}, False),
        ({"primed": True}, False),
        ({"conf": "a:1", "primed": True}, False),
    ],
)
def test_what_changes_the_allocator_alone_needs_no_other_trace(options: dict[str, Any], traced: bool) -> None:
    assert change(**options).traced is traced
