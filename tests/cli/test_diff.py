"""`memtriage diff` as a user types it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memtriage.cli.app import main
from memtriage.cli.diff import command_of
from support.refusals import Refused

SNAPSHOTS = Path(__file__).parents[1] / "data" / "snapshots"
BEFORE, AFTER = (str(SNAPSHOTS / f"{name}.pickle.gz") for name in ("healthy", "loss_list"))

PROGRAM = """
import torch

def build(device):
    model = torch.nn.Linear(256, WIDTH, device=device)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.ones(64, 256, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
"""


def program(folder: Path, width: int) -> str:
    file = folder / f"train{width}.py"
    file.write_text(PROGRAM.replace("WIDTH", str(width)))
    return f"{file}:build"


def test_two_snapshots(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", BEFORE, AFTER, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["of"] == "snapshot"
    assert sum(row["difference"] for row in found["rows"]) == found["difference"] != 0
    assert set(found["rows"][0]) == {
        "owner", "module", "site", "phase", "rank", "before", "after", "difference",
    }  # fmt: skip
    assert main(["diff", BEFORE, AFTER]) == 0
    shown = capsys.readouterr().out
    assert " ".join(shown.split("\n\n")[0].split()) == found["summary"]


def test_two_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for width in (256, 512):
        assert main(["predict", program(tmp_path, width), "--json"]) == 0
        files.append(tmp_path / f"{width}.json")
        files[-1].write_text(capsys.readouterr().out)
    assert main(["diff", *map(str, files), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    before, after = (json.loads(file.read_text())["peak_allocated"] for file in files)
    assert found["difference"] == after - before == sum(row["difference"] for row in found["rows"])
    by_owner = {row["owner"]: row["difference"] for row in found["rows"]}
    assert by_owner["parameter"] == 256 * 257 * 4


def test_one_program_with_two_pythons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["--env", sys.executable, sys.executable, "--", program(tmp_path, 256)]
    assert main(["diff", "--json", *named]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["of"], found["difference"], found["rows"], found["suspects"]) == ("prediction", 0, [], [])


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["train.py"], ["train.py"]),
        (["train.py", "--lr", "1"], ["train.py", "--", "--lr", "1"]),
        (["-m", "jobs.train", "--lr", "1"], ["-m", "jobs.train", "--", "--lr", "1"]),
        (["--world-size", "8", "a.py", "--", "--lr", "1"], ["--world-size", "8", "a.py", "--", "--lr", "1"]),
    ],
)
def test_a_target_is_what_predict_takes(given: list[str], passed: list[str]) -> None:
    assert command_of(given) == passed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected two files or folders, not 0"),
        ([BEFORE], "expected two files or folders, not 1"),
        ([BEFORE, "none"], "none: No such file"),
        ([BEFORE, "{folder}"], "expected a folder of memtriage run"),
        ([BEFORE, "{prediction}"], "expected two of a kind"),
        (["--env", sys.executable, sys.executable], "nothing to predict"),
        (["--env", "/no/python", sys.executable, "--", "train.py"], "/no/python: No such file"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path, refused: Refused) -> None:
    prediction = tmp_path / "prediction.json"
    prediction.write_text(
        '{"peak_allocated":1,"peak_reserved":1,"peak_phase":"forward","by_owner":{"parameter":1},'
        '"outside_allocator":0,"steps":[],"seconds":0.0,"notes":[]}'
    )
    (tmp_path / "empty").mkdir()
    places = {"folder": tmp_path / "empty", "prediction": prediction}
    assert said in refused("diff", *(each.format(**places) for each in arguments))
