"""`memtriage run --prime`: predicted in a child process, then started again as if nothing had been done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtriage.cli import primed
from memtriage.cli.trace_options import NamedProgram
from memtriage.model.priming import Priming
from memtriage.prediction import gpu_kinds
from memtriage.prediction.sandbox.call import TraceFailed
from memtriage.session.runner import ScriptTarget

SCRIPT = """
import os, sys
print(sorted(name for name in ("msgspec", "typer", "numpy", "torch") if name in sys.modules))
print("MEMTRIAGE_PRIMING" in os.environ, sys.argv[1:], os.getpid())
"""


def test_nothing_of_the_prediction_is_left_in_the_program(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = {}
    for flag in ([], ["--prime"]):
        folder = tmp_path / f"run{len(flag)}"
        done = subprocess.run(
            [sys.executable, "-m", "memtriage", "run", *flag, "-o", str(folder), str(script), "--lr", "1"],
            capture_output=True, text=True, timeout=300, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        modules, rest = done.stdout.splitlines()
        assert rest.startswith("False ['--lr', '1']")
        said[len(flag)] = modules, done.stderr
    assert said[1][0] == said[0][0]
    assert "--prime: priming would not help" in said[1][1]
    assert "--prime" not in said[0][1]
    (file,) = (tmp_path / "run1").rglob("priming.json")
    assert json.loads(file.read_text())["blocks"] == []


def test_the_process_starts_again_once_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primed, "choose_for", lambda target: Priming(reason=f"chosen for {target.name}"))
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(
        os, "execve", lambda program, arguments, environment: started.append((arguments, environment))
    )
    primed.restart_primed(ScriptTarget("script", "train.py", []))
    ((arguments, environment),) = started
    assert arguments == [sys.executable, *sys.orig_argv[1:]]
    monkeypatch.setenv(primed.VARIABLE, environment[primed.VARIABLE])
    choice = primed.choice_in_environment()
    assert choice is not None
    assert choice.reason == "chosen for train.py"
    assert primed.VARIABLE not in os.environ
    assert primed.choice_in_environment() is None


def test_a_program_that_cannot_be_predicted_gets_no_blocks(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no data here')\n")
    choice = primed.choose_for(ScriptTarget("script", str(script), []))
    assert choice.blocks == []
    assert choice.reason is not None
    assert choice.reason.startswith("the program cannot be predicted: ")


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, {"world_size": 1, "rank": 0}),
        ({"WORLD_SIZE": "8", "RANK": "3"}, {"world_size": 8, "rank": 3}),
        ({"WORLD_SIZE": "-8", "RANK": "x"}, {"world_size": 1, "rank": 0}),
        ({"WORLD_SIZE": "", "RANK": "²"}, {"world_size": 1, "rank": 0}),
    ],
)
@pytest.mark.parametrize(("kind", "named"), [("script", ("train", None)), ("module", (None, "train"))])
def test_a_program_is_predicted_as_it_is_going_to_run(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ranks: dict[str, int], kind: Any, named: Any
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_kinds, "gpu_here", lambda: "h100")
    asked: list[tuple[NamedProgram, str, dict[str, Any], type]] = []

    def trace(program: NamedProgram, function: str, options: dict[str, Any], returned: type) -> Any:
        asked.append((program, function, options, returned))
        return Priming(reason="chosen")

    monkeypatch.setattr(NamedProgram, "trace", trace)
    assert primed.choose_for(ScriptTarget(kind, "train", ["--lr", "1"])).reason == "chosen"
    ((program, function, options, returned),) = asked
    assert (function, options, returned) == ("prime", ranks, Priming)
    assert (program.target.name, program.target.module) == named
    assert list(program.target.arguments) == ["--lr", "1"]
    assert (program.figures, program.allow_network, program.show_output) == ({"gpu": "h100"}, False, False)


@pytest.mark.parametrize("error", [ValueError("no torch"), TraceFailed("no torch")])
def test_why_a_program_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def trace(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(gpu_kinds, "gpu_here", lambda: "h100")
    monkeypatch.setattr(NamedProgram, "trace", trace)
    choice = primed.choose_for(ScriptTarget("script", "train.py", []))
    assert (choice.reason, choice.blocks) == ("the program cannot be predicted: no torch", [])
