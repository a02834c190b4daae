"""Keep the watch's and the program's modules of the same name apart.

The watch shares `sys.modules` and `sys.path` with the program. If the script's folder has a `rich.py`, the
program must import that file, although the watch may have imported the library before, and the watch must
not import it later.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

from memtriage.observe.origin import package_folder
from memtriage.process import active
from memtriage.process.stdlib import os


class OwnModules:
    """Gives the program and the working watch each its own modules of the same names.

    Costs nothing if the folder has no module of a library's name. A thread of the program that imports while
    the watch is working may get the watch's module; the watch's own threads import nothing.

    Args:
        folder: where the program's imports are looked up first.
    """

    def __init__(self, folder: str) -> None:
        offered = {module.name for module in pkgutil.iter_modules([folder])}
        self._folder = folder
        if os.path.realpath(folder) == os.path.dirname(os.path.realpath(package_folder())):
            offered.discard("memtriage")  # there is only one
        self._names = {name for name in offered if name != "__main__" and _may_be_meant(name)}
        self._others: dict[str, ModuleType] = {}
        self._path: list[str] = []

    def begin_program(self) -> None:
        """Put away what the watch has imported. Called before the program runs."""
        if self._names:
            self._swap()

    def begin_work(self) -> None:
        """Bring the watch's modules back for its work in the program's main thread."""
        if self._names:
            self._swap()
            self._path, sys.path[:] = list(sys.path), [each for each in sys.path if each != self._folder]

    def end_work(self) -> None:
        """Bring the program's modules back."""
        if self._names:
            sys.path[:] = self._path
            self._swap()

    def _swap(self) -> None:
        here = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in self._names}
        for name in here:
            del sys.modules[name]
        sys.modules.update(self._others)
        self._others = here


def _may_be_meant(name: str) -> bool:
    """Whether the watch may import, or has imported, another module of this name."""
    if name in active.loaded_before or name in sys.builtin_module_names:
        return False  # the interpreter's start imports it: the program gets that one without a watch, too
    loaded: Iterable[str] = sys.modules
    return name in sys.stdlib_module_names or name in _LIBRARIES or name in loaded


_LIBRARIES = frozenset(
    [
        "markdown_it",
        "mdurl",
        "msgspec",
        "numpy",
        "prometheus_client",
        "psutil",
        "pygments",
        "pynvml",
        "rich",
    ]
)
"""What the watch imports from outside the standard library, and what that imports."""
