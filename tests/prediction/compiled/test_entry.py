"""What `torch.compile` does in a trace."""

from __future__ import annotations

import pytest
import torch

import memtriage
from memtriage.prediction.compiled import inductor


def build_compiled(device):
    model = torch.nn.Linear(64, 64).to(device)
    compiled = torch.compile(lambda given: model(given).relu().sum())
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        compiled(torch.randn(8, 64, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_the_note_says_why_compiled_code_is_left_out(monkeypatch):
    monkeypatch.setattr(inductor, "missing", lambda: "Inductor needs Triton")
    prediction = memtriage.predict(build_compiled)
    assert "torch.compile is left out: Inductor needs Triton" in prediction.notes


def test_the_compiler_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(inductor, "missing", lambda: None)
    with pytest.raises(ValueError, match="cannot be predicted with torch"):
        memtriage.predict(build_compiled, torch_version="2.8")
