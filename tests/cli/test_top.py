"""`memtriage top`: one table, a terminal, JSON, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from memtriage.cli import app
from memtriage.report import top_text
from support.live_runs import LiveRank
from support.refusals import Refused


@pytest.mark.parametrize("arguments", [[], ["--once"]])
def test_one_table_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    LiveRank(tmp_path).steps(3)
    assert app.main(["top", *arguments, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("RUNNING") and "cuda:0" in out


def test_json(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    LiveRank(tmp_path).steps(3)
    assert app.main(["top", "--json", str(tmp_path)]) == 0
    out, err = capsysbinary.readouterr()
    assert json.loads(out)["by_rank"][0]["step"] == 3
    assert err == b""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "absent: no such file or directory"),
        (["--once", "."], "no memtriage record in it"),
        (["--sort", "color", "."], "invalid --sort 'color': use one of rank, host"),
        (["--every", "0.01", "."], "invalid --every 0.01: expected at least 0.2 seconds"),
    ],
)
def test_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused("top", *arguments)


def test_on_a_terminal_the_table_is_shown_until_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = LiveRank(tmp_path).steps(3)

    def wait(seconds: float) -> None:
        assert seconds >= 7.0
        if "4 steps" in capsys.readouterr().out:
            raise KeyboardInterrupt
        rank.steps(1)

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(top_text.time, "sleep", wait)
    assert app.main(["top", "--every", "7", str(tmp_path)]) == 0
