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


@pytest.mark.parametrize(
    ("asked", "shown", "why"),
    [
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead'", "pools of CUDA graphs"),
        ({"mode": "max-autotune"}, "mode='max-autotune'", "by timing them on the GPU"),
        ({"options": {"triton.cudagraphs": True}}, "triton.cudagraphs", "pools of CUDA graphs"),
        ({"options": {"max_autotune": True}}, "max_autotune", "by timing them on the GPU"),
        ({"backend": "cudagraphs"}, "backend='cudagraphs'", "pools of CUDA graphs"),
        ({"backend": "tvm"}, "backend='tvm'", "its code is not known"),
    ],
)
def test_pools_of_graphs_and_kernels_chosen_by_trial_are_refused(monkeypatch, asked, shown, why):
    monkeypatch.setattr(inductor, "missing", lambda: None)

    def build(device):
        model = torch.nn.Linear(64, 64).to(device)
        model.compile(**asked)
        return model, torch.optim.SGD(model.parameters()), lambda: None

    with pytest.raises(ValueError, match="cannot be predicted") as refused:
        memtriage.predict(build)
    assert shown in str(refused.value)
    assert why in str(refused.value)


@torch.compile
def compiled_before(values):
    return (values.sin().sin().sin() * values).sum()


@torch.compile(options={"triton.cudagraphs": True})
def captured_before(values):
    return values.sum()


def build_calling(function):
    def build(device):
        weight = torch.nn.Parameter(torch.randn(1 << 20, device=device))
        return (
            torch.nn.ParameterList([weight]),
            torch.optim.SGD([weight]),
            lambda: function(weight).backward(),
        )

    return build


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
def test_what_was_compiled_before_the_trace_is_compiled():
    fused = memtriage.predict(build_calling(compiled_before))
    plain = memtriage.predict(build_calling(compiled_before._torchdynamo_orig_callable))
    assert fused.peak_allocated < plain.peak_allocated / 2


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
def test_options_given_before_the_trace_are_checked():
    with pytest.raises(ValueError, match=r"triton\.cudagraphs.* cannot be predicted"):
        memtriage.predict(build_calling(captured_before))
