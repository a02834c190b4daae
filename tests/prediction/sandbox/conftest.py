"""Programs that are run in the sandbox, in a folder with some files."""

import hashlib
import os
import stat
import textwrap
from pathlib import Path

import msgspec
import pytest

from memtriage.prediction.sandbox.call import call


class Notes(msgspec.Struct):
    """What the programs of these tests return."""

    notes: list[str]
    seen: list[str] = []


HEAD = """
import logging, os, pathlib, shutil, signal, socket, subprocess, sys
import msgspec
class Notes(msgspec.Struct):
    notes: list[str] = []
    seen: list[str] = []
"""

WEAKER = {"overlay": ("allows no overlay", "cannot refuse"), "landlock": ("cannot refuse",), "python": ()}
"""What the notes of a run say if it had less than the level that was asked for."""


@pytest.fixture(params=["overlay", "landlock", "python"])
def level(request) -> str:
    return request.param


@pytest.fixture
def sandboxed(tmp_path, monkeypatch):
    """Runs the body of a function in the sandbox, in a folder with some files."""
    folder = tmp_path / "job"
    (folder / "checkpoints/step-1").mkdir(parents=True)
    for name in ("model.pt", "old.pt", "train.log", "checkpoints/step-1/model.pt", "outside.txt", "own.pt"):
        (folder / name).write_text(f"precious {name}")
    (folder / "latest").symlink_to("checkpoints/step-1")
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(modules), prepend=os.pathsep)

    def run(body: str, level: str | None = None, **options) -> Notes:
        if level is not None:
            options["levels"] = (level, "python")
        text = HEAD + "def program():\n    seen = []\n" + textwrap.indent(textwrap.dedent(body), "    ")
        (modules / "job.py").write_text(text + "\n    return Notes(seen=[str(each) for each in seen])\n")
        before = tree(folder)
        try:
            done = call("job:program", {}, Notes, wanted=[str(folder)], **options)
        finally:
            assert tree(folder) == before
        if level is not None and any(sign in note for note in done.notes for sign in WEAKER[level]):
            pytest.skip(f"this system has no {level}")
        return done

    return run


def tree(folder: Path) -> dict[str, object]:
    """Every path below a folder, with its kind, contents, mode, owner, time and attributes."""
    return {str(path): _state(path) for path in folder.rglob("*")}


def _state(path: Path) -> object:
    status = path.lstat()
    contents = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else None
    target = os.readlink(path) if path.is_symlink() else None
    attributes = os.listxattr(path, follow_symlinks=False) if hasattr(os, "listxattr") else []
    owner = (status.st_uid, status.st_gid)
    return contents, target, status.st_mode, owner, status.st_mtime_ns, attributes
