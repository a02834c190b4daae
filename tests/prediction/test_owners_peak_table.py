"""The instant of the peak by owner and module."""

import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtriage.prediction.api import predict_program
from memtriage.prediction.owners import folded
from support.training import training

WIDTH = 256
BATCH = 1024
FP32 = 4
WEIGHT = WIDTH * WIDTH * FP32
ACTIVATION = BATCH * WIDTH * FP32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.act = nn.Tanh()

    def forward(self, x):
        return self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


@pytest.fixture
def build():
    def make(again=False):
        def build(device):
            model = Net(again).to(device)
            return training(
                model, lambda: model(torch.randn(BATCH, WIDTH, device=device)).sum(), torch.optim.AdamW
            )

        return build

    return make


def rows(prediction):
    return {(row.owner, row.module): row for row in prediction.peak_table}


@pytest.mark.parametrize("again", [False, True])
def test_the_rows_sum_to_the_peak_and_explaining_does_not_move_it(again, build):
    explained, plain = predict_program(build(again), explain=True), predict_program(build(again))
    assert explained.steps == plain.steps
    assert sum(row.bytes for row in explained.peak_table) == plain.peak_allocated
    by_owner = dict.fromkeys(plain.by_owner, 0)
    for row in explained.peak_table:
        by_owner[row.owner] += row.bytes
    assert by_owner == plain.by_owner


def test_each_module_has_its_own(build):
    table = rows(predict_program(build(), explain=True))
    assert table["parameter", "blocks[*].linear"].bytes == 3 * WEIGHT
    assert table["parameter", "head"].bytes == WEIGHT
    assert table["optimizer state", "head"].blocks == 2
    # Tanh keeps its result; Linear its input, which is that result.
    assert table["activation", "blocks[*].act"].bytes == 3 * ACTIVATION
    assert table["activation", "blocks[*].act"].operator == "aten::tanh"
    assert ("activation", "blocks[*].linear") not in table


def test_the_highest_instants_of_other_phases_have_tables_too(build):
    prediction = predict_program(build(), explain=True)
    assert prediction.peak_phase not in prediction.other_peaks
    assert set(prediction.other_peaks) | {prediction.peak_phase} == {"forward", "backward", "optimizer"}
    for table in prediction.other_peaks.values():
        assert sum(row.bytes for row in table) < prediction.peak_allocated
    # Nothing of forward is left for the optimizer, which has all gradients.
    after = prediction.other_peaks["optimizer"]
    assert "activation" not in {row.owner for row in after if row.bytes >= ACTIVATION}
    assert sum(row.bytes for row in after if row.owner == "gradient") == 4 * WEIGHT


def test_what_a_step_leaves_is_of_an_earlier_step():
    kept = []

    def build(device):
        model = Net().to(device)

        def forward():
            kept.append(torch.empty(WIDTH, WIDTH, device=device))
            return model(torch.randn(BATCH, WIDTH, device=device)).sum()

        return training(model, forward)

    table = predict_program(build, explain=True).peak_table
    phases = {row.phase: row.blocks for row in table if row.operator == "aten::empty"}
    assert phases == {"forward of an earlier step": 1, "forward": 1}


def test_what_the_figures_depend_on_is_told(build):
    context = predict_program(build(), explain=True, gpu="l4").context
    assert context["input of Net"] == f"{BATCH}x{WIDTH} float32"
    assert context["torch"] == torch.__version__
    assert "L4" in context["GPU"]


def test_packages_that_are_not_installed_have_the_version_that_they_name(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", types.ModuleType("timm"))
    copied = types.ModuleType("diffusers")
    copied.__version__ = "0.1.copied"
    monkeypatch.setitem(sys.modules, "diffusers", copied)
    context = predict_program(build(), explain=True).context
    assert context["diffusers"] == "0.1.copied"
    assert "timm" not in context


@pytest.mark.parametrize(
    ("path", "short"),
    [
        ("model.layers.11.mlp.experts.3.w1", "model.layers[*].mlp.experts[*].w1"),
        ("0", "[*]"),
        ("3.1.conv2", "[*][*].conv2"),
        ("layer1.0.bn1", "layer1[*].bn1"),
        ("(Net)", "(Net)"),
    ],
)
def test_positions_in_lists_are_folded(path, short):
    assert folded(path) == short
