import json

import pytest

from memtriage.cli import app
from memtriage.model import Mark
from memtriage.store.layout import identify, record_path
from memtriage.store.records import Start
from memtriage.store.writer import RankWriter

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


SCRIPT = """
import sys
import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
width = int(sys.argv[sys.argv.index("--width") + 1])
model = nn.Linear(width, width, bias=False).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1000):
    model(torch.randn(8, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


def test_a_script_gets_its_arguments_and_stops_early(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert app.main(["predict", str(file), "--json", "--", "--width", "512"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["by_owner"]["parameter"] == 512 * 512 * 4
    assert "trained" not in shown.err


def test_explain_shows_owners_and_modules(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    assert app.main(["predict", str(file), "--explain", "--", "--width", "512"]) == 0
    shown = capsys.readouterr().out
    assert "by owner and module" in shown
    assert "(Linear)" in shown


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def test_a_hugging_face_configuration_is_predicted(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["--batch", "2", "--seq", "64", "--precision", "bf16", "--optimizer", "sgd"]
    assert app.main(["predict", "--hf-config", str(tmp_path), "--json", *arguments]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert "optimizer state" not in prediction["by_owner"]
    assert "peak_table" not in prediction
    assert "against" not in prediction


def test_a_run_is_compared(program, tmp_path, capsys):
    writer = RankWriter(record_path(tmp_path / "runs", identify({}, pid=1, time_s=0.0)))
    writer.write("start", Start(time=1.0))
    for step, name in ((0, "backward"), (1, "step"), (1, "backward"), (2, "step")):
        writer.write(
            "mark",
            Mark(
                name=name,
                step=step,
                microbatch=1,
                rank=None,
                time_s=1.0,
                device="cuda:0",
                allocated=70 << 20,
                reserved=80 << 20,
            ),
        )
    writer.close()
    assert app.main(["predict", f"{program}:build", "--against", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "Against the run on cuda:0" in shown
    assert "step 2, end of the optimizer's step, reserved" in shown
    assert "80.0 MiB" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:build"], "no such file"),
        (["{program}:train"], "it has build"),
        (["{program}:build", "--gpu", "abacus"], "no GPU kind"),
        (["{program}:build", "--allocator-conf", "nonsense:1"], "nonsense"),
        (["{program}:build", "--steps", "0"], "steps=0"),
        (["{program}:build", "--", "--lr", "1"], "takes no arguments"),
        (["{program}:build", "--against", "nowhere"], "nowhere: no such file"),
        (["{program}:build", "--batch", "4"], "--batch without --hf-config"),
        ([], "nothing to predict"),
        (["nowhere.py"], "no such file"),
        (["{program}"], "after 0 optimizer steps"),
        (["{program}:build", "--hf-config", "config.json"], "both given"),
        (["--hf-config", "nowhere.json"], "No such file"),
        (["--hf-config", "nowhere.json", "--precision", "fp8"], "precision='fp8'"),
    ],
)
def test_bad_input_is_one_line_on_stderr(program, arguments, said, capsys):
    assert app.main(["predict", *(each.format(program=program) for each in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if line.startswith("memtriage predict: ")]
    assert len(lines) == 1
    assert said in lines[0]
