"""Put the listener's hook into a Python environment, and remove it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

MODULE: Final = "_memtriage_listener"
_SOURCE: Final = Path(__file__).with_name("listener_hook.py")
"""Read, not imported: importing it arms the process that does."""
_START: Final = f'import sys; exec("try:\\n import {MODULE}\\nexcept Exception: pass")\n'
"""`site` runs lines that begin with `import`. This one never raises, even if the module is gone."""


def place() -> Path:
    """Return the folder of this environment's packages."""
    return Path(sysconfig.get_path("purelib"))


def files(folder: Path) -> tuple[Path, Path]:
    """Return the files of the hook: the module, then what makes Python import it."""
    return folder / f"{MODULE}.py", folder / f"{MODULE}.pth"


def install(folder: Path) -> list[Path]:
    """Write the hook; return its files.

    Raises:
        OSError: the folder cannot be written to. What was written is removed.
    """
    module, start = files(folder)
    try:
        module.write_text(_SOURCE.read_text())
        start.write_text(_START)
    except OSError:
        uninstall(folder)
        raise
    return [module, start]


def uninstall(folder: Path) -> list[Path]:
    """Remove the hook; return the files that were there. The one that starts it is removed first.

    Raises:
        OSError: one cannot be removed.
    """
    removed = []
    for file in reversed(files(folder)):
        if file.exists():
            file.unlink()
            removed.append(file)
    return removed
