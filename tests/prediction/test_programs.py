"""Programs of many kinds run to their end, and what they assume is said."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memtriage
from support.traced import traced
from support.training import training

GPU_HERE = torch.cuda.is_available()
PARAMETERS = 4 * (64 * 128 + 128 + 128 * 64 + 64)


def net(device):
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64)).to(device)


def random(device, *shape):
    return torch.randn(*shape or (8, 64), device=device)


def encoder_with_a_mask(device):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    mask = torch.zeros(4, 10, dtype=torch.bool, device=device)
    return training(model, lambda: model(random(device, 4, 10, 64), src_key_padding_mask=mask).sum())


def checkpoint_under_autocast(device):
    model = net(device)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return checkpoint(model, random(device), use_reentrant=False).float().sum()

    return training(model, loss)


def gradient_penalty(device):
    model = net(device)

    def loss():
        given = random(device).requires_grad_()
        result = model(given).sum()
        (gradient,) = torch.autograd.grad(result, given, create_graph=True)
        return result + gradient.pow(2).sum()

    return training(model, loss)


def pictures_channels_last(device):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.GroupNorm(4, 8),
        nn.SiLU(),
        nn.Upsample(scale_factor=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ).to(device, memory_format=torch.channels_last)

    def loss():
        pictures = random(device, 4, 3, 32, 32).to(memory_format=torch.channels_last)
        return F.cross_entropy(model(pictures), torch.randint(0, 10, (4,), device=device))

    return training(model, loss)


def streams_and_generators(device):
    model = net(device)
    stream = torch.cuda.Stream()
    generator = torch.Generator(device=device).manual_seed(0)

    def loss():
        with torch.cuda.stream(stream):
            given = torch.randn(8, 64, device=device, generator=generator)
        torch.cuda.current_stream().wait_stream(stream)
        given.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() > PARAMETERS
        return model(given).sum()

    return training(model, loss)


def evaluation_in_inference_mode(device):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model.train()
        model(random(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.inference_mode():
            hidden = F.rms_norm(F.silu(model(random(device))), (64,)).view(1, 8, 4, 16).transpose(1, 2)
            assert bool(torch.isfinite(F.scaled_dot_product_attention(hidden, hidden, hidden)).all())

    return model, optimizer, step


def selective_checkpoint(device):
    model = net(device)

    def policy(context, operator, *args, **kwargs):
        kept = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return training(
        model, lambda: checkpoint(model, random(device), use_reentrant=False, context_fn=contexts).sum()
    )


PROGRAMS = [
    evaluation_in_inference_mode,
    selective_checkpoint,
    encoder_with_a_mask,
    checkpoint_under_autocast,
    gradient_penalty,
    pictures_channels_last,
    streams_and_generators,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_is_predicted(program):
    prediction = memtriage.predict(program)
    assert len(prediction.steps) == 2
    assert sum(prediction.by_owner.values()) == prediction.peak_allocated
    assert 0 < prediction.by_owner["parameter"] <= prediction.steps[-1].end_allocated
    assert prediction.peak_allocated <= prediction.peak_reserved
    # Nothing is left of the trace.
    assert torch.cuda.is_available() is GPU_HERE
    assert torch.randn(2).device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_last_states_of_a_recurrent_layer_can_be_fed_back(layer):
    def run(device):
        model, inputs = layer(32, 64, 2).to(device), random(device, 10, 4, 32)
        _, states = model(inputs)
        output, states = model(inputs, states)
        output.sum().backward()
        return (states[0] if isinstance(states, tuple) else states).shape

    assert traced(run).answer == (2, 4, 64)


def test_activations_saved_on_the_host_take_no_device_memory():
    def build(device, where):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(device)

        def loss():
            with where():
                return model(random(device, 8192, 64)).sum()

        return training(model, loss)

    here = memtriage.predict(lambda device: build(device, contextlib.nullcontext))
    away = memtriage.predict(lambda device: build(device, torch.autograd.graph.save_on_cpu))
    assert here.peak_allocated - away.peak_allocated > 4 * 8192 * 64 * 4
