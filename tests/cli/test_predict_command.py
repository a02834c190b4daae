import json

import pytest

from memtriage.cli import app

PROGRAM = """
import torch
from torch import nn

def build(device):
    print("building")
    model = nn.Linear(256, 256, bias=False, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        model(torch.randn(32, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, step
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(PROGRAM)
    return file


def test_json_alone_is_on_stdout(program, capsys):
    assert app.main(["predict", f"{program}:build", "--json", "--gpu", "a100"]) == 0
    shown = capsys.readouterr()
    prediction = json.loads(shown.out)
    assert prediction["schema"] == 1
    assert prediction["by_owner"]["optimizer state"] == 2 * 256 * 256 * 4
    assert "building" in shown.err


def test_the_report_names_the_peak_and_its_owners(program, capsys):
    assert app.main(["predict", f"{program}:build"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PEAK ")
    assert "optimizer state" in shown
    assert "step 2" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:build"], "no such file"),
        (["{program}:train"], "it has build"),
        (["{program}:build", "--gpu", "abacus"], "no GPU kind"),
        (["{program}:build", "--allocator-conf", "nonsense:1"], "nonsense"),
        (["{program}:build", "--steps", "0"], "steps=0"),
    ],
)
def test_bad_input_is_one_line_on_stderr(program, arguments, said, capsys):
    assert app.main(["predict", *(each.format(program=program) for each in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.startswith("memtriage predict: ")]
    assert len(lines) == 1
    assert said in lines[0]
