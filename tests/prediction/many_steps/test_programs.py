"""Programs that get one batch of each shape: build functions and scripts with a DataLoader."""

import pytest
import torch

import memtriage
from memtriage.prediction.many_steps.api import horizon_of_program
from memtriage.prediction.many_steps.programs import ShapedScript
from memtriage.prediction.many_steps.shapes import FIRST_STEPS, ROUTED


def looping(body, batches="[torch.zeros(2, 3)] * 6"):
    """A script whose steps have a body, and whose loader reads a list."""
    return f"""
import torch
from torch.utils.data import DataLoader
class Rows(torch.utils.data.IterableDataset):
    reads = 0
    def __iter__(self):
        Rows.reads += 1
        return iter({batches})
device = "cuda"
model = torch.nn.Linear(3, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader, other = DataLoader(Rows(), batch_size=None), DataLoader([torch.zeros(5, 3)] * 4, batch_size=None)
def learn(batch):
    model(batch.to(device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for epoch in range(100):
{body}
"""


def horizon_of(tmp_path, text, steps=12):
    file = tmp_path / "train.py"
    file.write_text(text)
    return horizon_of_program(ShapedScript(str(file), steps=steps), steps).horizon


LEARNS = "    for batch in loader:\n        learn(batch)"


@pytest.mark.parametrize(
    ("body", "batches", "steps", "shapes"),
    [
        pytest.param(LEARNS, "[torch.zeros(2, 3)] * 6", 12, 1, id="one shape"),
        pytest.param(LEARNS, "[torch.zeros(2 + i, 3) for i in range(5)]", 12, 5, id="an epoch of several"),
        pytest.param(LEARNS, "[torch.zeros(2 + i, 3) for i in range(9)]", 4, 4, id="less than an epoch"),
        pytest.param(
            "    for held in other:\n        model(held.to(device)).sum()\n" + LEARNS,
            "[torch.zeros(2, 3)] * 6", 10, 1, id="another loader",
        ),
        pytest.param(
            "    for number, batch in enumerate(loader):\n        model(batch.to(device)).sum().backward()\n"
            "        if number % 2:\n            optimizer.step()",
            "[torch.zeros(2 + i // 2, 3) for i in range(8)]", 8, 4, id="two batches a step",
        ),
    ],
)  # fmt: skip
def test_the_loader_of_a_step_is_read_to_the_end_of_the_horizon(tmp_path, body, batches, steps, shapes):
    horizon = horizon_of(tmp_path, looping(body, batches), steps)
    assert (horizon.steps, horizon.shapes) == (steps, shapes)


ROUTES = """
    chosen = model(batch.to(device)).max(-1).indices
    token = torch.where(chosen == 0)[0]
    model(batch.to(device)[token].repeat(1000, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("loop", ["for batch in loader:", "for batch in [torch.zeros(64, 3)] * 100:"])
def test_each_step_of_a_script_has_random_routes_of_its_own(tmp_path, loop):
    body = f"    {loop}" + ROUTES.replace("\n", "\n    ")
    horizon = horizon_of(tmp_path, looping(body, "[torch.zeros(64, 3)] * 6"), 40)
    assert (horizon.steps, horizon.shapes) == (40, 1)
    peaks = {point.peak_allocated for point in horizon.course}
    assert len(peaks) > ROUTED


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_program_of_as_many_steps_as_the_horizon_needs_no_more(tmp_path, steps):
    body = f"""
    for number, batch in enumerate(loader):
        learn(batch)
        if number + 1 == {steps}:
            raise OSError("cannot save")
"""
    horizon = horizon_of(tmp_path, looping(body, "[torch.zeros(2 + i, 3) for i in range(9)]"), steps)
    assert horizon.steps == steps
    # Which loader the steps read is only known where a third one begins.
    assert horizon.shapes == (steps if steps > FIRST_STEPS else 1)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ("[torch.zeros(2, 3)] * 4 * (Rows.reads == 1)", "gives no batch the second time that it is read"),
        (
            "[torch.zeros(2, 3, device='cuda')] * 40",
            "puts batches on the device, so they",
        ),
    ],
)
def test_loaders_that_cannot_be_read_ahead_are_refused(tmp_path, batches, said):
    with pytest.raises(ValueError, match=said):
        horizon_of(tmp_path, looping(LEARNS, batches))


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (
            [1] * 4,
            "with 1 argument \\(missing a required argument: 'width'\\); expected one that takes",
        ),
        ([(1, 2, 3)] * 4, "with 3 arguments \\(too many positional arguments\\); expected one"),
    ],
)
def test_a_step_function_has_to_take_its_input(lengths, said):
    def build(device):
        model = torch.nn.Linear(3, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters())

        def step(length, width):
            model(torch.zeros(length, 3, device=device)).sum().backward()

        return model, optimizer, step

    with pytest.raises(ValueError, match=said):
        memtriage.horizon(build, lengths)
    assert memtriage.horizon(build, [(1, 2)] * 4).shapes == 1
