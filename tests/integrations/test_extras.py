"""Each extra by itself: it works with its libraries alone, and without them one line says what to install.

"Alone" is an environment of links to what the extra's requirements bring along, and to what memtriage needs
in any case. The same programs run in environments made by pip by `make extras`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from support import alone, real_deepspeed

TRAINER = """
import torch, transformers
from memtriage.integrations.huggingface import MemtriageCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": out.square().mean(), "logits": out}

callback = MemtriageCallback()
arguments = transformers.TrainingArguments("out", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
data = [{"x": torch.ones(8), "labels": torch.zeros(1)}] * 4
transformers.Trainer(Model(), arguments, train_dataset=data, callbacks=[callback]).train()
assert callback.report.steps == 2, callback.report
"""
LIGHTNING = """
import torch
import lightning.pytorch as pl
from memtriage.integrations.lightning import MemtriageCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callback = MemtriageCallback()
trainer = pl.Trainer(
    max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[callback],
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 8)))
assert callback.report.steps == 2, callback.report
"""
SMOKES = {
    "demo": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup
""",
    "torch": """
import memtriage, torch

with memtriage.watch("runs", quiet=True) as watch:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
assert watch.report.steps == 1, watch.report
""",
    "deepspeed": "import memtriage; memtriage.deepspeed_exact_host_memory().undo()",
    "accelerate": """
import torch
from accelerate import Accelerator
from memtriage.integrations.accelerate import watched

accelerator = Accelerator(cpu=True)
with watched(accelerator) as training:
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
assert training.report.steps == 1, training.report
""",
    "hf": TRAINER,
    "lightning": LIGHTNING,
    "notebook": """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in ("%load_ext memtriage", "%%memtriage --json told\\nx = [1]", "%memtriage", "%memtriage_free"):
    assert shell.run_cell(cell).success, cell
assert shell.user_ns["told"]["verdict"] == "not_judged"
""",
    "ray": """
from memtriage.integrations.ray import watched

assert watched(lambda: 1).__wrapped__() == 1
""",
    "prometheus": """
import urllib.request
import memtriage

with memtriage.watch("runs", quiet=True):
    server = memtriage.serve_metrics(0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode()
    server.close()
assert "memtriage" in text, text
""",
    "otel": "import memtriage; memtriage.otel_gauges()",
    "docs": "import mkdocs.config, material",
}
TORCH_TOO = frozenset(
    name for name, code in SMOKES.items() if "torch" in code or name in ("deepspeed", "notebook")
)
"""Extras whose smoke needs torch, which is the user's own."""

LONG = frozenset({"demo", "torch", "deepspeed", "docs"})
"""What is used every day by other tests."""

MISSING = {
    "deepspeed": "import memtriage; memtriage.deepspeed_exact_host_memory()",
    "hf": "import memtriage.integrations.huggingface",
    "lightning": "import memtriage.integrations.lightning",
    "ray": "import memtriage.integrations.ray",
    "prometheus": "import memtriage; memtriage.serve_metrics(0)",
    "otel": "import memtriage; memtriage.otel_gauges()",
}
"""What asks for a library by itself; of the others the user's own program does, with an object of theirs."""


def test_every_extra_has_a_smoke() -> None:
    assert set(SMOKES) == set(alone.EXTRAS) - {"dev"}


@pytest.mark.parametrize(
    "extra", [pytest.param(smoke, marks=pytest.mark.long if smoke in LONG else ()) for smoke in SMOKES]
)
def test_with_its_own_libraries_alone(extra: str, tmp_path: Path) -> None:
    torch = ["torch"] if extra in TORCH_TOO else []
    apart = [real_deepspeed.APART] if extra == "deepspeed" else []
    if not (real_deepspeed.installed() if apart else alone.installed(alone.EXTRAS[extra])):
        pytest.skip(f"not installed: {alone.EXTRAS[extra]}")
    needed = [requirement for folder in apart for requirement in alone.requirements_in(folder)]
    wanted = alone.with_dependencies([*alone.CORE, *alone.EXTRAS[extra], *torch, *needed])
    folder = alone.link(wanted, tmp_path / "libraries")
    done = alone.run(SMOKES[extra], folder, tmp_path, *apart)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_them_one_line_says_what_to_install(tmp_path: Path) -> None:
    folder = alone.link(alone.with_dependencies([*alone.CORE, "torch"]), tmp_path / "libraries")
    program = """
    import contextlib, io, json

    told = {}
    for extra, code in MISSING.items():
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                exec(code, {})
            told[extra] = said.getvalue()
        except ImportError as error:
            told[extra] = str(error)
    print(json.dumps(told))
    """
    done = alone.run(f"MISSING = {MISSING!r}\n{textwrap.dedent(program)}", folder, tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for extra in MISSING:
        assert f"pip install 'memtriage[{extra}]'" in told[extra]
        assert len(told[extra].strip().splitlines()) == 1


def test_the_core_needs_none_of_them(tmp_path: Path) -> None:
    folder = alone.link(alone.with_dependencies(alone.CORE), tmp_path / "libraries")
    code = "import memtriage, sys; from memtriage.cli.app import main; sys.argv[1:] = ['--help']; main()"
    done = alone.run(code, folder, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


@pytest.mark.packaging
@pytest.mark.parametrize("extra", SMOKES)
def test_installed_by_pip_into_an_environment_of_its_own(extra: str, tmp_path: Path) -> None:
    """torch alone comes from the environment of the tests: another build would be a gigabyte."""
    if extra == "deepspeed":
        pytest.skip("its requirements build CUDA code")
    torch = alone.link(alone.with_dependencies(["torch"]), tmp_path / "torch")
    venv.create(tmp_path / "venv", with_pip=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "torch.pth").write_text(f"{torch}\n")
    python = tmp_path / "venv" / "bin" / "python"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    install = [str(python), "-m", "pip", "install", "-q", f"{alone.ROOT}[{extra}]"]
    made = subprocess.run(install, capture_output=True, text=True, timeout=900, env=environment)
    assert made.returncode == 0, made.stderr
    assert not (site / "torch").exists()
    done = subprocess.run(
        [str(python), "-c", SMOKES[extra]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sys.prefix not in done.stdout
