"""What the commands that trace a program have in common: which program is named, and how its trace runs."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any

import pytest

from memtriage.cli import trace_options
from memtriage.cli.trace_options import (
    NamedProgram,
    progress_line,
    target_of,
    traces_a_program,
)
from memtriage.model.target import TraceTarget
from memtriage.prediction.sandbox import call
from memtriage.prediction.sandbox.call import TraceFailed

CONFIG = Path("models/config.json")


def target(
    name: str | None = None,
    arguments: list[str] | None = None,
    module: str | None = None,
    hf_config: Path | None = None,
    inference: bool = False,
    **training: Any,
) -> TraceTarget:
    return target_of(name, arguments, module, hf_config, training, inference)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (target("m.py:build"), TraceTarget(name="m.py:build", arguments=[], training={})),
        (
            target("train.py", ["--lr", "1"], batch=None),
            TraceTarget(name="train.py", arguments=["--lr", "1"], training={}),
        ),
        (target(module="pkg.train"), TraceTarget(module="pkg.train", arguments=[], training={})),
        (target("serve.py", inference=True), TraceTarget(name="serve.py", inference=True)),
        (
            target("first", ["second"], module="pkg.train"),
            TraceTarget(module="pkg.train", arguments=["first", "second"], training={}),
        ),
        (
            target(hf_config=CONFIG, batch=4, seq=None, gradient_checkpointing=False),
            TraceTarget(
                hf_config=str(CONFIG), arguments=[], training={"batch": 4, "gradient_checkpointing": False}
            ),
        ),
    ],
)
def test_a_program_is_named_in_one_way(named: TraceTarget, expected: TraceTarget) -> None:
    assert named == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "nothing to trace: use FILE.py:FUNCTION"),
        ({"name": "a.py", "hf_config": CONFIG}, "use only one of 'a.py' and '--hf-config'"),
        ({"module": "m", "hf_config": CONFIG}, "use only one of 'm' and '--hf-config'"),
        ({"name": "a.py", "batch": 4, "gradient_accumulation": 2}, "--batch, --gradient-accumulation needs"),
        ({"name": "a.py:build", "arguments": ["x"]}, "unexpected 'x' after 'a.py:build'"),
        (
            {"name": "a.py:build", "inference": True},
            "--inference needs a script or a module",
        ),
        ({"hf_config": CONFIG, "inference": True}, "--inference needs a script or a module"),
        ({"hf_config": CONFIG, "arguments": ["x", "y"]}, "unexpected 'x y' after '--hf-config'"),
    ],
)
def test_other_names_are_refused_with_what_is_wrong(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        target(**given)
    assert words in str(error.value)


def traced(
    monkeypatch: pytest.MonkeyPatch, program: TraceTarget, **how: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the sandbox is asked for by the trace of a program."""
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def answer(*given: Any, **named: Any) -> str:
        asked.append((given, named))
        return "done"

    monkeypatch.setattr(call, "call", answer)
    options = {"allow_network": False, "show_output": False, **how}
    named = NamedProgram(program, {"gpu": "h100"}, **options)
    assert named.trace("planned", {"steps": 3}, str) == "done"
    return asked[0]


def test_a_trace_runs_in_the_sandbox_with_the_options_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    (function, given, returned), named = traced(monkeypatch, target("a/train.py", ["--lr", "1"]))
    assert (function, returned) == ("memtriage.planning.traced_commands:planned", str)
    assert given["options"] == {"gpu": "h100", "steps": 3}
    assert given["target"]["name"] == "a/train.py" and given["target"]["arguments"] == ["--lr", "1"]
    assert (named["network"], named["output"]) == (False, None)
    _, named = traced(monkeypatch, target("train.py"), allow_network=True, show_output=True)
    assert (named["network"], named["output"]) == (True, 2)  # the number of stderr


@pytest.mark.parametrize(
    ("program", "written"),
    [
        (target("a/train.py:build"), [str(Path("a").absolute())]),
        (
            target("/b/train.py", ["--out=logs", "runs", "--fast", "seed=3", "-v"]),
            ["/b", "logs", "runs", "3"],
        ),
        (target(module="train", arguments=["runs"]), ["runs"]),
    ],
)
def test_the_folder_of_a_program_and_its_arguments_may_be_written(
    program: TraceTarget, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, named = traced(monkeypatch, program)
    assert named["wanted"] == written


def test_without_torch_the_trace_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtriage.cli.trace_options.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"no torch in this environment; expected 2\.8 or newer"):
        NamedProgram(target("train.py"), {}, False, False).trace("planned", {}, str)


def plan(program: NamedProgram, *, steps: int = 3) -> int:
    """Plan."""
    if steps == 0:
        raise ValueError("no steps")
    if steps < 0:
        raise TraceFailed("the child ended", "Killed")
    return steps + len(program.target.arguments)


def test_a_command_gets_its_own_options_and_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    command = traces_a_program(plan)
    signature = inspect.signature(command)
    assert list(signature.parameters)[:2] == ["steps", "target"]
    assert {each.kind for each in signature.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert (command.__name__, command.__doc__) == ("plan", "Plan.")
    named = {name: each.default for name, each in signature.parameters.items() if name != "steps"}
    assert (named["gpu"], named["allow_network"], named["show_output"]) == ("h200", False, False)
    assert command(**{**named, "target": "train.py", "arguments": ["x"]}, steps=4) == 5
    assert command(**named, steps=4) == 2
    assert "memtriage plan: nothing to trace" in capfd.readouterr().err
    assert command(**{**named, "target": "train.py"}, steps=0) == 2
    assert capfd.readouterr().err == "memtriage plan: no steps\n"
    assert command(**{**named, "target": "train.py"}, steps=-1) == 2
    assert capfd.readouterr().err == "memtriage plan: the child ended\nits last output:\nKilled\n"


def test_a_terminal_shows_how_far_the_trace_is(monkeypatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with progress_line(terminal) as show:
        show("in step 2 of 4", 5)
    assert "traced for 5.0 s, in step 2 of 4" in terminal.getvalue()


def test_elsewhere_a_line_is_printed_each_time_the_time_has_doubled(monkeypatch) -> None:
    monkeypatch.setattr(trace_options, "_FIRST_LINE_S", 30)
    stream = io.StringIO()
    with progress_line(stream) as show:
        for seconds in (0, 29.5, 30, 31, 59, 60.5, 100, 120):
            show(f"in step {seconds / 10:.0f}", seconds)
    assert stream.getvalue().splitlines() == [
        "memtriage: traced for 30 s, in step 3",
        "memtriage: traced for 1 min 00 s, in step 6",
        "memtriage: traced for 2 min 00 s, in step 12",
    ]


@pytest.mark.parametrize("command", [["predict"], ["plan", "--budget", "1GiB"]])
def test_a_program_that_never_ends_is_one_line_on_stderr(command, tmp_path, refused) -> None:
    script = tmp_path / "endless.py"
    script.write_text("while True: pass")
    before = "the trace was stopped after 500 ms, before the first step: allow more time with --timeout"
    assert refused(*command, str(script), "--timeout", "0.5s") == f"memtriage {command[0]}: {before}"
