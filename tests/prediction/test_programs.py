"""Programs of many kinds run to their end, and what they assume is said."""

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memtriage
from memtriage.prediction.compiled import inductor

GPU_HERE = torch.cuda.is_available()
PARAMETERS = 4 * (64 * 128 + 128 + 128 * 64 + 64)


def random(device, *shape):
    return torch.randn(*shape or (8, 64), device=device)


def scaled_half_precision(device, net, training):
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")

    def step():
        with torch.autocast("cuda", torch.float16):
            loss = model(random(device)).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return model, optimizer, step


def averaged_copy(device, net, training):
    model = net(device)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(random(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    return model, optimizer, step


def encoder_with_a_mask(device, net, training):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    mask = torch.zeros(4, 10, dtype=torch.bool, device=device)
    return training(model, lambda: model(random(device, 4, 10, 64), src_key_padding_mask=mask).sum())


def reentrant_checkpoint(device, net, training):
    model = net(device)
    return training(
        model, lambda: checkpoint(model, random(device).requires_grad_(), use_reentrant=True).sum()
    )


def checkpoint_under_autocast(device, net, training):
    model = net(device)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return checkpoint(model, random(device), use_reentrant=False).float().sum()

    return training(model, loss)


def saved_on_the_host(device, net, training):
    model = net(device)

    def loss():
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return model(random(device, 2048, 64)).sum()

    return training(model, loss)


def gradient_penalty(device, net, training):
    model = net(device)

    def loss():
        given = random(device).requires_grad_()
        result = model(given).sum()
        (gradient,) = torch.autograd.grad(result, given, create_graph=True)
        return result + gradient.pow(2).sum()

    return training(model, loss)


def optimizer_in_backward(device, net, training):
    model = net(device)
    optimizers = {each: torch.optim.AdamW([each]) for each in model.parameters()}

    def apply(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    return model, list(optimizers.values()), lambda: model(random(device)).sum().backward()


def built_on_the_host(device, net, training):
    model = net("cpu").cuda()
    return training(model, lambda: model(torch.randn(8, 64).to(device, non_blocking=True)).sum())


def built_on_meta(device, net, training):
    with torch.device("meta"):
        model = nn.Linear(64, 64)
    assert model.weight.is_meta
    model.to_empty(device=device)
    assert model.weight.is_cuda
    return training(model, lambda: model(random(device)).sum())


def compiled(device, net, training):
    model = net(device)
    fast = torch.compile(model)
    return training(model, lambda: fast(random(device)).sum())


def from_a_loader(device, net, training):
    model = net(device)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randint(0, 64, (64,)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))

    def loss():
        given, labels = next(batches)
        return F.cross_entropy(model(given.to(device)), labels.to(device))

    return training(model, loss)


def pictures_channels_last(device, net, training):
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


def streams_and_generators(device, net, training):
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


def several_optimizers(device, net, training):
    model = net(device)
    groups = [[parameter] for parameter in model.parameters()]
    kinds = (torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adafactor)
    optimizers = [kind(group) for kind, group in zip(kinds, groups, strict=True)]

    def step():
        model(random(device)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizers, step


def recurrent(device, net, training):
    model = nn.LSTM(32, 64, 2, batch_first=True).to(device)
    return training(model, lambda: model(random(device, 4, 10, 32))[0].sum())


def evaluation_in_inference_mode(device, net, training):
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


def selective_checkpoint(device, net, training):
    model = net(device)

    def policy(context, operator, *args, **kwargs):
        kept = operator is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return training(
        model, lambda: checkpoint(model, random(device), use_reentrant=False, context_fn=contexts).sum()
    )


def lazy_layers(device, net, training):
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.Flatten(), nn.LazyLinear(4)).to(device)
    model(random(device, 2, 4, 16))
    return training(model, lambda: model(random(device, 2, 4, 16)).sum())


PROGRAMS = [
    evaluation_in_inference_mode,
    selective_checkpoint,
    lazy_layers,
    scaled_half_precision,
    averaged_copy,
    encoder_with_a_mask,
    reentrant_checkpoint,
    checkpoint_under_autocast,
    saved_on_the_host,
    gradient_penalty,
    optimizer_in_backward,
    built_on_the_host,
    built_on_meta,
    compiled,
    from_a_loader,
    pictures_channels_last,
    streams_and_generators,
    several_optimizers,
    recurrent,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_is_predicted(program, net, training):
    prediction = memtriage.predict(lambda device: program(device, net, training))
    assert len(prediction.steps) == 2
    assert sum(prediction.by_owner.values()) == prediction.peak_allocated
    assert 0 < prediction.by_owner["parameter"] <= prediction.steps[-1].end_allocated
    assert prediction.peak_allocated <= prediction.peak_reserved
    # Nothing is left of the trace.
    assert torch.cuda.is_available() is GPU_HERE
    assert torch.randn(2).device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)


@pytest.mark.parametrize(
    ("program", "said"), [(compiled, "torch.compile is left out"), (recurrent, "recurrent layers")]
)
def test_what_is_assumed_is_said(program, said, net, training, monkeypatch):
    monkeypatch.setattr(inductor, "missing", lambda: "Inductor needs Triton")
    prediction = memtriage.predict(lambda device: program(device, net, training), steps=1)
    assert any(said in note for note in prediction.notes)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_last_states_of_a_recurrent_layer_can_be_fed_back(layer, training):
    def build(device):
        model = layer(32, 64, 2).to(device)

        def loss():
            inputs = random(device, 10, 4, 32)
            _, states = model(inputs)
            output, states = model(inputs, states)
            last = states[0] if isinstance(states, tuple) else states
            assert last.shape == (2, 4, 64)
            return output.sum()

        return training(model, loss)

    assert memtriage.predict(build, steps=1).peak_allocated > 0


def test_activations_saved_on_the_host_take_no_device_memory(training):
    def build(device, where):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(device)

        def loss():
            with where():
                return model(random(device, 8192, 64)).sum()

        return training(model, loss)

    here = memtriage.predict(lambda device: build(device, contextlib.nullcontext))
    away = memtriage.predict(lambda device: build(device, torch.autograd.graph.save_on_cpu))
    assert here.peak_allocated - away.peak_allocated > 4 * 8192 * 64 * 4


def test_checkpointing_lowers_the_peak(training):
    def build(device, checkpointed):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.GELU()) for _ in range(8)))
        model.to(device)

        def loss():
            hidden = random(device, 8192, 64)
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=False) if checkpointed else block(hidden)
            return hidden.sum()

        return training(model, loss)

    kept = memtriage.predict(lambda device: build(device, False))
    again = memtriage.predict(lambda device: build(device, True))
    # Eight blocks keep three tensors each; checkpointed ones keep one, and two of one block at a time.
    assert kept.peak_allocated - again.peak_allocated > 12 * 8192 * 64 * 4
    assert again.by_owner["activation"] < kept.by_owner["activation"]


def test_the_program_may_choose_the_attention_kernel(training):
    def build(device):
        model = nn.Linear(64, 64).to(device, torch.bfloat16)

        def loss():
            heads = model(random(device, 2, 32, 64).bfloat16()).view(2, 32, 4, 16).transpose(1, 2)
            kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
            with sdpa_kernel(kernels, set_priority=True):
                return F.scaled_dot_product_attention(heads, heads, heads).sum()

        return training(model, loss)

    notes = memtriage.predict(build).notes
    assert notes == ["attention (bfloat16, head size 16) is run by memory-efficient attention"]
