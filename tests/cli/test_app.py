import os
import shlex
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell):
    done = subprocess.run(
        [sys.executable, "-c", "from memtriage.cli.app import main; main()"],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "_MEMTRIAGE_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": "memtriage sna",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "COMP_WORDS": "memtriage sna",
            "COMP_CWORD": "1",
        },
    )
    assert "snapshot" in done.stdout


@pytest.mark.parametrize("platform", ["darwin", "win32"])
@pytest.mark.parametrize("name", ["run", "census", "attach", "install-listener", "compare"])
def test_what_needs_linux_says_so_in_one_line(name, platform, monkeypatch, capsys):
    refusal = app.refusal
    monkeypatch.setattr(app, "refusal", lambda command, _: refusal(command, platform))
    assert app.main([name, "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"memtriage {name}: needs Linux, and this is ")
    assert err.count("\n") == 1
    assert ("predict, plan, explain" in err) == (platform == "darwin")


def test_what_works_on_other_systems_too():
    for name in ("explain", "snapshot", "report", "top", "holders", "metrics", "doctor"):
        assert app.refusal(name, "win32") is None
    assert app.refusal("predict", "darwin") is None
    assert "Windows" in str(app.refusal("predict", "win32"))
    assert app.refusal("run", "linux") is None


def test_a_full_disk_is_one_line():
    command = [sys.executable, "-m", "memtriage", "doctor", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "memtriage doctor: the output could not be written: no space left on the device\n"
    assert (done.returncode, done.stderr) == (2, expected)


WITHOUT_POSIX = """
import signal, sys
for name in ("fcntl", "resource"):
    sys.modules[name] = None
del signal.SIGPIPE, signal.SIGXFSZ, signal.pthread_sigmask
from memtriage.cli.app import main
sys.exit(main(["explain", "M8"]))
"""


def test_explain_needs_nothing_that_windows_lacks():
    done = subprocess.run([sys.executable, "-c", WITHOUT_POSIX], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "M8" in done.stdout


WITHOUT_TORCH = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from memtriage.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["predict", "train.py:build"],
        ["predict", "train.py", "--host", "--all-ranks", "--world-size", "2"],
        ["predict", "--hf-config", "config.json"],
        ["plan", "train.py", "--budget", "1GiB"],
    ],
)
def test_without_torch_one_line_says_what_to_install(tmp_path, arguments):
    (tmp_path / "train.py").write_text("def build(device): ...")
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"memtriage {arguments[0]}: no torch in this environment")
    assert done.stderr.count("\n") == 1


def test_without_torch_a_program_is_run_without_priming(tmp_path):
    (tmp_path / "train.py").write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "run", "--prime", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_memtriage():
    done = subprocess.run([sys.executable, "-m", "memtriage", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("memtriage ")


def test_run_waits_for_no_parser_and_no_report():
    code = (
        "import sys; from memtriage.cli import app, run; run.main = lambda argv: 0; app.main(['run', 'x']);"
        "print([name for name in ('typer', 'rich', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", ["snapshot", "diff", "explain M8"])
def test_a_reader_that_goes_away_is_no_failure(command: str) -> None:
    recording = str(Path(__file__).parents[1] / "data" / "snapshots" / "loss_list.pickle.gz")
    files = {"snapshot": [recording], "diff": [recording, recording]}.get(command, [])
    text = shlex.join([sys.executable, "-m", "memtriage", *command.split(), *files])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{text} | true"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
