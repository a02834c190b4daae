"""The directory of trials: what has ended stays, what has changed is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtriage.prove.state import ComparisonState, slug
from memtriage.prove.table import TrialsError
from memtriage.prove.trial import END, read_end
from memtriage.prove.trials import Trials
from support.trials import HEAD, parsed, trials_of, write_trial

SCRIPT = '[trials]\nscript = "job.py"\nrepeats = 2\n[[variant]]\nname = "a"\n[[variant]]\nname = "b"\n'


def script_trials(folder: Path, text: str = SCRIPT, content: str = "pass") -> Trials:
    (folder / "job.py").write_text(content)
    return parsed(text, folder)


def test_trials_that_ended_are_found_again(tmp_path: Path) -> None:
    state = ComparisonState(tmp_path / "out", trials_of(tmp_path, "a", "b"))
    assert state.ends() == {}
    write_trial(state, "a", 0)
    write_trial(state, "b", 2, outcome="crashed", error="ValueError: x")
    write_trial(state, "b", 7)  # of a file that asked for more repeats
    ends = state.ends()
    assert list(ends) == [(0, "a"), (2, "b")]
    assert ends[2, "b"].error == "ValueError: x"
    assert state.forget(["b"]) == 1
    assert list(state.ends()) == [(0, "a")]


def test_a_cut_end_is_no_end(tmp_path: Path) -> None:
    state = ComparisonState(tmp_path, trials_of(tmp_path, "a"))
    write_trial(state, "a", 0)
    file = state.folder("a", 0) / END
    file.write_bytes(file.read_bytes()[:30])
    assert read_end(state.folder("a", 0)) is None
    assert state.ends() == {}


@pytest.mark.parametrize(
    ("text", "content", "changed"),
    [
        (SCRIPT + 'args = ["--new"]\n', "pass", "variant 'b' .*args"),
        (SCRIPT + "env = { X = 1 }\n", "pass", "variant 'b' .*env X"),
        (SCRIPT + 'allocator = "a:b"\n', "pass", "variant 'b' .*allocator"),
        (SCRIPT + "memtriage = { phase = true }\n", "pass", "variant 'b' .*phase"),
        (SCRIPT.replace("repeats", "ranks"), "pass", "variant 'a' .*ranks"),
        (SCRIPT, "print()", "variant 'a' .*script's content"),
    ],
)
def test_what_decides_how_trials_run_must_not_change(
    tmp_path: Path, text: str, content: str, changed: str
) -> None:
    before = ComparisonState(tmp_path / "out", script_trials(tmp_path))
    write_trial(before, "a", 0)
    write_trial(before, "b", 0)
    before.refuse_changes()
    after = ComparisonState(tmp_path / "out", script_trials(tmp_path, text, content))
    with pytest.raises(TrialsError, match=changed) as caught:
        after.refuse_changes()
    assert "--redo" in str(caught.value)
    after.forget(["a", "b"])
    after.refuse_changes()


def test_what_only_decides_how_they_are_read_may_change(tmp_path: Path) -> None:
    write_trial(ComparisonState(tmp_path / "out", script_trials(tmp_path)), "a", 0)
    text = SCRIPT.replace(
        "repeats = 2", 'repeats = 9\nwarmup = 2\nmark = "x"\nbaseline = "b"\ntimeout = "9 s"'
    )
    more = '[[variant]]\nname = "c"\n[[target]]\nmetric = "reserved"\nat_most = "1 GiB"\n'
    after = ComparisonState(tmp_path / "out", script_trials(tmp_path, text + more))
    after.refuse_changes()
    assert list(after.ends()) == [(0, "a")]


def test_one_comparison_at_a_time(tmp_path: Path) -> None:
    trials = trials_of(tmp_path, "a")
    with (
        ComparisonState(tmp_path / "out", trials).locked(),
        pytest.raises(TrialsError, match="in use by another"),
        ComparisonState(tmp_path / "out", trials).locked(),
    ):
        pass
    with ComparisonState(tmp_path / "out", trials).locked():
        assert (tmp_path / "out").is_dir()


def test_names_of_folders() -> None:
    assert slug("fp8") == "fp8"
    names = ["fp8 + clear", "fp8 - clear", "../up", "", "...", "ä" * 60, "a/b", "fp8-clear"]
    folders = [slug(name) for name in names]
    assert len(set(folders)) == len(folders)
    assert all("/" not in folder and not folder.startswith(".") and folder for folder in folders)


def test_a_directory_that_is_run_counts_by_its_main(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    trials = parsed(HEAD.replace('module = "job"', 'script = "app"') + '[[variant]]\nname = "a"', tmp_path)
    with pytest.raises(TrialsError, match="cannot be read"):
        ComparisonState(tmp_path, trials).settings("a")
    (tmp_path / "app" / "__main__.py").write_text("pass")
    assert ComparisonState(tmp_path, trials).settings("a")["script's content"]
