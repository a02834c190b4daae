"""Values that a compiler computes are made on the host, and fake tensors say where they play to be."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtriage.prediction.compiled import fakes
from memtriage.prediction.fake_cuda.stand_ins import replaced


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.ones(2).to("meta"),
        lambda: torch.ones(2).to(device="meta", dtype=torch.float64).float(),
        lambda: torch.zeros_like(torch.ones(2), device=torch.device("meta")),
        lambda: torch.ops.prims.device_put(torch.ones(2), torch.device("meta")),
        lambda: torch.zeros(2),
    ],
    ids=["made", "moved", "cast", "like", "put", "on the host"],
)
def test_values_for_a_compiler_are_on_the_host(make):
    with fakes.MadeOnHost():
        made = make()
    assert made.device.type == "cpu" and made.tolist() in ([0, 0], [1, 1])


def test_everything_that_is_replaced_is_there_and_put_back():
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in fakes.replacements()]
    assert len(before) > 15
    for owner, name, value in fakes.replacements():
        with replaced(owner, name, value):
            pass
    assert all(
        getattr(owner, name) is value or getattr(owner, name) == value for owner, name, value in before
    )
    with FakeTensorMode():
        assert (torch.ones(2).device.type, torch.ones(2, device="meta").is_meta) == ("cpu", True)
