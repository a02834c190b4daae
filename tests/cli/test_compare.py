"""`memtriage compare` as a user types it, on scripts that take no time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtriage.cli.app import main
from memtriage.prove.state import ComparisonState
from memtriage.prove.trials import read_trials
from support.refusals import Refused
from support.trials import write_trial

JOB = """
import memtriage, os, signal, sys
for step in range(4):
    memtriage.mark("after refit")
    print(f"loss {1 / (step + 1):.3f}")
    memtriage.step()
if "--crash" in sys.argv: raise ValueError("no such layer")
if "--interrupt" in sys.argv and not os.path.exists("interrupted"):
    open("interrupted", "w").close()
    os.kill(int(os.environ["COMPARE_PID"]), signal.SIGINT)
    signal.pause()
"""
TRIALS = """
[trials]
script = "job.py"
warmup = 1
repeats = 1
mark = "after refit"
[values]
loss = 'loss ([0-9.]+)'
[[variant]]
name = "plain"
[[variant]]
name = "other"
args = ["OTHER"]
[[target]]
metric = "loss"
equals = "plain"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder: Path, option: str = "--x") -> Path:
    file = folder / "trials.toml"
    file.write_text(TRIALS.replace("OTHER", option))
    return file


def started(folder: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own, which the job knows by `$COMPARE_PID`."""
    script = (
        "import os, signal, sys; os.environ['COMPARE_PID'] = str(os.getpid()); "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from memtriage.cli.app import main; "
        "sys.exit(main(['compare', 'trials.toml', '-o', 'out', '--json']))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_a_comparison_with_a_variant_that_crashes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder, "--crash")
    assert main(["compare", "trials.toml", "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    plain, other = report["variants"]
    assert (report["schema"], report["complete"], plain["finished"]) == (1, True, 1)
    assert plain["steps"] == 2  # of three, without the one with a census
    assert plain["figures"]["allocated"]["value"] > 0
    assert plain["values"]["loss"]["last"] == "0.250"
    assert other["failures"][0]["error"] == "ValueError: no such layer"
    assert report["targets"][0]["verdict"] == report["verdict"] == "missed"
    assert "trial 1 of 2: plain (round 1)" in shown.err
    # Nothing is run again, and the terminal report says the same.
    assert main(["compare", "trials.toml"]) == 0
    again = capsys.readouterr()
    assert "2 of the trials have ended already" in again.err
    assert "trial 1 of" not in again.err
    assert "TARGET MISSED" in again.out
    assert "crashed in round 1: ValueError: no such layer" in again.out


def test_ctrl_c_leaves_what_can_be_resumed(folder: Path) -> None:
    put(folder, "--interrupt")
    first = started(folder)
    _, err = first.communicate(timeout=120)
    assert first.returncode in (-signal.SIGINT, 130), err.decode()
    assert b"interrupted; trials kept: 1, to come: 1" in err
    state = ComparisonState(folder / "out", read_trials(folder / "trials.toml"))
    assert list(state.ends()) == [(0, "plain")]
    second = started(folder)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err.decode()
    assert b"trial 1 of" not in err
    assert b"trial 2 of 2: other" in err
    report: dict[str, Any] = json.loads(out)
    assert report["verdict"] == "met"
    assert report["complete"]


def test_termination_ends_it_as_it_would_any_program(folder: Path) -> None:
    put(folder)
    script = (
        "import os, signal, sys; from memtriage.prove.campaign import Campaign; "
        "Campaign.run = lambda self: os.kill(os.getpid(), signal.SIGTERM); "
        "from memtriage.cli.app import main; sys.exit(main(['compare', 'trials.toml', '-o', 'out']))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGTERM
    assert done.stderr == b"memtriage compare: terminated; run the same command again to continue\n"


def test_two_ranks_under_torchrun(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    text = TRIALS.replace("repeats = 1", "repeats = 1\nranks = 2").split("[[variant]]")
    (folder / "trials.toml").write_text(f"{text[0]}[[variant]]{text[1]}")
    assert main(["compare", "trials.toml", "-o", "out", "--json"]) == 0
    shown = capsys.readouterr()
    (row,) = json.loads(shown.out)["variants"]
    assert row["finished"] == 1, (folder / "out" / "plain" / "round-000" / "log.txt").read_text()
    assert sorted(row["figures"]["allocated"]["by_rank"]) == ["0", "1"]
    assert row["values"]["loss"]["count"] == 4  # of one rank, though both print


def test_the_plan_without_running(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(folder)
    assert main(["compare", "trials.toml", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2][1].split(":")[0] for line in lines] == ["plain", "other"]
    assert all("-m memtriage run -o" in line for line in lines)
    assert not (folder / "memtriage-compare").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gone.toml"], "gone.toml: No such file or directory; expected a trials file"),
        (["trials.toml", "--redo", "x"], "invalid --redo 'x': trials.toml has the variants 'plain', 'other'"),
        (["trials.toml", "--report", "-o", "gone"], "gone; use -o to name the directory"),
        (["bad.toml"], "bad.toml: unknown key 'repeat' in [trials]; expected one of"),
        ([], "Missing argument"),
    ],
)
def test_bad_usage_is_one_line(folder: Path, refused: Refused, arguments: list[str], said: str) -> None:
    put(folder)
    (folder / "bad.toml").write_text('[trials]\nscript = "job.py"\nrepeat = 1\n[[variant]]\nname = "a"\n')
    assert said in refused("compare", *arguments)


def test_a_changed_file_is_noticed_and_can_be_redone(
    folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(folder)
    state = ComparisonState(folder / "out", read_trials(file))
    for name in ("plain", "other"):
        write_trial(state, name, 0, [1.0] * 3, log="loss 1\n")
    put(folder, "--y")
    changed = "variant 'other' has changed since 1 of its trials ran (args)"
    assert changed in refused("compare", "trials.toml", "-o", "out")
    ran: list[str] = []

    def run_trial(trials: Any, variant: Any, number: int, settings: Any, folder: Path) -> Any:
        ran.append(variant.name)
        now = ComparisonState(folder.parents[1], trials)
        write_trial(now, variant.name, number, [1.0] * 3, log="loss 1\n")
        return now.ends()[number, variant.name]

    monkeypatch.setattr("memtriage.prove.campaign.run_trial", run_trial)
    assert main(["compare", "trials.toml", "-o", "out", "--redo", "other"]) == 0
    assert ran == ["other"]
    assert main(["compare", "trials.toml", "-o", "out", "--fresh"]) == 0
    assert ran == ["other", "plain", "other"]
