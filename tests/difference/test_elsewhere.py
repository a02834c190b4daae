"""A program as it was at another commit, and with another Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtriage.difference.elsewhere import Environment, at_commit, of_python, predicted


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits with a package that the environment imports from it."""
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "jobs").mkdir()
    monkeypatch.chdir(folder)
    git("init", "--quiet")
    for size in (1, 2):
        (folder / "src" / "sizes.py").write_text(f"SIZE = {size}\n")
        (folder / "jobs" / "job.py").write_text("from sizes import SIZE\nprint(SIZE)\n")
        git("add", ".")
        git("commit", "--quiet", "-m", f"size {size}")
    monkeypatch.syspath_prepend(str(folder / "src"))
    return folder


def run(place: Environment, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=place.folder, env=place.variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_program_of_a_commit_imports_what_that_commit_has(project: Path) -> None:
    (project / "src" / "sizes.py").write_text("SIZE = 3\n")
    with at_commit("HEAD~1") as place:
        assert run(place, "jobs/job.py") == "1"
        assert place.name == "HEAD~1"


def test_a_package_that_an_import_hook_finds_is_that_of_the_commit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some editable installations do."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project / "src")])
    with at_commit("HEAD~1") as place:
        assert run(place, "jobs/job.py") == "1"


def test_an_environment_in_the_repository_is_not_part_of_a_commit(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = project / ".venv" / "lib" / "site-packages"
    monkeypatch.setattr(sys, "prefix", str(project / ".venv"))
    monkeypatch.syspath_prepend(str(packages))
    with at_commit("HEAD") as place:
        assert place.variables is not None
        assert "site-packages" not in place.variables["PYTHONPATH"]


def test_a_folder_below_the_root_is_found_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project / "jobs")
    with at_commit("HEAD") as place:
        assert place.folder.name == "jobs"
        assert run(place, "job.py") == "2"


def test_the_repository_is_as_before(project: Path) -> None:
    before = git("worktree", "list"), git("status", "--short"), git("branch", "--list"), os.listdir(project)
    with pytest.raises(KeyboardInterrupt), at_commit("HEAD") as place:
        (place.folder / "written.txt").write_text("by the program")
        raise KeyboardInterrupt
    after = git("worktree", "list"), git("status", "--short"), git("branch", "--list"), os.listdir(project)
    assert after == before
    assert not place.folder.exists()


@pytest.mark.parametrize("reference", ["nothing", "--help", ""])
def test_a_commit_that_does_not_exist_is_named(project: Path, reference: str) -> None:
    with pytest.raises(ValueError, match=f"--base {reference}: no such commit"), at_commit(reference):
        pass


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="not a git repository"), at_commit("HEAD"):
        pass


def test_another_python_needs_torch_and_memtriage(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ValueError, match=r"No module named .*; expected the python of an environment"):
        of_python(str(bare))
    with pytest.raises(ValueError, match="No such file"):
        of_python(str(tmp_path / "none"))
    assert of_python(sys.executable).python == sys.executable


def test_a_program_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there could not be predicted: no such file: 'none.py'"):
        predicted(Environment("there", tmp_path), ["none.py:build"], lambda line: None)
