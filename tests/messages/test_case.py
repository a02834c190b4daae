"""A failure and what is known of it: which process in a message is this one, and the phase of training."""

from __future__ import annotations

import pytest

from memtriage.messages.case import phase_of, processes
from memtriage.messages.grammar.message import Message
from memtriage.model.explanation import Field
from memtriage.model.position import TrainingPhase
from support.message_cases import GIB, MIB


def message(*uses: int | None, **fields: Field) -> Message:
    """A message of a process that reserved 10 GiB, and what it lists of processes on the device."""
    figures: dict[str, Field] = {"allocated": 9 * GIB, "reserved_unallocated": GIB, **fields}
    if uses:
        figures["processes"] = [{"pid": pid, "in_use": use} for pid, use in enumerate(uses, 7)]
    return Message("cuda-v2", fields={name: size for name, size in figures.items() if size is not None})


@pytest.mark.parametrize(
    ("listed", "own", "others"),
    [
        (message(), None, None),
        (message(this_process=11 * GIB), 11 * GIB, None),
        (message(GIB, this_process=11 * GIB), 11 * GIB, GIB),
        # A container's own process id is not the host's: it is the one with all that was reserved.
        (message(GIB, 11 * GIB), 11 * GIB, GIB),
        (message(GIB, 12 * GIB, 11 * GIB), 11 * GIB, 13 * GIB),
        (message(10 * GIB - 64 * MIB), 10 * GIB - 64 * MIB, 0),
        (message(10 * GIB - 64 * MIB - 1), None, 10 * GIB - 64 * MIB - 1),
        # One that the message also names is another, whatever it uses.
        (message(11 * GIB, this_process=11 * GIB), 11 * GIB, 11 * GIB),
        (message(11 * GIB, reserved_unallocated=None), None, 11 * GIB),
        (message(None), None, None),
        (message(None, GIB), None, GIB),
    ],
)
def test_which_process_is_this_one(listed: Message, own: int | None, others: int | None) -> None:
    rest = processes(listed)[1]
    assert (processes(listed)[0], sum(use for _, use in rest)) == (own, others or 0)
    assert [use for _, use in rest] == sorted((use for _, use in rest), reverse=True)


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ([], None),
        ([("/app/train.py", "main", 3)], None),
        ([("/venv/torch/_tensor.py", "backward", 630)], "backward"),
        ([("/venv/torch/optim/adam.py", "step", 7)], "optimizer"),
        ([("/app/train.py", "evaluate", 7)], "evaluation"),
        # Before training, only functions that load or make weights tell.
        ([("/app/model.py", "load_weights", 7)], "setup"),
        ([("/app/model.py", "Model._load_ema_state_dict", 7)], "setup"),
        ([("/app/model.py", "from_pretrained", 7)], "setup"),
        ([("/app/data.py", "load_dataset", 7)], None),
        ([("/app/cache.py", "__init__", 7)], None),
        ([("/venv/torch/nn/modules/linear.py", "__init__", 7)], "setup"),
        ([("C:\\venv\\torch\\nn\\modules\\linear.py", "__init__", 7)], "setup"),
        ([("/venv/torch/nn/modules/module.py", "convert", 7)], "setup"),
        ([("/venv/torch/serialization.py", "load", 7)], "setup"),
        ([("/a.py", "a", 1), ("/b.py", "b", 1), ("/app/model.py", "load_model", 7)], "setup"),
        ([("/a.py", "a", 1), ("/b.py", "b", 1), ("/c.py", "c", 1), ("/m.py", "load_model", 7)], None),
    ],
)
def test_the_phase_that_a_traceback_shows(
    frames: list[tuple[str, str, int]], phase: TrainingPhase | None
) -> None:
    assert phase_of(frames) == phase
