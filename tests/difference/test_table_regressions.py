"""Commits that cost memory, and commits that do not: the first row names the cause, and nothing alarms."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from memtriage.difference.sources import of_json
from memtriage.difference.table import difference
from memtriage.model.difference import Side

PROJECT: Final = Path(__file__).parent / "project"
MODEL, TRAIN = "model.py", "train.py"
TOLERANCE: Final = 0.01

REGRESSIONS: Final = {
    # what was committed: file, old text, new text, and what the first row has to say
    "a buffer's type": (MODEL, "dtype=torch.bool)", "dtype=torch.float32)", "buffer .*Model"),
    "no checkpoint": (MODEL, "if number % 2 else", "if number % 3 == 1 else", r"activation blocks\[\*\]"),
    "retain_graph": (
        TRAIN,
        "loss.backward()\n",
        "loss.backward(retain_graph=True)\n        losses.append(loss)\n",
        "(activation|temporary) .* of an earlier step",
    ),
    "attention": (
        MODEL,
        "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "torch.softmax(q @ k.transpose(-2, -1) / 8, -1) @ v",
        r"activation blocks\[\*\]\.attention model.py:18 in forward",
    ),
    "foreach": (TRAIN, "foreach=False", "foreach=True", "temporary .*train.py:21 in step optimizer"),
    "upcast logits": (
        TRAIN,
        "cross_entropy(logits.flatten(0, 1)",
        "cross_entropy(logits.double().flatten(0, 1)",
        "train.py:(19|20) in step",
    ),
    "an average of the weights": (
        TRAIN,
        "    losses = []\n",
        "    losses = [__import__('copy').deepcopy(model)]\n",
        "kept None train.py:14 in build",
    ),
    "padding": (TRAIN, "(BATCH, LENGTH + 1)", "(BATCH, 2 * LENGTH + 1)", "activation|temporary"),
    "evaluation with gradients": (
        TRAIN,
        "        loss.backward()\n",
        "        kept = model(tokens[:, :-1])\n        loss.backward()\n        del kept\n",
        r"activation (blocks|head)",
    ),
    "a second state": (
        TRAIN,
        "lr=1e-3, foreach=False",
        "lr=1e-3, foreach=False, amsgrad=True",
        "optimizer state",
    ),
    "a longer default": (TRAIN, "LENGTH = 2, 256", "LENGTH = 2, 384", "activation|temporary"),
    "a deeper model": (MODEL, "depth=6", "depth=8", r"blocks\[\*\]"),
}

NEUTRAL: Final = {
    "a line above": (TRAIN, "import torch\n", "import torch\n\n# seeds are set by the launcher\n"),
    "a docstring": (MODEL, "class Block(nn.Module):\n", 'class Block(nn.Module):\n    """One layer."""\n\n'),
    "a module renamed": (MODEL, "self.mlp", "self.feed_forward"),
    "a list renamed": (MODEL, "self.blocks", "self.layers"),
    "a class renamed": (MODEL, "Attention", "SelfAttention"),
    "a list of another name": (TRAIN, "losses", "history"),
    "a variable renamed": (TRAIN, "logits", "scores"),
    "an import by name": (TRAIN, "nn.functional.cross_entropy", "torch.nn.functional.cross_entropy"),
    "the learning rate": (TRAIN, "lr=1e-3", "lr=3e-4"),
    "weight decay": (TRAIN, "lr=1e-3", "lr=1e-3, weight_decay=0.1"),
    "a print": (
        TRAIN,
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\n        print(1)\n",
    ),
    "set_to_none": (TRAIN, "zero_grad()", "zero_grad(set_to_none=True)"),
    "a log of numbers": (TRAIN, "losses.append(loss.detach())", "losses.append(float(loss.detach()))"),
    "an assertion": (
        MODEL,
        "        x = self.tokens",
        "        assert tokens.ndim == 2\n        x = self.tokens",
    ),
    "arguments by name": (
        MODEL,
        "nn.Linear(width, width)",
        "nn.Linear(in_features=width, out_features=width)",
    ),
    "a helper": (
        MODEL,
        "        return self.out(y.transpose(1, 2).reshape(batch, length, width))\n",
        "        return self.joined(y, x.shape)\n\n    def joined(self, y, shape):\n"
        "        return self.out(y.transpose(1, 2).reshape(shape))\n",
    ),
    "another dropout of 0": (MODEL, "is_causal=True", "is_causal=True, dropout_p=0.0"),
    "a property": (
        MODEL,
        "    def forward(self, tokens):",
        "    width = 3\n\n    def forward(self, tokens):",
    ),
    "order of attributes": (
        MODEL,
        "        self.heads = heads\n        self.qkv = nn.Linear(width, 3 * width)\n",
        "        self.qkv = nn.Linear(width, 3 * width)\n        self.heads = heads\n",
    ),
    "typing": (TRAIN, "def build(device):", "def build(device: torch.device):"),
}


def predict(folder: Path) -> Side:
    command = [sys.executable, "-m", "memtriage", "predict", "--json", "train.py:build"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return of_json(done.stdout.encode(), "train.py")


def committed(folder: Path, change: tuple[str, ...] | None = None, batch: int = 2) -> Path:
    for name in (MODEL, TRAIN):
        text = (PROJECT / name).read_text().replace("LENGTH = 2, 256", f"LENGTH = {batch}, 256")
        if change is not None and change[0] == name:
            assert change[1] in text
            text = text.replace(change[1], change[2])
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Side]:
    return cache(lambda batch: predict(committed(tmp_path_factory.mktemp("before"), batch=batch)))


@pytest.mark.parametrize("name", REGRESSIONS)
def test_the_first_row_names_what_a_commit_costs(
    name: str, before: Callable[[int], Side], tmp_path: Path
) -> None:
    change = REGRESSIONS[name]
    batch = 1 if name == "foreach" else 2  # where the peak is in the optimizer, and where in backward
    found = difference(before(batch), predict(committed(tmp_path, change, batch)))
    assert found.difference > TOLERANCE * found.before
    assert sum(row.difference for row in found.rows) == found.difference
    first = found.rows[0]
    said = f"{first.owner} {first.module} {first.site} {first.phase}"
    assert re.search(change[3], said), [said, found.summary]


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_commit_does_not_alarm(name: str, before: Callable[[int], Side], tmp_path: Path) -> None:
    found = difference(before(2), predict(committed(tmp_path, NEUTRAL[name])))
    assert abs(found.difference) <= TOLERANCE * found.before / 10
    assert sum(abs(row.difference) for row in found.rows) <= TOLERANCE * found.before
