"""How a trial ended, in the words of its table row. The jobs are shell scripts: they take no time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memtriage.prove.state import ComparisonState
from memtriage.prove.trial import END, LOG, TrialEnd, log_tail, read_end, run_trial
from support.trials import MIB, parsed, write_rank


def ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, *, timeout: str = "60 s"
) -> tuple[TrialEnd, Path]:
    """Run a shell script instead of the interpreter; it finds the trial's folder in `$MEMTRIAGE_TRIAL`."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -c) exit 1;; esac\n{job}\n')
    python.chmod(0o755)
    text = f'[trials]\nmodule = "job"\ntimeout = "{timeout}"\npython = "{python}"\n[[variant]]\nname = "a"\n'
    trials = parsed(text, tmp_path)
    state = ComparisonState(tmp_path / "out", trials)
    folder = state.folder("a", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    end = run_trial(trials, trials.variants[0], 0, state.settings("a"), folder)
    return end, folder


def test_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, folder = ended(tmp_path, monkeypatch, 'echo "$@"; echo $MEMTRIAGE_TRIAL')
    assert (end.outcome, end.exit_code, end.error, end.devices) == ("finished", 0, None, "3")
    assert end == read_end(folder)
    arguments, marker = (folder / LOG).read_text().splitlines()
    assert arguments == f"-m memtriage run -o {folder}/record -m job"
    assert marker == str(folder)
    assert end.host == os.uname().nodename


def test_crashed_says_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = "echo start; echo 'ValueError: no such layer'; echo 'memtriage: report'; echo '===='; exit 4"
    end, _ = ended(tmp_path, monkeypatch, job)
    assert (end.outcome, end.exit_code, end.error) == ("crashed", 4, "ValueError: no such layer")


def test_crashed_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _ = ended(tmp_path, monkeypatch, "exit 5")
    assert (end.outcome, end.error) == ("crashed", "exit status 5")


def test_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _ = ended(tmp_path, monkeypatch, "kill -KILL $$")
    assert (end.outcome, end.exit_code, end.error) == ("killed", -9, "killed by SIGKILL")


def test_timed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _ = ended(tmp_path, monkeypatch, "exec sleep 600", timeout="0.3 s")
    assert (end.outcome, end.error) == ("timed_out", "stopped after 300 ms")


def test_out_of_memory_is_the_records_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tmp_path / "prepared"
    write_rank(prepared, [1.0] * 2, [(MIB, MIB)] * 2)
    file = next(prepared.rglob("rank-*.jsonl"))
    text = file.read_text().rpartition('{"t":"end"')[0]
    finding = '{"t":"finding","kind":"out_of_memory","device":"cuda:0","final":true,"bytes":5}\n'
    end = '{"t":"end","verdict":"out_of_memory","steps":2,"exception":"OutOfMemoryError: tried 2 GiB"}\n'
    file.write_text(text + finding + end)
    job = f"cp -r {prepared}/record $MEMTRIAGE_TRIAL/record; exit 1"
    found, _ = ended(tmp_path, monkeypatch, job)
    assert (found.outcome, found.error) == ("out_of_memory", "OutOfMemoryError: tried 2 GiB")


def test_a_warning_of_a_later_step_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tmp_path / "prepared"
    write_rank(prepared, [1.0] * 2, [(MIB, MIB)] * 2)
    file = next(prepared.rglob("rank-*.jsonl"))
    finding = '{"t":"finding","kind":"out_of_memory","device":"cuda:0","certainty":"suspected"}\n'
    file.write_text(file.read_text() + finding)
    found, _ = ended(tmp_path, monkeypatch, f"cp -r {prepared}/record $MEMTRIAGE_TRIAL/record; exit 1")
    assert found.outcome == "crashed"


def test_a_rank_that_was_killed_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = tmp_path / "prepared"
    for rank in (0, 1):
        write_rank(prepared, [1.0] * 2, [(MIB, MIB)] * 2, rank=rank, world_size=2)
    file = sorted(prepared.rglob("rank-*.jsonl"))[1]
    file.write_text(file.read_text().rpartition('{"t":"end"')[0])
    job = f"cp -r {prepared}/record $MEMTRIAGE_TRIAL/record; echo Signal 9; echo ======; exit 1"
    found, _ = ended(tmp_path, monkeypatch, job)
    assert (found.outcome, found.exit_code) == ("killed", 1)
    assert (found.error or "").startswith("rank 1 was killed: last seen at step 2")


def test_what_a_log_proves_of_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Tasks have been OOM Killed."
    end, _ = ended(tmp_path, monkeypatch, f"echo '{line}'; kill -KILL $$")
    assert end.outcome == "killed"
    assert (end.error or "").startswith("killed by SIGKILL: ")


def test_a_folder_is_emptied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out" / "a" / "round-000"
    folder.mkdir(parents=True)
    (folder / "stale").touch()
    _, found = ended(tmp_path, monkeypatch, "exit 0")
    assert sorted(path.name for path in found.iterdir()) == [LOG, END]


def test_an_interpreter_that_cannot_start_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, folder = ended(tmp_path, monkeypatch, "")
    text = '[trials]\nmodule = "job"\ndirectory = "gone"\n[[variant]]\nname = "a"\n'
    (tmp_path / "gone").mkdir()
    trials = parsed(text, tmp_path)
    (tmp_path / "gone").rmdir()
    end = run_trial(trials, trials.variants[0], 0, {}, folder)
    assert (end.outcome, end.exit_code) == ("crashed", 127)
    assert "gone" in (end.error or "")


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert log_tail(log) == ""
    log.write_bytes(b"x" * 300_000 + "\nlast ü\xff".encode("latin-1"))
    assert log_tail(log).endswith("last �\xff".replace("\xff", "�"))
    assert len(log_tail(log)) < 270_000
