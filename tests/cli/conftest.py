"""Fixtures of the tests of commands."""

from pathlib import Path

import pytest

from memtriage.cli import app, trace_options
from support.refusals import Refused

STEP_PROGRAM = """
import torch
from torch import nn

def build(device, micro_batch=64):
    print("building")
    model = nn.Linear(256, 256, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        out = model(torch.randn(micro_batch, 1024, 256, device=device))
        (out * out).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, step
"""


@pytest.fixture(autouse=True)
def no_progress_on_slow_machines(monkeypatch):
    """No line of progress among those that tests compare, however long a trace takes."""
    monkeypatch.setattr(trace_options, "_FIRST_LINE_S", float("inf"))


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    """Call a command that cannot do its work: status 2, and one line on stderr, which is returned."""

    def call(*arguments: str) -> str:
        capfd.readouterr()
        assert app.main([*arguments]) == 2
        out, err = capfd.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith("memtriage: ")]  # of progress
        assert (out, len(lines)) == ("", 1), err
        return lines[0]

    return call


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file whose function `build` makes one step of training; it prints while it does."""
    file = tmp_path / "job.py"
    file.write_text(STEP_PROGRAM)
    return file
