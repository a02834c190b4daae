"""`memtriage install-listener`: what it writes, and what it says of that."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memtriage.cli.app import main
from memtriage.session.remote import install as hook
from support.refusals import Refused

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the environment's packages are."""
    monkeypatch.setattr(hook, "place", lambda: tmp_path)
    return tmp_path


def test_it_installs_and_removes(folder: Path, capfd: Output) -> None:
    assert main(["install-listener"]) == 0
    module, path_file = hook.files(folder)
    assert set(folder.iterdir()) == {module, path_file}
    assert capfd.readouterr().out == (
        f"wrote {module}\nwrote {path_file}\n"
        "jobs that start from now on in this environment listen once they import torch\n"
    )
    assert main(["install-listener", "--uninstall"]) == 0
    assert not list(folder.iterdir())
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines[:2]) == sorted([f"removed {module}", f"removed {path_file}"])
    assert lines[2:] == ["jobs that run already continue to listen"]
    assert main(["install-listener", "--uninstall"]) == 0
    assert capfd.readouterr().out == "there was nothing to remove\n"


def test_as_json(folder: Path, capfd: Output) -> None:
    files = [str(file) for file in hook.files(folder)]
    for uninstall in (False, True):
        assert main(["install-listener", "--json", *["--uninstall"] * uninstall]) == 0
        result = json.loads(capfd.readouterr().out)
        assert sorted(result.pop("files")) == sorted(files)
        assert result == {"schema": 1, "installed": not uninstall}


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setattr(hook, "place", lambda: missing)
    expected = f"memtriage install-listener: cannot write to {missing}: No such file or directory"
    assert refused("install-listener") == expected


def test_the_process_that_installs_it_does_not_listen() -> None:
    code = (
        "import sys; from memtriage.session.remote import install;"
        "print([type(finder).__name__ for finder in sys.meta_path if type(finder) is not type])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "_ArmingFinder" not in done.stdout
