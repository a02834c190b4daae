"""The directory of a comparison: a folder a trial, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from memtriage.prove.table import TrialsError
from memtriage.prove.trial import TrialEnd, read_end
from memtriage.prove.trials import Trials

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")
_LOCK: Final = "lock"
_DIGEST: Final = 12
_LONGEST: Final = 40


class ComparisonState:
    """Finds the trials of a file in a directory."""

    def __init__(self, directory: Path, trials: Trials) -> None:
        self.directory = directory
        self._trials = trials
        self._variants = {variant.name: variant for variant in trials.variants}

    def settings(self, name: str) -> dict[str, str]:
        """Return what decides how a variant's trials run, read now: the script may have been edited.

        Its script counts by content, what that imports does not.
        """
        trials, variant = self._trials, self._variants[name]
        own = {
            "program": str(trials.script or trials.module),
            "script's content": _digest(trials.script),
            "args": repr(list(variant.args)),
            "allocator": repr(variant.allocator),
            "phase": repr(variant.phase),
            "host_tuning": repr(variant.host_tuning),
            "ranks": str(trials.ranks),
            "directory": str(trials.directory),
            "python": trials.python or sys.executable,
        }
        return own | {f"env {name}": repr(value) for name, value in sorted(variant.env.items())}

    def folder(self, name: str, number: int) -> Path:
        """Return the folder of a variant's trial in a round."""
        return self.directory / slug(name) / f"round-{number:03d}"

    def ends(self) -> dict[tuple[int, str], TrialEnd]:
        """Return the trials that ended, by (round, variant), in the file's rounds and order."""
        ends = {}
        for number in range(self._trials.repeats):
            for name in self._trials.names:
                end = read_end(self.folder(name, number))
                if end is not None:
                    ends[number, name] = end
        return ends

    def forget(self, names: Iterable[str]) -> int:
        """Take back that variants' trials ended, so that they run again; return how many there were."""
        count = 0
        for number, name in list(self.ends()):
            if name in names:
                (self.folder(name, number) / "trial.json").unlink()
                count += 1
        return count

    def refuse_changes(self) -> None:
        """See that finished trials ran as the file says now.

        Raises:
            TrialsError: one did not, naming what differs and what can be done.
        """
        now = {name: self.settings(name) for name in self._variants}
        ends = self.ends()
        for (_, name), end in ends.items():
            settings = {**now[name], **end.settings}
            changed = [key for key in settings if end.settings.get(key) != now[name].get(key)]
            if changed:
                done = sum(variant == name for _, variant in ends)
                raise TrialsError(
                    f"variant {name!r} has changed since {done} of its trials ran ({', '.join(changed)}); "
                    f"expected what ran in {self.directory}: run these again with --redo {name!r}, all with "
                    f"--fresh, or give another directory with -o"
                )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep every other comparison out of the directory.

        Raises:
            TrialsError: another one is at work in it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise TrialsError(
                    f"{self.directory} is in use by another `memtriage compare`; expected one at a time: "
                    f"wait for it, or give another directory with -o"
                ) from None
            yield


def slug(name: str) -> str:
    """Return a folder's name for a variant: its own where that is safe, else one that no other gets."""
    safe = _UNSAFE.sub("-", name).strip("-.")[:_LONGEST]
    if safe and safe == name:
        return safe
    return f"{safe or 'variant'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _digest(script: Path | None) -> str:
    """Return a digest of a script; of a directory that is run, that of its `__main__.py`."""
    if script is None:
        return ""
    file = script / "__main__.py" if script.is_dir() else script
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGEST]
    except OSError as error:
        raise TrialsError(
            f"script {os.fspath(file)!r} cannot be read ({error.strerror}); expected a Python file: check it"
        ) from error
