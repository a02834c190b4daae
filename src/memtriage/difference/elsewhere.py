"""Predict a program as it is elsewhere: with another Python, or as it was at another commit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtriage.difference.sources import of_json
from memtriage.model.difference import Side

_PROGRESS: Final = "memtriage: "
"""What a line of progress begins with."""
_ASK: Final = "import memtriage.cli.app, torch"


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a program is predicted.

    Attributes:
        name: in words, for messages.
        folder: the working directory.
        python: the interpreter.
        variables: its environment variables; None for those of this process.
    """

    name: str
    folder: Path
    python: str = sys.executable
    variables: Mapping[str, str] | None = None


def predicted(place: Environment, arguments: Sequence[str], show: Callable[[str], None]) -> Side:
    """Predict a program there, with `memtriage predict`.

    Args:
        place: where.
        arguments: those of the command that name the program and what it is predicted for.
        show: gets lines of progress.

    Raises:
        ValueError: it cannot be predicted; the text says why.
    """
    command = [place.python, "-m", "memtriage", "predict", "--json", *arguments]
    said: list[str] = []
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command,
            cwd=place.folder,
            env=place.variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if line.startswith(_PROGRESS):
                    show(f"{place.name}: {line.removeprefix(_PROGRESS).rstrip()}")
                else:
                    said.append(line.strip())
        except BaseException:
            process.kill()
            raise
        status = process.wait()
        output.seek(0)
        result = output.read()
    if status:
        reason = next(filter(None, said), f"exit status {status}").removeprefix("memtriage predict: ")
        raise ValueError(f"{place.name} could not be predicted: {reason}")
    return of_json(result, place.name)


def of_python(python: str) -> Environment:
    """Return the place of another Python.

    Raises:
        ValueError: there is none, or it lacks memtriage or torch.
    """
    expected = "expected the python of an environment with memtriage and torch 2.8 or newer"
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ValueError(f"{python}: {error.strerror or error}; {expected}") from error
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        raise ValueError(f"{python}: {lines[-1]}; {expected}")
    return Environment(python, Path.cwd(), python)


@contextmanager
def at_commit(reference: str) -> Iterator[Environment]:
    """Give the repository that the working directory is in as it was at a commit, in a folder of its own.

    What the present environment imports from the repository is imported from that folder.

    Raises:
        ValueError: there is no repository, or no such commit.
    """
    here = Path.cwd()
    root = Path(_git("rev-parse", "--show-toplevel"))
    commit = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="memtriage-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            then = tree / here.relative_to(root)
            if not then.is_dir():
                raise ValueError(f"--base {reference}: {here.relative_to(root)} is not in it")
            yield Environment(
                reference, then, variables={**os.environ, "PYTHONPATH": _imported_from(root, tree)}
            )
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _imported_from(root: Path, tree: Path) -> str:
    """The folders of `PYTHONPATH`: those of the repository as they are in the tree."""
    environment = Path(sys.prefix)  # a virtual environment in the repository is not part of a commit
    found = [Path(entry) for entry in sys.path if entry and not Path(entry).is_relative_to(environment)]
    # An editable installation may find the package by an import hook, without any folder.
    inside = [folder for folder in (*found, root / "src") if folder.is_relative_to(root)]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(
        dict.fromkeys(
            [
                *(str(tree / folder.relative_to(root)) for folder in inside),
                *(entry for entry in given if not Path(entry).is_relative_to(root)),
            ]
        )
    )


def _git(*arguments: str) -> str:
    """Return what git prints.

    Raises:
        ValueError: it fails, or there is no git.
    """
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ValueError(f"git: {error.strerror or error}; a gate compares with a commit") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        wanted = arguments[-1].removesuffix("^{commit}")
        raise ValueError(said[-1] if said else f"--base {wanted}: no such commit in this repository")
    return done.stdout.strip()
