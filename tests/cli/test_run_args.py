"""The command line of `memtriage run`: what it means, and what it says when it means nothing."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.cli.run import RunOptions, UsageError, is_run, main, parse
from memtriage.session.runner import ScriptTarget


def script(name: str, *args: str) -> ScriptTarget:
    return ScriptTarget("script", name, list(args))


def module(name: str, *args: str) -> ScriptTarget:
    return ScriptTarget("module", name, list(args))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", RunOptions(script("train.py"))),
        ("-o out train.py a b", RunOptions(script("train.py", "a", "b"), Path("out"))),
        ("-oout train.py", RunOptions(script("train.py"), Path("out"))),
        ("--output=out train.py", RunOptions(script("train.py"), Path("out"))),
        ("--output out train.py", RunOptions(script("train.py"), Path("out"))),
        ("--json r.json train.py", RunOptions(script("train.py"), None, Path("r.json"))),
        ("--json=r.json -o d train.py", RunOptions(script("train.py"), Path("d"), Path("r.json"))),
        ("-m pkg.train --lr 1", RunOptions(module("pkg.train", "--lr", "1"))),
        ("-mpkg.train -m x", RunOptions(module("pkg.train", "-m", "x"))),
        ("-o d -m pkg -o e", RunOptions(module("pkg", "-o", "e"), Path("d"))),
        ("-- train.py -o d", RunOptions(script("train.py", "-o", "d"))),
        ("python train.py", RunOptions(script("python", "train.py"))),
        ("run", RunOptions(script("run"))),
        ("--help", RunOptions(None)),
        ("-o d -h", RunOptions(None)),
        ("train.py --help", RunOptions(script("train.py", "--help"))),
        ("train.py -- --json x -h", RunOptions(script("train.py", "--", "--json", "x", "-h"))),
        ("--metrics 9400 train.py", RunOptions(script("train.py"), metrics="9400")),
        ("--metrics=0.0.0.0:80 -m pkg", RunOptions(module("pkg"), metrics="0.0.0.0:80")),
        ("train.py --metrics 9400", RunOptions(script("train.py", "--metrics", "9400"))),
        ("--fail-on leak,residue train.py", RunOptions(script("train.py"), fail_on="leak,residue")),
        ("--fail-on=leak train.py", RunOptions(script("train.py"), fail_on="leak")),
    ],
)
def test_parse(line: str, expected: RunOptions) -> None:
    assert parse(["run", *line.split()]) == expected


def test_the_word_run_may_be_missing() -> None:
    assert parse(["-o", "d", "train.py"]) == parse(["run", "-o", "d", "train.py"])


@pytest.mark.parametrize("rank", [["--local_rank=3"], ["--local-rank", "3"], ["--local_rank", "3"]])
def test_rank_of_the_launcher_goes_to_the_script(rank: list[str]) -> None:
    assert parse([*rank, "run", "-o", "d", "train.py", "a"]) == RunOptions(
        script("train.py", *rank, "a"), Path("d")
    )
    assert parse([*rank, "run", "-m", "pkg", "a"]) == RunOptions(module("pkg", *rank, "a"))
    assert is_run([*rank, "run", "train.py"])
    assert not is_run([*rank, "report", "run"])


@given(st.lists(st.text(max_size=8)), st.sampled_from([[], ["-o", "d"], ["--json=x"], ["--"]]))
def test_what_follows_the_script_is_untouched(args: list[str], own: list[str]) -> None:
    assert parse(["run", *own, "train.py", *args]).target == script("train.py", *args)


@given(st.lists(st.text(max_size=8)))
def test_what_follows_the_module_is_untouched(args: list[str]) -> None:
    assert parse(["run", "-m", "pkg", *args]).target == module("pkg", *args)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["nothing to run"]),
        ("-o", ["'-o'", "directory"]),
        ("--output=", ["'--output='", "directory"]),
        ("--json", ["'--json'", "file"]),
        ("--metrics", ["'--metrics'", "[HOST:]PORT"]),
        ("--fail-on", ["'--fail-on'", "verdicts"]),
        ("-m", ["'-m'", "module"]),
        ("--", ["nothing to run"]),
        ("--fial-on leak train.py", ["'--fial-on'", "did you mean --fail-on?"]),
        ("--lr=3 train.py", ["'--lr=3'", "go after it"]),
    ],
)
def test_bad_usage_is_one_line_that_names_what_was_given(
    line: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):
        parse(["run", *line.split()])
    assert main(["run", *line.split()]) == 2
    _assert_one_line(capsys, words)


def _assert_one_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("memtriage run: ")
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    assert "expected" in captured.err
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("missing.py", ["'missing.py'", "check the path"]),
        ("python train.py", ["'python'", "leave out the interpreter"]),
        ("-- /nowhere/bin/python3 -m train", ["/nowhere/bin/python3", "leave out the interpreter"]),
        ("plain", ["'plain'", "__main__.py"]),
        ("-m no_such_module.train", ["'no_such_module'", sys.executable]),
        ("-o train.py train.py", ["'train.py' is a file", "-o"]),
        ("--json plain train.py", ["'plain' is a directory"]),
        ("--json missing/report.json train.py", ["'missing/report.json'"]),
        ("--metrics train.py", ["nothing to run"]),
        ("--metrics http train.py", ["--metrics", "'http'", "9400"]),
        ("--metrics 123456 train.py", ["'123456'", "65535"]),
        ("--fail-on leak,leek train.py", ["--fail-on 'leek'", "residue", "not_judged"]),
        ("--fail-on leak, train.py", ["--fail-on ''", "leak"]),
        ("--fail-on killed train.py", ["--fail-on 'killed'", "out_of_memory"]),
    ],
)
def test_unusable_input_is_one_line(
    line: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "train.py").touch()
    assert main(["run", *line.split()]) == 2
    _assert_one_line(capsys, words)


def test_unreadable_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.touch(mode=0)
    # Root may read everything: the answer of the kernel is given here.
    monkeypatch.setattr(os, "access", lambda name, mode: mode != os.R_OK)
    assert main(["run", str(path)]) == 2
    _assert_one_line(capsys, [repr(str(path)), "permissions"])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: memtriage run [OPTIONS] SCRIPT")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ScriptTarget, Path, Path | None]]:
    """What `run_watched` is called with; the script itself does not run, and exits with 7."""
    seen: list[tuple[ScriptTarget, Path, Path | None]] = []

    def run_watched(
        target: ScriptTarget, directory: Path, json_path: Path | None, *, per_microbatch: bool, **_: object
    ) -> int:
        assert per_microbatch == ("--per-microbatch" in target.args)
        seen.append((target, directory, json_path))
        return 7

    watch = types.ModuleType("memtriage.session.run")
    watch.__dict__["run_watched"] = run_watched
    monkeypatch.setitem(sys.modules, "memtriage.session.run", watch)
    monkeypatch.delenv("MEMTRIAGE_DIR", raising=False)
    return seen


def test_run_is_called_with_absolute_paths(
    calls: list[tuple[ScriptTarget, Path, Path | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").touch()
    assert main(["run", "train.py", "--json", "x"]) == 7
    monkeypatch.setenv("MEMTRIAGE_DIR", "elsewhere")
    assert main(["run", "--json", "r.json", "package"]) == 7
    assert main(["run", "-o", "given", "-m", "package"]) == 7
    assert main(["run", "--per-microbatch", "train.py", "--per-microbatch"]) == 7
    assert calls == [
        (script("train.py", "--json", "x"), tmp_path / "memtriage-run", None),
        (script("package"), tmp_path / "elsewhere", tmp_path / "r.json"),
        (module("package"), tmp_path / "given", None),
        (script("train.py", "--per-microbatch"), tmp_path / "elsewhere", None),
    ]
