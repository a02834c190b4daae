"""What a prediction had to assume is said once each, with the place in the program."""

from memtriage.prediction.notes import Notes
from support.traced import traced


def test_notes_are_said_once_and_in_order():
    notes = Notes()
    for text in "baba":
        notes.add(text)
    assert notes.all() == ["b", "a"]
    assert notes.assumptions() == []


def test_assumptions_name_the_line_of_the_program():
    notes = Notes()
    notes.add("something else")
    for _ in range(2):
        notes.assume("a number is 1")  # this line
    line = test_assumptions_name_the_line_of_the_program.__code__.co_firstlineno + 4
    assert notes.assumptions() == [f"a number is 1: {__file__}:{line}"]
    assert notes.all() == ["something else", *notes.assumptions()]


def test_lines_of_torch_and_memtriage_are_not_the_programs():
    def run(device):
        import torch

        layer = torch.nn.Linear(4, 4).to(device)
        return layer(torch.empty(2, 4, device=device)).sum().item()

    line = run.__code__.co_firstlineno + 4
    assert traced(run).notes == [f"an unknown number is taken as 1: {__file__}:{line}"]
