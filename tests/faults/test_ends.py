"""Signals while a watch works or ends lose neither its report nor its record, nor what ended the program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memtriage.store.reader import read_run
from support.side_by_side import make_folder, run, run_both
from support.signals import AS_FROM_A_TERMINAL

PROGRAM = """
import importlib
import os
import signal
import sys

from training import step

CALLED = {called!r}
SIGNALS = {signals!r}


def interrupting(function):
    def called(*args, **options):
        while SIGNALS:
            os.kill(os.getpid(), SIGNALS.pop(0))
        return function(*args, **options)

    return called


step()
if CALLED:
    module, *owner, name = CALLED.split(" ")
    module = importlib.import_module(module)
    owner = getattr(module, owner[0]) if owner else module
    setattr(owner, name, interrupting(getattr(owner, name)))
else:
    sys.excepthook = interrupting(sys.__excepthook__)
{ends}
"""

IN_THE_EXCEPTHOOK = ""
IN_THE_CENSUS = "memtriage.account.census CensusView census"
IN_THE_JUDGMENT = "memtriage.session.conclusion Conclusion judge"
IN_THE_REPORT = "memtriage.report.run.json_file write"
FAILS, EXITS = "raise RuntimeError('the reason')", "raise SystemExit(3)"


def watched(tmp_path: Path, called: str, signals: list[int], ends: str) -> subprocess.CompletedProcess[str]:
    text = PROGRAM.format(called=called, signals=list(map(int, signals)), ends=ends)
    work = make_folder(tmp_path, files={"ends.py": text})
    options = ["run", "-o", str(tmp_path / "record"), "--json", str(tmp_path / "report.json")]
    return subprocess.run(
        [*AS_FROM_A_TERMINAL, sys.executable, "-m", "memtriage", *options, "ends.py"],
        cwd=work,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("called", "signals", "ends"),
    [
        (IN_THE_EXCEPTHOOK, [signal.SIGTERM, signal.SIGTERM], FAILS),
        (IN_THE_CENSUS, [signal.SIGTERM, signal.SIGHUP], FAILS),
        (IN_THE_JUDGMENT, [signal.SIGINT, signal.SIGTERM], EXITS),
        (IN_THE_REPORT, [signal.SIGINT, signal.SIGINT], EXITS),
    ],
)
def test_signals_while_the_watch_ends(tmp_path: Path, called: str, signals: list[int], ends: str) -> None:
    done = watched(tmp_path, called, signals, ends)
    deadly = [signum for signum in signals if signum != signal.SIGINT]
    assert done.returncode == (-deadly[0] if deadly else 3)
    assert done.stderr.count("NOT JUDGED") == 1 and "memtriage" + os.sep not in done.stderr
    assert (tmp_path / "report.json").exists()
    (rank,) = read_run([tmp_path / "record"]).ranks
    reason = "RuntimeError: the reason" if ends == FAILS else None
    assert rank.end is not None and rank.end.exception == reason and rank.notes == []


def test_ctrl_c_during_a_census(tmp_path: Path) -> None:
    done = watched(tmp_path, IN_THE_CENSUS, [signal.SIGINT], "while True: step()")
    assert done.returncode == -signal.SIGINT
    trace, report = done.stderr.split("\nKeyboardInterrupt\n")
    assert "Traceback" in trace and "ends.py" in trace and "memtriage" + os.sep not in trace
    assert "NOT JUDGED" in report
    (rank,) = read_run([tmp_path / "record"]).ranks
    assert rank.end is not None and rank.end.exception == "KeyboardInterrupt" and rank.notes == []


TEXTS = """
import sys

class Loud(Exception):
    def __str__(self):
        print("str called")
        return "boom"

    @property
    def __class__(self):
        print("class asked for")
        return ValueError

    def __getattribute__(self, name):
        print("asked for", name)
        return super().__getattribute__(name)

class Argument:
    def __repr__(self):
        print("repr called")
        return "argument"

{hook}
raise {error} from Loud("cause")
"""


@pytest.mark.parametrize(
    ("hook", "error", "summary"),
    [
        ("", "Loud('x')", "Loud: x"),
        (
            "sys.excepthook = lambda kind, value, trace: print('my hook', value)",
            "KeyError(Argument())",
            "KeyError",
        ),
    ],
)
def test_an_exception_whose_text_runs_code(tmp_path: Path, hook: str, error: str, summary: str) -> None:
    text = TEXTS.format(hook=hook, error=error)
    plain, watched = run_both(tmp_path, "ends.py", files={"ends.py": text})
    assert plain.status == 1 and watched == plain
    (rank,) = read_run([tmp_path / "record"]).ranks
    assert rank.end is not None and rank.end.exception == summary and rank.notes == []


TRAINS = """
import torch
from training import step

def train():
    kept = torch.zeros(1 << 27)
    for number in range(13):
        step()
    {end}

train()
"""


@pytest.mark.parametrize(
    ("end", "there"), [("globals().update(kept=kept)", True), ("raise RuntimeError", True), ("return", False)]
)
def test_the_ledger_is_of_the_last_instant_with_what_was_trained(
    tmp_path: Path, end: str, there: bool
) -> None:
    work = make_folder(tmp_path, files={"trains.py": TRAINS.format(end=end)})
    with (tmp_path / "report").open("w+") as report:
        run(["trains.py"], work, tmp_path / "record", stderr=report)
        report.seek(0)
        text = report.read()
    (rank,) = read_run([tmp_path / "record"]).ranks
    (step,) = {ledger.step for ledger in rank.ledgers.values()}
    assert step is not None and (step == 13) == there
    assert f"in use, ledger at step {step}{'' if there else ' of 13'}\n" in text
    assert "CPU tensors · variable   512.0 MiB" in text
