"""Where none is given, the allocator's settings are those that the environment and the program set."""

import pytest
import torch
from torch import nn

from memtriage.predict.api import predict
from memtriage.predict.build import BuildError
from memtriage.predict.plan.api import plan

EXPANDABLE = "expandable_segments:True"
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def training(device):
    model = nn.Linear(1500, 1500).to(device)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.randn(800, 1500, device=device)).sum().backward()
        optimizer.step()

    return model, optimizer, step


def said(prediction):
    return [each for each in prediction.notes if "allocator settings" in each]


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_environment_are_followed(name, monkeypatch):
    expected = predict(training, allocator_conf=EXPANDABLE)
    plain = predict(training)
    assert expected.peak_reserved < plain.peak_reserved
    monkeypatch.setenv(name, EXPANDABLE)
    found = predict(training, allocator_conf=None)
    assert found.peak_reserved == expected.peak_reserved
    assert said(found) == [f"allocator settings of the environment: {EXPANDABLE}"]
    given = predict(training)
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
        return training(device)

    def too_late(device):
        made = training(device)
        sets(monkeypatch)
        return made

    expected = predict(training, allocator_conf=EXPANDABLE).peak_reserved
    plain = predict(training).peak_reserved
    assert predict(too_late, allocator_conf=None).peak_reserved == plain
    monkeypatch.delenv(NAMES[0], raising=False)
    assert predict(build, allocator_conf=None).peak_reserved == expected
    monkeypatch.delenv(NAMES[0], raising=False)
    assert predict(build).peak_reserved == plain


def test_settings_that_torch_refuses_are_named(monkeypatch):
    monkeypatch.setenv(NAMES[0], "nonsense:1")
    with pytest.raises(BuildError, match=r"of the environment.*nonsense.*--allocator-conf"):
        predict(training, allocator_conf=None)


def test_a_plan_starts_from_them(monkeypatch):
    monkeypatch.setenv(NAMES[0], EXPANDABLE)
    found = plan(training, "8GiB", allocator_conf=None)
    assert found.before.reserved == plan(training, "8GiB", allocator_conf=EXPANDABLE).before.reserved
    assert any(EXPANDABLE in each for each in found.notes)
