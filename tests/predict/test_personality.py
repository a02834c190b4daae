"""While a trace runs the machine has one GPU; afterwards everything is as it was."""

import pytest
import torch
from torch import nn
from torch.utils._device import DeviceContext

import memtriage

PLACES = [
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.random,
    torch.accelerator,
    torch.backends.cuda,
    torch.backends.cudnn,
    torch.version,
    DeviceContext,
]


def pictured():
    return [dict(vars(place)) for place in PLACES]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(fails):
    def build(device):
        model = nn.Linear(4, 4).to(device)

        def step():
            assert torch.cuda.is_available()
            if fails:
                raise RuntimeError("no")

        return model, torch.optim.SGD(model.parameters()), step

    before = pictured()
    if fails:
        with pytest.raises(ValueError, match="RuntimeError"):
            memtriage.predict(build, steps=1)
    else:
        memtriage.predict(build, steps=1)
    for was, now in zip(before, pictured(), strict=True):
        assert {name for name in was if was[name] is not now.get(name)} == set()
        assert set(now) == set(was)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]


def test_what_a_program_may_ask_is_answered():
    answers = {}

    def build(device):
        model = nn.Linear(4, 4).to(device)
        there = model.weight

        def step():
            answers.update(
                device=str(there.device),
                flags=(there.is_cuda, there.is_cpu, there.is_meta, there.get_device()),
                stays=there.to(device) is there and there.cuda() is there,
                copies=there.to(device, copy=True) is not there,
                kind=(torch.cuda.get_device_name(), torch.cuda.get_device_capability()),
                count=torch.cuda.device_count(),
                free=torch.cuda.mem_get_info()[0] < torch.cuda.mem_get_info()[1],
                shown=repr(there.detach()),
                like=(torch.ones(1).to(there).device.type, torch.empty_like(there).device.type),
                kept=there.new_zeros(2).device.type,
                made=torch.tensor([1.0], device=device).device.type,
            )
            with torch.device(device):
                answers["by context"] = torch.zeros(2).device.type

        return model, torch.optim.SGD(model.parameters()), step

    memtriage.predict(build, steps=1, gpu="a100")
    assert answers == {
        "device": "cuda:0",
        "flags": (True, False, False, 0),
        "stays": True,
        "copies": True,
        "kind": ("NVIDIA A100-SXM4-80GB", (8, 0)),
        "count": 1,
        "free": True,
        "shown": "tensor(..., device='cuda:0', size=(4, 4), dtype=torch.float32)",
        "like": ("cuda", "cuda"),
        "kept": "cuda",
        "made": "cuda",
        "by context": "cuda",
    }
