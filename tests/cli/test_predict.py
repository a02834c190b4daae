import json
from pathlib import Path

import pytest
import torch
from torch import nn

from memtriage.cli import app
from support.llama import LLAMA


def test_stdout_has_json_alone(program, capfd):
    assert app.main(["predict", f"{program}:build", "--json", "--gpu", "a100"]) == 0
    shown = capfd.readouterr()
    prediction = json.loads(shown.out)
    assert prediction["schema"] == 1
    assert prediction["by_owner"]["optimizer state"] == 2 * 256 * 256 * 4
    assert shown.err == ""


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


def test_a_hugging_face_configuration_is_predicted(tmp_path, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["--batch", "2", "--seq", "64", "--precision", "bf16", "--optimizer", "sgd"]
    assert app.main(["predict", "--hf-config", str(tmp_path), "--json", *arguments]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert "optimizer state" not in prediction["by_owner"]
    assert sum(row["bytes"] for row in prediction["peak_table"]) == prediction["peak_allocated"]


def test_a_library_trains_a_configuration_on_as_many_ranks_as_an_option_says(tmp_path, capsys):
    pytest.importorskip("peft")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    arguments = ["--batch", "2", "--seq", "64", "--method", "lora", "--lora-r", "4", "--fsdp", "2"]
    assert app.main(["predict", "--hf-config", str(tmp_path), "--json", *arguments]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["context"]["ranks"] == "2"
    # On `q_proj` and `v_proj` of two layers: a matrix of 4 x 64 and one of 64 x 4, and a half for each rank.
    assert prediction["by_owner"]["optimizer state"] == 2 * 4 * (2 * 2 * 2 * 4 * 64) / 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{program}:build", "--", "--lr", "1"], "only a script or a module takes arguments"),
        (["{program}:build", "-m", "package.train", "--hf-config", "config.json"], "use only one of"),
        (["--hf-config", "config.json", "--ddp", "2", "--world-size", "4"], "one of --ddp and --world-size"),
        (["nowhere.py:build"], "no such file"),  # found out by the child process
        (["{program}:build", "--timeout", "soon"], "invalid --timeout 'soon': use 60s, 5m or 1h"),
        (["{program}:build", "--world-size", "4", "--rank", "4"], "world_size=4, rank=4"),
        (["{program}:build", "--limit", "4GiB"], "--limit needs --horizon"),
        (["{program}:build", "--routing", "routing.json"], "--routing needs --horizon"),
        (["{program}:build", "--horizon", "0"], "at least 1 step"),
        (["{program}:build", "--horizon", "9", "--limit", "much"], "--limit 'much'"),
        (["{program}:build", "--ranks-per-node", "2"], "--ranks-per-node needs --host"),
        (
            ["{program}:build", "--host", "--world-size", "4", "--ranks-per-node", "5"],
            "expected 1 to 4, the --world-size",
        ),
    ],
)
def test_bad_input_is_one_line_on_stderr(program, arguments, said, refused):
    assert said in refused("predict", *(argument.format(program=program) for argument in arguments))


SAVING = """
import logging, os, sys
import torch
from torch import nn

logging.basicConfig(filename="train.log", level=logging.INFO)
model = nn.Linear(64, 64, bias=False).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
if os.path.exists("model.pt"):
    model.load_state_dict(torch.load("model.pt", map_location="cuda"))
for step in range(1000):
    loss = model(torch.randn(8, 64, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    logging.info("loss %s", loss.item())
    torch.save(model.state_dict(), "model.tmp")
    os.replace("model.tmp", "model.pt")
    model.load_state_dict(torch.load("model.pt"))
"""


def test_a_traced_script_changes_no_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(64, 64, bias=False).state_dict(), "model.pt")
    Path("train.log").write_text("yesterday")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(SAVING)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert app.main(["predict", "-m", "package.train", "--json"]) == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["by_owner"]["optimizer state"] == 2 * 64 * 64 * 4
    discarded = next(note for note in prediction["notes"] if "discarded" in note)
    assert "model.pt" in discarded and "train.log" in discarded


def test_host_needs_no_model_on_a_gpu(tmp_path, capfd):
    file = tmp_path / "load.py"
    file.write_text("import torch\nkept = torch.nn.Linear(2048, 2048, bias=False)\n")
    assert app.main(["predict", "--host", "--gpu", "none", "--json", str(file)]) == 0
    prediction = json.loads(capfd.readouterr().out)
    host = prediction["host"]
    assert host["parameter"] == 2048 * 2048 * 4
    assert host["libraries"] > 50 << 20
    assert host["peak"] == sum(size for kind, size in host.items() if kind != "peak")
    assert prediction["host_node"] == host
    assert prediction["peak_reserved"] == prediction["outside_allocator"] == 0
