"""Whose code a file is in this process. `model/code_origin.py` judges a path alone."""

from __future__ import annotations

import sys
import sysconfig

from memtriage.model.code_origin import is_installed
from memtriage.process.stdlib import os


def package_folder() -> str:
    """Folder of memtriage itself; its modules, frames and objects are never reported."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib") if key in paths}
    torch = sys.modules.get("torch")
    if getattr(torch, "__file__", None):
        assert torch is not None and torch.__file__ is not None
        folders.add(os.path.dirname(os.path.dirname(torch.__file__)))
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


class CodeOrigin:
    """Separates the user's files from libraries', by the folders of this interpreter. Answers are cached."""

    def __init__(self) -> None:
        self._libraries = _library_folders()
        self._own = package_folder()
        self._known: dict[str, bool] = {}

    def is_user_file(self, name: str | None) -> bool:
        """True for a real file outside the standard library, site-packages, torch's folder and memtriage."""
        if not name or name.startswith("<"):
            return False
        known = self._known.get(name)
        if known is None:
            path = os.path.realpath(name)
            known = not (path.startswith((*self._libraries, self._own)) or is_installed(path))
            self._known[name] = known
        return known

    def is_own_file(self, name: str) -> bool:
        """True for memtriage's own files."""
        return name.startswith(self._own)
