"""What `torch.compile` does in a trace."""

import functools

import pytest
import torch

import memtriage
from memtriage.prediction.compiled import inductor
from support.training import build_with, training


def build_compiled(device):
    model = torch.nn.Linear(64, 64).to(device)
    compiled = torch.compile(lambda given: model(given).relu().sum())
    return training(model, lambda: compiled(torch.randn(8, 64, device=device)))


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
        ({"options": {"triton.cudagraph_trees": False}}, "triton.cudagraph_trees", "Inductor's trees"),
        ({"backend": "cudagraphs"}, "backend='cudagraphs'", "Inductor's trees"),
        ({"backend": "tvm"}, "backend='tvm'", "its code is not known"),
    ],
)
@pytest.mark.parametrize("called", [True, False], ids=["called", "not called"])
@pytest.mark.parametrize("kind", ["module", "function", "decorated"])
def test_other_graphs_and_unknown_code_are_refused_when_called(monkeypatch, asked, shown, why, kind, called):
    """A library may compile what the program never calls."""
    monkeypatch.setattr(inductor, "missing", lambda: None)

    def build(device):
        model = torch.nn.Linear(64, 64).to(device)
        given = model if kind == "module" else lambda values: model(values)
        compiled = torch.compile(**asked)(given) if kind == "decorated" else torch.compile(given, **asked)
        runs = compiled if called else model
        return training(model, lambda: runs(torch.randn(8, 64, device=device)).sum())

    if called:
        with pytest.raises(ValueError, match="cannot be predicted") as refused:
            memtriage.predict(build)
        assert shown in str(refused.value) and why in str(refused.value)
    else:
        assert memtriage.predict(build).peak_allocated


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({"mode": "max-autotune-no-cudagraphs"}, {}),
        ({"options": {"max_autotune": True}}, {}),
        ({"mode": "max-autotune"}, {"mode": "reduce-overhead"}),
    ],
    ids=str,
)
def test_kernels_chosen_by_trial_are_those_of_the_default_mode(asked, same):
    def build(device, **asked):
        model = torch.nn.ParameterList([torch.randn(1 << 20, device=device)])
        compiled = torch.compile(lambda values: (values.sin().sin().sin() * values).sum(), **asked)
        return training(model, lambda: compiled(model[0]))

    tuned = memtriage.predict(functools.partial(build, **asked))
    default = memtriage.predict(functools.partial(build, **same))
    assert tuned.steps == default.steps
    assert any("max" in note and "by timing them on the GPU" in note for note in tuned.notes)
    assert not any("by timing them" in note for note in default.notes)


calling = functools.partial(build_with, count=1 << 20)


@torch.compile
def compiled_before(values):
    return (values.sin().sin().sin() * values).sum()


@torch.compile(options={"triton.cudagraph_trees": False})
def captured_before(values):
    return values.sum()


@torch.compile(options={"max_autotune": True})
def tuned_before(values):
    return values.sum()


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
def test_what_was_compiled_before_the_trace_is_compiled():
    fused = memtriage.predict(calling(compiled_before))
    plain = memtriage.predict(calling(compiled_before._torchdynamo_orig_callable))
    assert fused.peak_allocated < plain.peak_allocated / 2
    assert not any("compiled nothing" in note for note in [*fused.notes, *plain.notes])


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
def test_the_note_says_that_nothing_was_compiled():
    def build(device):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8)).to(device)
        model.compile()
        return model, torch.optim.SGD(model.parameters()), lambda: model(torch.ones(1, 8, device=device))

    assert any("compiled nothing" in note for note in memtriage.predict(build).notes)


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
def test_nothing_is_said_of_what_is_compiled_and_never_called():
    def build(device):
        torch.compile(torch.sin)  # as a library's decorator
        model = torch.nn.Linear(8, 8, device=device)
        return model, torch.optim.SGD(model.parameters()), lambda: model(torch.ones(1, 8, device=device))

    assert not any("compiled nothing" in note for note in memtriage.predict(build).notes)


@pytest.mark.skipif(inductor.missing() is not None, reason="Inductor needs Triton")
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (captured_before, r"triton\.cudagraph_trees.* cannot be predicted"),
        (tuned_before, r"max_autotune.* cannot be predicted.*before the trace"),
    ],
)
def test_options_given_before_the_trace_are_checked(function, said):
    with pytest.raises(ValueError, match=said):
        memtriage.predict(calling(function))
