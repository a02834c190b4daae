"""Whole scripts are traced until they have made their steps."""

import sys

import pytest
import torch
from torch import nn

from memtriage.predict.api import predict
from memtriage.predict.build import BuildError
from memtriage.predict.script import Script

WIDTH = 128
BATCH = 64
FP32 = 4
PARAMETERS = 2 * (WIDTH * WIDTH + WIDTH) * FP32

HEAD = f"""
import sys
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"

def network():
    return nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH})).to(device)

def batch():
    return torch.randn({BATCH}, {WIDTH}).to(device)
"""
LOOP = """
def main(count):
    model = network()
    optimizers = [torch.optim.AdamW(part.parameters()) for part in PARTS(model)]
    for step in range(count):
        loss = model(batch()).square().mean()
        loss.backward()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
    print("trained")

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""
ONE = LOOP.replace("PARTS(model)", "[model]")
TWO = LOOP.replace("PARTS(model)", "[model[0], model[2]]")


@pytest.fixture
def script(tmp_path):
    def write(text):
        file = tmp_path / "train.py"
        file.write_text(HEAD + text)
        return str(file)

    return write


def build_with(parts):
    """The same program as a build function."""

    def build(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
        optimizers = [torch.optim.AdamW(part.parameters()) for part in parts(model)]

        def step():
            loss = model(torch.randn(BATCH, WIDTH).to(device)).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
            for each in optimizers:
                each.zero_grad()

        return model, optimizers, step

    return build


@pytest.mark.parametrize(
    ("text", "count", "goes_on"),
    [(ONE, "1000", True), (ONE, "3", True), (ONE, "2", False), (TWO, "1000", True), (TWO, "2", False)],
)
def test_a_script_has_the_peak_of_its_build_function(script, text, count, goes_on, capsys):
    found = predict(Script(script(text), [count]))
    parts = (lambda model: [model]) if text is ONE else (lambda model: [model[0], model[2]])
    expected = predict(build_with(parts))
    assert found.peak_allocated == expected.peak_allocated
    assert found.peak_reserved == expected.peak_reserved
    assert found.peak_phase == expected.peak_phase
    assert found.by_owner == expected.by_owner
    assert ("trained" in capsys.readouterr().out) is not goes_on
    # What the script's own variables keep alive is there at the end of a step: here the loss.
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert 0 <= step.end_allocated - other.end_allocated <= 512


def test_steps_end_with_the_last_of_several_optimizers(script):
    found = predict(Script(script(TWO), ["1000"]), steps=3)
    assert len(found.steps) == 3
    assert found.steps[1] == found.steps[2]
    assert found.by_owner["optimizer state"] >= 2 * PARAMETERS


def test_a_single_step_can_be_asked_for(script):
    found = predict(Script(script(ONE), ["1"]), steps=1)
    assert found.by_owner["parameter"] == PARAMETERS


def test_optimizers_inside_backward_make_steps(script):
    text = """
model = network()
optimizers = {each: torch.optim.SGD([each], lr=0.1, momentum=0.9) for each in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in optimizers:
    parameter.register_post_accumulate_grad_hook(update)
for step in range(1000):
    model(batch()).sum().backward()
"""
    found = predict(Script(script(text)))
    assert len(found.steps) == 2
    assert found.by_owner["optimizer state"] == PARAMETERS
    # Each gradient goes as soon as it is used.
    assert found.by_owner.get("gradient", 0) < PARAMETERS


def test_an_optimizer_that_runs_backward_itself_makes_steps(script):
    text = """
model = network()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
x = batch()

def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

for step in range(1000):
    optimizer.step(closure)
"""

    def build(device):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        x = torch.randn(BATCH, WIDTH).to(device)

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return model, optimizer, lambda: optimizer.step(closure)

    found, expected = predict(Script(script(text)), steps=3), predict(build, steps=3)
    # Gradients that the next step frees before it allocates anything count as freed by the step before.
    for step, other in zip(found.steps, expected.steps, strict=True):
        assert (step.peak_allocated, step.peak_reserved) == (other.peak_allocated, other.peak_reserved)
    assert found.by_owner["optimizer state"] > 2 * PARAMETERS


def test_a_thread_that_uses_the_device_is_named(script):
    text = """
import queue, threading

batches = queue.Queue()
threading.Thread(target=lambda: batches.put(batch()), name="loader", daemon=True).start()
batches.get()
"""
    with pytest.raises(BuildError, match="the thread 'loader' used the device"):
        predict(Script(script(text)))


def test_what_a_script_does_after_training_is_not_run(script):
    text = ONE.replace('print("trained")', "raise OSError")
    predict(Script(script(text), ["2"]))


def test_the_process_is_as_before(script):
    before = list(sys.argv), list(sys.path), sys.modules["__main__"]
    predict(Script(script(ONE), ["1000"]))
    assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        (ONE, ["1"], "ended after 1 optimizer steps; expected at least 2"),
        (ONE, [], r"IndexError at .*train\.py:\d+"),
        ("sys.exit(3)", [], "exited with status 3 after 0 optimizer steps"),
        ("x = torch.randn(2 << 20, device=device).cpu().numpy()", [], "take this out of the step"),
        (
            ONE.replace("network()", "nn.Linear(128, 128)").replace("batch()", "batch().cpu()"),
            ["9"],
            "trained no model on the GPU",
        ),
    ],
)
def test_a_script_that_cannot_be_predicted(script, text, arguments, said):
    with pytest.raises(BuildError, match=said):
        predict(Script(script(text), arguments))


def test_a_script_that_is_not_there():
    with pytest.raises(BuildError, match=r"no such file: 'nowhere\.py'"):
        Script("nowhere.py")
