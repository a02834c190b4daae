"""While a trace runs the machine has one GPU; afterwards everything is as it was."""

import os
import pickle

import msgspec
import numpy as np
import pytest
import torch
import torch._dynamo  # replaces attributes of torch when it is first imported
from torch import nn
from torch.utils._device import DeviceContext
from torch.utils.checkpoint import checkpoint

import memtriage
from support.traced import traced
from support.training import training

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
    def run(device):
        with torch.device(device):
            made = torch.zeros(2)
        like = torch.ones(1).to(made), torch.empty_like(made), made.new_zeros(2)
        kinds = [each.device.type for each in (made, *like)]
        return torch.cuda.get_device_name(), torch.cuda.get_device_capability(), kinds

    assert traced(run, "a100").answer == ("NVIDIA A100-SXM4-80GB", (8, 0), ["cuda"] * 4)


def test_bad_arguments_are_refused_as_by_the_originals():
    @traced
    def run(device):
        with pytest.raises(TypeError, match="unexpected keyword argument 'gpu'"):
            torch.cuda.synchronize(gpu=0)
        with pytest.raises(TypeError, match="positional"):
            torch.cuda.is_available(1)


def test_devices_are_given_by_keyword():
    @traced
    def run(device):
        for place in (device, "cuda", 0, None):
            assert torch.cuda.current_stream(device=place) == torch.cuda.default_stream(device=place)
            torch.cuda.synchronize(device=place)
            free, total = torch.cuda.mem_get_info(device=place)
            assert 0 < free < total
            assert torch.cuda.memory_stats(device=place)["allocated_bytes.all.current"] >= 512
            state = torch.cuda.get_rng_state(device="cuda" if place is None else place)
            torch.cuda.set_rng_state(state, device="cuda" if place is None else place)
            assert "cuda" in torch.cuda.memory_summary(device=place).lower()
            with torch.cuda.device(place):
                assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_routes_again_as_in_forward(use_reentrant):
    routed = []

    def build(device):
        router, expert = nn.Linear(64, 8).to(device), nn.Linear(64, 64).to(device)

        def layer(hidden):
            weights, chosen = router(hidden).softmax(-1).max(-1)
            tokens = torch.where(chosen == 0)[0]
            routed.append(len(tokens))
            return expert(hidden[tokens]) * weights[tokens, None]

        def step():
            hidden = torch.randn(4096, 64, device=device, requires_grad=True)
            checkpoint(layer, hidden, use_reentrant=use_reentrant).sum().backward()

        return nn.ModuleList([router, expert]), torch.optim.SGD(router.parameters()), step

    memtriage.predict(build, steps=3)
    forward, again = routed[::2], routed[1::2]
    assert forward == again
    assert len(set(forward)) > 1


def test_the_random_state_of_a_gpu_is_accepted():
    @traced
    def run(device):
        for state in (torch.cuda.get_rng_state(), torch.zeros(16, dtype=torch.uint8)):
            drawn = []
            for _ in range(2):
                torch.cuda.set_rng_state_all([state])
                drawn.append(torch.rand(4, device=device).tolist())
            assert (drawn[0] == drawn[1]) == (len(state) != 16)


def test_large_tensors_of_the_host_are_read_as_ones():
    @traced
    def run(device):
        large = torch.rand(3, 1 << 20)
        assert (large.numpy() == 1).all() and large.numpy().shape == large.shape
        assert large.numpy().dtype == np.float32
        assert (torch.rand(3, 1 << 20, device=device).cpu().numpy() == 1).all()

    said = [note for note in run.notes if "taken as ones" in note]
    assert len(said) == 3 and all(__file__ in each for each in said)


def test_numbers_are_devices():
    @traced
    def run(device):
        places = [
            torch.device(0),
            torch.zeros(2, device=0).device,
            torch.ones_like(torch.zeros(2), device=0).device,
            torch.zeros(2).new_ones(2, device=0).device,
            torch.zeros(2).to(0).device,
            torch.zeros(2).cuda(0).device,
            torch.tensor([1.0], device=0).device,
            nn.Linear(2, 2, device=0).weight.device,
            nn.Linear(2, 2).to(0).weight.device,
            nn.Linear(2, 2).to(device=0, dtype=torch.half).weight.device,
            pickle.loads(pickle.dumps(torch.device(0))),
        ]
        assert places == [torch.device("cuda", 0)] * len(places)
        assert all(isinstance(place, torch.device) for place in places)


