"""What a traced program's storages become, the phases of its steps, and what is said of them."""

import pytest
import torch
from torch import nn

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.trace import trace
from support.training import training


def traced(build, steps=1, **options):
    return trace(build, machine("h200"), (2, 13), steps, **options)


def owned(found):
    """Owner, module and bytes of the blocks that have one, and how many there are of each."""
    counts = {}
    for number, owner in found.owners.items():
        key = owner, found.modules.get(number), found.recording.blocks[number].size
        counts[key] = counts.get(key, 0) + 1
    return counts


class Tied(nn.Module):
    """Two layers with one weight, a norm with buffers, and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.empty(16), requires_grad=False)

    def forward(self, rows):
        return self.norm(self.second(self.first(rows)))


def trains(make=Tied, optimizer=torch.optim.AdamW):
    def build(device):
        model = make().to(device)
        taken = optimizer([each for each in model.parameters() if each.requires_grad])
        kind = next(model.parameters()).dtype
        return training(model, lambda: model(torch.ones(2, 8, device=device, dtype=kind)).sum(), taken)

    return build


def test_blocks_belong_to_parameters_buffers_gradients_and_states():
    assert owned(traced(trains(), 2)) == {
        ("parameter", "(Tied)", 64): 1,
        ("parameter", "first", 256): 1,
        ("parameter", "first", 32): 1,
        ("parameter", "norm", 32): 2,
        ("buffer", "norm", 32): 2,
        ("buffer", "norm", 8): 1,
        ("gradient", "first", 256): 2,
        ("gradient", "first", 32): 2,
        ("gradient", "norm", 32): 4,
        ("optimizer state", "first", 256): 2,
        ("optimizer state", "first", 32): 2,
        ("optimizer state", "norm", 32): 4,
    }


def test_phases_follow_the_steps():
    found = traced(trains(), 2)
    phases = [(marker.phase, marker.step) for marker in found.recording.markers]
    of_a_step = ("forward", "backward", "forward", "optimizer")
    assert phases == [("build", -1), *((phase, step) for step in (0, 1) for phase in of_a_step)]


def test_an_optimizer_within_backward_leaves_it_going():
    def build(device):
        model = nn.Linear(8, 8, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

        def update(parameter):
            optimizer.step()
            optimizer.zero_grad()

        model.weight.register_post_accumulate_grad_hook(update)
        return model, optimizer, lambda: model(torch.ones(2, 8, device=device)).sum().backward()

    found = traced(build)
    phases = [(marker.phase, marker.step) for marker in found.recording.markers]
    of_the_step = ("forward", "backward", "optimizer", "backward", "forward")
    assert phases == [("build", -1), *((phase, 0) for phase in of_the_step)]
    assert owned(found) == {
        ("parameter", "(Linear)", 256): 1,
        ("gradient", "(Linear)", 256): 1,
        ("optimizer state", "(Linear)", 256): 1,
    }


class Copies(torch.optim.SGD):
    """Updates copies in single precision of the parameters that it is given."""

    def __init__(self, parameters):
        self.given = list(parameters)
        super().__init__([nn.Parameter(each.detach().float().clone()) for each in self.given], momentum=0.9)

    def step(self, closure=None):
        masters = self.param_groups[0]["params"]
        for master, given in zip(masters, self.given, strict=True):
            master.grad = given.grad.float()
        super().step()
        for master, given in zip(masters, self.given, strict=True):
            given.data.copy_(master)
            master.grad = given.grad = None


def half():
    return nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)


def test_master_weights_are_of_the_optimizer_and_flat_parameters_are_parameters():
    masters = owned(traced(trains(half, Copies)))

    def with_another(parameters):
        return torch.optim.SGD([*parameters, nn.Parameter(torch.empty(10, device=parameters[0].device))])

    more = owned(traced(trains(half, with_another)))
    assert (masters, more) == (
        {
            ("parameter", "(Linear)", 128): 1,
            ("gradient", "(Linear)", 128): 1,
            ("gradient", None, 256): 1,
            ("optimizer state", None, 256): 2,
        },
        {("parameter", "(Linear)", 128): 1, ("gradient", "(Linear)", 128): 1, ("parameter", None, 40): 1},
    )


def test_an_optimizer_inside_another_has_the_states():
    class Outer:
        def __init__(self, parameters):
            self.optim = torch.optim.SGD(parameters, momentum=0.9)
            self.param_groups, self.step = self.optim.param_groups, self.optim.step
            self.zero_grad, self.state = self.optim.zero_grad, {"other": 1}

    owners = owned(traced(trains(lambda: nn.Linear(8, 8, bias=False), Outer)))
    assert owners[("optimizer state", "(Linear)", 256)] == 1


def without(*, backward=True, optimizer=torch.optim.SGD, steps=True):
    def build(device):
        model = nn.Linear(8, 8).to(device)
        taken = optimizer(model.parameters())

        def step():
            result = model(torch.ones(2, 8, device=device)).sum()
            if backward:
                result.backward()
            if steps:
                taken.step()

        return model, taken, step

    return build


class Other:
    """An optimizer that torch does not know."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters)}], {}

    def step(self):
        """Nothing."""


NO_STEP = "no optimizer stepped in the step: its states are not part of the figures"
FORWARD_ALONE = "the step ran neither backward nor an optimizer: this is the memory of forward alone"


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (without(), []),
        (without(steps=False), [NO_STEP]),
        (without(steps=False, backward=False), [FORWARD_ALONE]),
        (without(backward=False), []),
        (without(steps=False, optimizer=Other), []),
    ],
    ids=["all", "no step", "forward alone", "no backward", "an unknown optimizer"],
)
def test_what_a_step_leaves_out_is_said(build, said):
    assert traced(build).notes == said


def test_modules_of_blocks_are_found_where_they_are_asked_for():
    build = trains(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    plain, explained = traced(build), traced(build, explain=True)
    sizes = {
        (explained.modules[number], explained.recording.blocks[number].op)
        for number in explained.modules
        if number not in plain.modules
    }
    assert sizes == {
        ("0", "aten::addmm"),
        ("0", "cublas"),
        ("1", "aten::relu"),
        ("1", "aten::threshold_backward"),
    }
    assert {plain.modules[number] for number in plain.modules} == {"0"}
