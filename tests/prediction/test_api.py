"""Predictions against what an H200 measured (torch 2.11), and against arithmetic."""

import pytest
import torch
from torch import nn

import memtriage
from support import groundtruth
from support.training import training

MEASURED_WITH = "2.11.0"
CLOSE = 0.001
MIB = 1 << 20


@pytest.mark.parametrize("name", ["mlp-wide", "tiny-350m", "tiny-350m-ckpt"])
def test_a_measured_workload_is_predicted_to_the_permille(name):
    prediction = memtriage.predict(groundtruth.workload(name), torch_version=MEASURED_WITH)
    truth = groundtruth.measured("measured")[name]["steps"]
    for step, real in zip(prediction.steps, truth, strict=False):
        assert step.peak_allocated == pytest.approx(real["peak_alloc"], rel=CLOSE)
        assert step.peak_reserved == pytest.approx(real["peak_reserved"], rel=CLOSE)
        assert step.end_allocated == pytest.approx(real["marks"][-1][1], rel=CLOSE)
    assert prediction.peak_allocated == prediction.steps[-1].peak_allocated
    assert sum(prediction.by_owner.values()) == prediction.peak_allocated


def test_model_without_products_is_what_arithmetic_says():
    def build(device):
        model = nn.Embedding(1024, 256, device=device)
        return training(
            model, lambda: model.weight.sum(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )

    prediction = memtriage.predict(build)
    # Parameter, gradient and momentum of 1 MiB each, and four scalars of a block each at most.
    assert prediction.steps[0].end_allocated == 2 * MIB
    assert prediction.steps[1].end_allocated == 2 * MIB
    assert 3 * MIB <= prediction.peak_allocated <= 3 * MIB + 4 * 512
    assert prediction.by_owner["parameter"] == MIB
    assert prediction.by_owner["optimizer state"] == MIB
    # Blocks of up to 1 MiB come from segments of 2 MiB.
    assert prediction.peak_reserved == 4 * MIB


@pytest.mark.parametrize("steps", [1, 3])
def test_a_build_is_predicted_in_its_last_step(steps):
    def build(device):
        model = nn.Linear(512, 512, device=device)
        rows = iter((1000, 9000, 4000))
        return training(model, lambda: model(torch.randn(next(rows), 512, device=device)).sum())

    prediction = memtriage.predict(build, steps=steps)
    peaks = [step.peak_allocated for step in prediction.steps]
    assert len(peaks) == steps and peaks[0] == min(peaks)
    assert prediction.peak_allocated == peaks[-1] == sum(prediction.by_owner.values())
    assert prediction.peak_reserved == prediction.steps[-1].peak_reserved


def test_another_gpu_has_another_workspace():
    hopper = memtriage.predict(groundtruth.workload("mlp-wide"), torch_version=MEASURED_WITH)
    ampere = memtriage.predict(groundtruth.workload("mlp-wide"), torch_version=MEASURED_WITH, gpu="a100")
    assert hopper.peak_allocated - ampere.peak_allocated == 2 * (32 * MIB - 8320 * 1024)
    assert any("H200" in note for note in ampere.notes)


def test_what_does_not_fit_is_said():
    prediction = memtriage.predict(groundtruth.workload("tiny-350m"), torch_version=MEASURED_WITH, gpu="t4")
    assert any("does not fit Tesla T4" in note for note in prediction.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "steps=0"),
        ({"gpu": "abacus"}, "no GPU kind 'abacus'"),
        ({"allocator_conf": "nonsense:1"}, "nonsense"),
        ({"world_size": 4, "rank": 4}, "world_size=4, rank=4"),
        ({"world_size": 0}, "world_size=0"),
        ({"torch_version": "two"}, "torch_version"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        memtriage.predict(lambda device: None, **arguments)


def test_what_is_trained_outside_of_models_is_a_parameter():
    def build(device):
        model = nn.Linear(8, 1024, device=device).requires_grad_(False)
        image = torch.zeros(1 << 15, 8, device=device, requires_grad=True)
        return training(model, lambda: model(image).sum(), torch.optim.SGD([image], lr=0.1))

    assert MIB < memtriage.predict(build).by_owner["parameter"] < 1.1 * MIB


def test_a_share_that_is_an_attribute_of_its_parameter_is_a_parameter():
    def build(device):
        model = nn.Embedding(1024, 512, device=device)
        weight = model.weight
        weight.ds_tensor = weight.detach()[:512].clone()  # as ZeRO-3 keeps it
        weight.data = torch.empty(0, device=device)
        optimizer = torch.optim.SGD([weight.ds_tensor], lr=0.1)

        def step():
            weight.data = torch.cat([weight.ds_tensor, weight.ds_tensor])
            weight.pow(2).sum().backward()
            weight.data = torch.empty(0, device=device)
            weight.grad = None

        return model, optimizer, step

    assert memtriage.predict(build).by_owner["parameter"] == MIB