def test_counters_are_those_of_the_simulated_allocator():
    asked = []
    kept = []

    def build(device):
        model = nn.Linear(1024, 1024).to(device)

        def step():
            torch.cuda.reset_peak_memory_stats()
            model(torch.randn(512, 1024, device=device)).sum().backward()
            asked.append((torch.cuda.max_memory_allocated(device=0), torch.cuda.max_memory_reserved()))
            asked.append((torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()))
            model.zero_grad()
            kept.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))

        return model, torch.optim.SGD(model.parameters()), step

    prediction = memtriage.predict(build, steps=2, allocator_conf="expandable_segments:True")
    expected = [(step.peak_allocated, step.peak_reserved) for step in prediction.steps for _ in range(2)]
    assert asked == expected
    assert [each for each, _ in kept] == [step.end_allocated for step in prediction.steps]
    assert all(reserved >= allocated for allocated, reserved in kept)


def test_a_job_sees_a_device_for_each_rank():
    def build(device):
        assert device == torch.device("cuda", 3)
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (4, 3)
        assert torch.accelerator.device_count() == 4
        assert torch.cuda.current_stream().device == device
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        model = nn.Linear(64, 64).to(local)
        assert model.weight.device == torch.device("cuda", local)
        assert model.weight.get_device() == 3
        model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
        return training(model, lambda: model(torch.randn(8, 64, device=local)).sum())

    memtriage.predict(build, world_size=4, rank=3)


def test_trials_of_cudnn_are_bounded_beside_the_peak():
    def build(device):
        model = nn.Conv2d(16, 16, 3).to(device)
        return training(model, lambda: model(torch.randn(4, 16, 32, 32, device=device)).sum())

    plain = memtriage.predict(build)
    assert plain.cudnn_trials_bound is msgspec.UNSET
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        tried = memtriage.predict(build)
    finally:
        torch.backends.cudnn.benchmark = before
    assert tried.peak_allocated == plain.peak_allocated
    assert tried.cudnn_trials_bound > 100 * tried.peak_reserved
    assert any("by trial" in note for note in tried.notes)


def test_tensors_and_numbers_of_the_device_become_a_tensor():
    @traced
    def run(device):
        source = torch.ones(3)
        assert torch.tensor(source, device="cuda").device.type == "cuda"
        assert torch.tensor(source, device="cuda", dtype=torch.float64).dtype == torch.float64
        assert torch.tensor(source).device.type == "cpu"
        assert torch.tensor([1.0, 2.0], device="cuda", requires_grad=True).requires_grad
        numbers = [torch.tensor(value, device=device) for value in (3, 5)]
        assert torch.tensor(numbers, device=device).tolist() == [3, 5]
        assert torch._C._cuda_getCurrentRawStream(0) == 0


def test_tensors_of_the_meta_device_take_no_memory():
    def build(device):
        model = nn.Embedding(1024, 256, device=device)
        weight = model.weight
        made = [
            torch.zeros_like(weight, device="meta"),
            torch.randn_like(weight, device=torch.device("meta")),
            weight.new_empty(1024, 256, device="meta"),
            weight.to("meta"),
            weight.to("meta", torch.bfloat16),
            weight.to(dtype=torch.bfloat16, device="meta"),
            weight.to(torch.empty(0, device="meta")),
        ]
        assert [tensor.device.type for tensor in made] == ["meta"] * len(made)
        assert made[4].dtype is made[5].dtype is torch.bfloat16
        assert made[3].requires_grad
        assert torch.zeros_like(made[0], device=device).device == device

        return model, torch.optim.SGD(model.parameters()), lambda: made

    assert memtriage.predict(build, steps=1).by_owner == {"parameter": 1 << 20}
