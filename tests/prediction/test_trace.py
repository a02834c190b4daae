"""A trace of a build function: what it is told, and what it finds."""

import pytest
import torch
from torch import nn

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.host.memory import Libraries
from memtriage.prediction.lifetimes import FREE
from memtriage.prediction.script import Script
from memtriage.prediction.trace import trace


def traced(build, steps=1, **options):
    return trace(build, machine("h200"), (2, 13), steps, **options)


def program(act=lambda device: None, optimizer=torch.optim.SGD):
    """A build function whose steps train a model of 72 numbers, and do something more at their end."""

    def build(device):
        made = nn.Linear(8, 8).to(device)
        taken = optimizer(made.parameters())

        def step():
            made(torch.ones(2, 8, device=device)).sum().backward()
            taken.step()
            taken.zero_grad()
            return act(device)

        return made, taken, step

    return build


def test_a_plain_trace_has_its_events_and_nothing_else():
    seen = []
    build = program(optimizer=torch.optim.AdamW)
    found = traced(build, 3, progress=lambda step, steps: seen.append((step, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert (found.steps, found.varies, found.notes, found.conf) == (3, False, [], "")
    assert (found.communicators, found.held, found.compile_trials, found.host) == ([], 0, None, None)
    assert (found.cudnn_tries, found.convolves, found.optimizers) == (False, False, [288])
    assert set(found.modules.values()) == {"(Linear)"}
    assert {found.owners[number] for number in found.modules} == {"parameter", "gradient", "optimizer state"}
    last = found.recording.events[-1]  # of the program: what is torn down at its end is not recorded
    assert (last.size, found.owners[last.block]) == (FREE, "gradient")


SCRIPT = """
import wave
import torch
assert torch.cuda.is_available() is GPU
model = torch.nn.Linear(8, 8).to("cuda" if GPU else "cpu")
optimizer = torch.optim.OPTIMIZER(model.parameters())
for step in range(3):
    model(torch.ones(2, 8, device=model.weight.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("gpu", "optimizer", "world", "trains", "owners"),
    [
        ("none", "AdamW", 1, True, {"parameter", "gradient", "optimizer state"}),
        ("none", "SGD", 1, False, {"parameter", "gradient"}),
        ("h200", "SGD", 2, False, {"parameter"}),
    ],
)
@pytest.mark.parametrize("libraries", [Libraries(own=5), None])
def test_the_host_is_followed_with_its_libraries(
    monkeypatch, tmp_path, gpu, optimizer, world, trains, owners, libraries
):
    asked = []

    def measured(*given):
        asked.append(given)
        return libraries

    monkeypatch.setattr("memtriage.prediction.trace.measure", measured)
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.replace("GPU", str(gpu != "none")).replace("OPTIMIZER", optimizer))
    found = trace(Script(str(file)), machine(gpu), (2, 13), 2, world, host=True)
    ((names, trained, ranks),) = asked
    assert (trained, ranks, "torch" in names) == (trains, world, True)
    unknown = "what libraries take could not be measured: the host's memory is without them"
    assert (found.host.libraries, unknown in found.notes) == (libraries or Libraries(), libraries is None)
    assert set(found.host.owners.values()) == owners
    assert bool(found.recording.events) is (gpu != "none")
    assert found.varies is Script.varies


def test_states_are_counted_by_optimizer():
    def build(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to(device)
        both = [torch.optim.AdamW(layer.parameters()) for layer in model]

        def step():
            model(torch.ones(2, 8, device=device)).sum().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()

        return model, both, step

    found = traced(build, 2)
    assert found.optimizers == [72 * 4, 36 * 4]
    assert {block.state_of for block in found.recording.blocks} == {None, 0, 1}


def convolving(device):
    layer = nn.Conv2d(3, 4, 3).to(device)
    return layer(torch.ones(1, 3, 8, 8, device=device)).sum() and None


@pytest.mark.parametrize("benchmark", [False, True])
def test_convolutions_are_found_and_whether_cudnn_tries(monkeypatch, benchmark):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    found = traced(program(convolving))
    assert (found.convolves, found.cudnn_tries) == (True, benchmark)
