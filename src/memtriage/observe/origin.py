"""Whose code a file is in this process. `model/code_origin.py` judges by the path alone."""

from __future__ import annotations

import sys
import sysconfig
from functools import lru_cache

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


@lru_cache(maxsize=1 << 12)
def _real_folder(name: str) -> str:
    """Return an absolute folder with links resolved, cached: thousands of files are in a few hundred."""
    return os.path.realpath(name)


@lru_cache(maxsize=1 << 15)
def _is_below(name: str, folders: tuple[str, ...]) -> bool:
    """Whether a file is in one of these folders, or installed elsewhere, links resolved."""
    if os.path.islink(name) or not os.path.isabs(name):
        path = os.path.realpath(name)
    else:
        path = os.path.join(_real_folder(os.path.dirname(name)), os.path.basename(name))
    return path.startswith(folders) or is_installed(path)


class CodeOrigin:
    """Separates the user's files from libraries', by the folders of this interpreter.

    Results are cached: for absolute paths as long as the process runs, for others as long as the object
    lives.
    """

    def __init__(self) -> None:
        self._own = package_folder()
        self._folders = (*_library_folders(), self._own)
        self._known: dict[str, bool] = {}

    def is_user_file(self, name: str | None) -> bool:
        """True for a real file outside the standard library, site-packages, torch's folder and memtriage."""
        if not name or name.startswith("<"):
            return False
        known = self._known.get(name)
        if known is None:
            # A relative path may mean different files in different working directories.
            is_below = _is_below if os.path.isabs(name) else _is_below.__wrapped__
            known = self._known[name] = not is_below(name, self._folders)
        return known

    def is_own_file(self, name: str) -> bool:
        """True for memtriage's own files."""
        return name.startswith(self._own)
