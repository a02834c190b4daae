"""Gradients that meet at one tensor: added in place where the engine alone holds the first."""

import pytest
import torch
from torch import nn

from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.trace import trace
from support.training import training

WIDTH = 512


def additions(forward):
    """Operators that made blocks of the size of the activations in backward."""

    def build(device):
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)).to(device)
        return training(layers, lambda: forward(layers, torch.randn(2 * WIDTH, WIDTH, device=device)))

    blocks = trace(build, machine("h200"), (2, 13), 1).recording.blocks
    size = 2 * WIDTH * WIDTH * 4
    return [block.op for block in blocks if block.phase == "backward" and block.size == size].count(
        "aten::add"
    )


def test_a_residual_connection_adds_in_place():
    def forward(layers, rows):
        hidden = layers[0](rows)
        return (hidden + layers[2](layers[1](hidden))).square().sum()

    assert additions(forward) == 0


def test_a_gradient_that_another_node_waits_for_is_kept():
    def forward(layers, rows):
        early = layers[0](rows)
        hidden = layers[1](rows)
        late = layers[2](hidden)
        # The gradient of the sum reaches both; that of `early` is used last.
        return late.sum() + (hidden + early).square().sum()

    assert additions(forward) == 1


class Returns(torch.autograd.Function):
    """The identity, whose gradient is what `made` makes of the one that comes."""

    @staticmethod
    def forward(ctx, x, made):
        ctx.made = made
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.made(gradient), None


@pytest.mark.parametrize(
    ("made", "added"),
    [
        pytest.param(lambda given: given * 2, 0, id="as it came"),
        pytest.param(
            lambda given: torch.empty_strided(given.shape, (1, 2 * WIDTH), device=given.device),
            0,
            id="in another order",
        ),
        pytest.param(lambda given: (given * 2)[:], 1, id="a view, which keeps its base"),
        pytest.param(lambda given: torch.cat([given, given], 1)[:, :WIDTH], 1, id="with gaps"),
        pytest.param(lambda given: given.new_ones(1).expand_as(given), 1, id="expanded"),
        pytest.param(lambda given: KEPT.append(given * 2) or KEPT[-1].detach(), 1, id="shares its storage"),
        pytest.param(lambda given: KEPT.append(given * 2) or KEPT[-1], 1, id="kept by the program"),
    ],
)
def test_only_a_dense_gradient_with_a_storage_of_its_own_is_added_into(made, added):
    def forward(layers, rows):
        KEPT.clear()
        hidden = layers[0](rows)
        later = layers[1](hidden)
        return (Returns.apply(hidden, made) + later).square().sum()

    assert additions(forward) == added
    KEPT.clear()


KEPT = []
"""Gradients that a program keeps."""


def test_the_engine_itself_leaves_a_gradient_that_a_program_keeps():
    def made(gradient):
        KEPT.extend([gradient * 2, gradient * 2])
        return KEPT[-1]

    KEPT.clear()
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    hidden = first(torch.randn(2, 4))
    (Returns.apply(hidden, made) + second(hidden)).square().sum().backward()
    assert torch.equal(*KEPT)
    KEPT.clear()
