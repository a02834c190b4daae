import subprocess
import sys
from importlib.metadata import version

import pytest

from memtriage.cli import app, run


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "train.py", "--version", "--json"],
        ["--local_rank=0", "run", "train.py"],
        ["run", "--", "python", "train.py"],
    ],
)
def test_run_gets_its_arguments_unread(arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(run, "main", lambda argv: seen.append(list(argv)) or 7)
    assert app.main(arguments) == 7
    assert seen == [arguments]


def test_version(capsys):
    assert app.main(["--version"]) == 0
    assert capsys.readouterr().out == f"memtriage {version('memtriage')}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_offers_the_commands_that_exist(arguments, capsys):
    assert app.main(arguments) == 0
    out = capsys.readouterr().out
    commands = [line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line.strip()]
    assert commands == [
        *("run", "explain", "predict", "plan", "compare", "holders", "report", "snapshot", "metrics", "top"),
        *("census", "doctor"),
    ]


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["--nonsense"], ["report"], ["report", "--nonsense", "x"], ["doctor", "x"]]
)
def test_bad_usage_is_one_line_and_status_2(arguments, capsys):
    assert app.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memtriage: ")
    assert err.count("\n") == 1


def test_python_m_memtriage():
    done = subprocess.run([sys.executable, "-m", "memtriage", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memtriage ")


def test_run_waits_for_no_parser_and_no_report():
    code = (
        "import sys; from memtriage.cli import app, run; run.main = lambda argv: 0; app.main(['run', 'x']);"
        "print([name for name in ('typer', 'rich', 'duckdb', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_goes_away_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m memtriage doctor | true", shell=True, capture_output=True, text=True
    )
    assert done.stderr == ""
