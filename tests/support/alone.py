"""A folder of links to some of the installed distributions: an environment that has nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE: Final[list[str]] = PROJECT["dependencies"]
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]


def installed(requirements: Iterable[str]) -> bool:
    """Whether the distributions themselves are installed here."""
    try:
        return all(distribution(Requirement(requirement).name) for requirement in requirements)
    except PackageNotFoundError:
        return False


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions that requirements bring along, by name, with all that those need.

    One that is not installed here is left out: whoever misses it says so.
    """
    found: dict[str, Distribution] = {}
    done: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(requirement) for requirement in requirements]
    while waiting:
        wanted = waiting.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        key = name, frozenset(wanted.extras)
        if key in done:
            continue
        done.add(key)
        try:
            found[name] = here = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        for text in here.requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(needed)
    return found


def needed_in(folder: Path) -> list[str]:
    """The requirements of the distributions that were put into a folder of their own, extras left out."""
    found = [Requirement(text) for one in distributions(path=[str(folder)]) for text in one.requires or ()]
    return [str(one) for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def link(wanted: dict[str, Distribution], folder: Path) -> Path:
    """Make the folder, with links to the distributions' files.

    A package that several distributions share (`opentelemetry`) is linked file by file.
    """
    shared = Counter(top for one in distributions() for top in {_parts(f)[0] for f in one.files or ()})
    for one in wanted.values():
        for file in one.files or ():
            parts = _parts(file)
            if parts[0] in ("..", "__pycache__") or (
                len(parts) == 1 and not parts[0].endswith((".py", ".so"))
            ):
                continue
            kept = parts if shared[parts[0]] > 1 else parts[:1]
            target = folder.joinpath(*kept)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(one.locate_file("/".join(kept)))))
    return folder


def _parts(file: Any) -> tuple[str, ...]:
    return tuple(file.parts)


def run(code: str, folder: Path, cwd: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that sees memtriage, the folder and the standard library only.

    Args:
        code: the program.
        folder: of `link`.
        cwd: where it runs.
        more: other folders that it sees.
    """
    path = os.pathsep.join(map(str, (ROOT / "src", folder, *more)))
    left_out = ("PYTHON", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MEMTRIAGE", "COLUMNS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=cwd,
        env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=300,
    )
