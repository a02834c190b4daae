"""An environment with only some of the installed distributions: a folder of links to them."""

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
    """Whether the distributions are installed, whatever they require."""
    try:
        return all(distribution(Requirement(requirement).name) for requirement in requirements)
    except PackageNotFoundError:
        return False


def with_dependencies(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The distributions of some requirements and of all that those require, by name.

    A distribution that is not installed is left out: the program that misses it will fail.
    """
    by_name: dict[str, Distribution] = {}
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
            by_name[name] = dist = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        for text in dist.requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted.extras)):
                waiting.append(needed)
    return by_name


def requirements_in(folder: Path) -> list[str]:
    """The requirements of the distributions in a folder, without their extras."""
    texts = [text for dist in distributions(path=[str(folder)]) for text in dist.requires or ()]
    requirements = map(Requirement, texts)
    return [
        str(needed)
        for needed in requirements
        if needed.marker is None or needed.marker.evaluate({"extra": ""})
    ]


def link(wanted: dict[str, Distribution], folder: Path) -> Path:
    """Fill a folder with links to the distributions' files.

    A package that several distributions share (`opentelemetry`) is linked file by file.
    """
    shared = Counter(top for dist in distributions() for top in {_parts(f)[0] for f in dist.files or ()})
    for dist in wanted.values():
        for file in dist.files or ():
            parts = _parts(file)
            if parts[0] in ("..", "__pycache__") or (
                len(parts) == 1 and not parts[0].endswith((".py", ".so"))
            ):
                continue
            kept = parts if shared[parts[0]] > 1 else parts[:1]
            target = folder.joinpath(*kept)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(Path(str(dist.locate_file("/".join(kept)))))
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
