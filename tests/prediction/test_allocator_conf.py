"""Where none is given, the allocator's settings are those that the environment and the program set."""

import pytest
import torch
from torch import nn

import memtriage
from memtriage.prediction.api import predict_program
from memtriage.prediction.build import BuildError
from support.training import training

EXPANDABLE = "expandable_segments:True"
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def program(device):
    model = nn.Linear(1500, 1500).to(device)
    return training(model, lambda: model(torch.randn(800, 1500, device=device)).sum())


def said(prediction):
    return [note for note in prediction.notes if "allocator settings" in note]


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_environment_are_followed(name, monkeypatch):
    expected = predict_program(program, allocator_conf=EXPANDABLE)
    plain = predict_program(program)
    assert expected.peak_reserved < plain.peak_reserved
    monkeypatch.setenv(name, EXPANDABLE)
    prediction = predict_program(program, allocator_conf=None)
    assert prediction.peak_reserved == expected.peak_reserved
    assert said(prediction) == [f"allocator settings of the environment: {EXPANDABLE}"]
    given = predict_program(program)
    assert given.peak_reserved == plain.peak_reserved and not said(given)


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings is deprecated")
@pytest.mark.parametrize(
    "sets",
    [
        lambda monkeypatch: monkeypatch.setenv(NAMES[0], EXPANDABLE),
        lambda monkeypatch: torch.cuda.memory._set_allocator_settings(EXPANDABLE),
    ],
    ids=["environment", "function"],
)
def test_the_program_sets_them_before_it_uses_the_device(sets, monkeypatch):
    def build(device):
        sets(monkeypatch)
        return program(device)

    def too_late(device):
        made = program(device)
        sets(monkeypatch)
        return made

    expected = predict_program(program, allocator_conf=EXPANDABLE).peak_reserved
    plain = predict_program(program).peak_reserved
    assert predict_program(too_late, allocator_conf=None).peak_reserved == plain
    monkeypatch.delenv(NAMES[0], raising=False)
    assert predict_program(build, allocator_conf=None).peak_reserved == expected
    monkeypatch.delenv(NAMES[0], raising=False)
    given = predict_program(build)
    assert given.peak_reserved == plain and not said(given)


@pytest.mark.filterwarnings("ignore:.*_set_allocator_settings is deprecated")
def test_settings_that_come_too_late_are_named_where_none_are_given():
    def too_late(device):
        made = program(device)
        torch.cuda.memory._set_allocator_settings(EXPANDABLE)
        return made

    (note,) = said(predict_program(too_late, allocator_conf=None))
    assert note == f"allocator settings changed after the device was used are left out: {EXPANDABLE}"
    assert not said(predict_program(too_late))


def test_settings_that_torch_refuses_are_named(monkeypatch):
    monkeypatch.setenv(NAMES[0], "nonsense:1")
    with pytest.raises(BuildError, match=r"of the environment.*nonsense.*--allocator-conf"):
        predict_program(program, allocator_conf=None)


def test_a_plan_starts_from_them(monkeypatch):
    monkeypatch.setenv(NAMES[0], EXPANDABLE)
    plan = memtriage.plan(program, "8GiB", allocator_conf=None)
    assert plan.before.reserved == memtriage.plan(program, "8GiB", allocator_conf=EXPANDABLE).before.reserved
    assert any(EXPANDABLE in note for note in plan.notes)
