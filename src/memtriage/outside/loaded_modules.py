"""The modules that another process has loaded, and which of them are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

from memtriage.model.code_origin import is_installed
from memtriage.observe.origin import CodeOrigin
from memtriage.outside.interpreter import RemoteInterpreter
from memtriage.outside.objects import RemoteHeap, RemoteType
from memtriage.process.stdlib import os


class RemoteModules:
    """Modules of a process, by their addresses.

    Args:
        before: its modules at an earlier reading.

    Attributes:
        by_name: as in `sys.modules`.
        origin: whose code a file is.
    """

    def __init__(self, heap: RemoteHeap, before: RemoteModules | None = None) -> None:
        self._heap = heap
        self._before = before
        self.by_name: dict[str, int] = {}
        self.origin = CodeOrigin()
        self._users: dict[int, bool] = {}

    def roots(self, interpreter: RemoteInterpreter, fence: Callable[[int], None]) -> list[tuple[str, int]]:
        """Return (name, address) of the modules to begin with, the program's first.

        Args:
            interpreter: of the process.
            fence: called with addresses that no walk may enter from elsewhere.
        """
        roots: list[tuple[str, int]] = []
        for name, module in interpreter.modules():
            klass = self._heap.type_of(module)
            if klass is None or not self._heap.is_a(klass, ModuleType):
                continue
            self.by_name[name] = module
            before = self._before
            if before is not None and before.by_name.get(name) == module and module in before._users:
                self._users[module] = before._users[module]
            fence(module)
            fence(self.namespace(module))
            if name == "__main__":
                roots.insert(0, (self.main_name(module), module))
            elif name != "__mp_main__" and name.partition(".")[0] != "memtriage":
                roots.append((name, module))
        return roots

    def namespace(self, module: int) -> int:
        return self._heap.memory.word(module + self._heap.layout.module_dict)

    def _module_variable(self, module: int, name: str) -> str | None:
        """A module's `__name__` or `__file__`."""
        return self._heap.text(self._heap.dict_value(self.namespace(module), name))

    def main_name(self, module: int) -> str:
        file = self._module_variable(module, "__file__")
        if not file:
            return "__main__"
        stem = os.path.splitext(os.path.basename(file))[0]
        return os.path.basename(os.path.dirname(file)) or stem if stem == "__main__" else stem

    def is_user(self, module: int) -> bool:
        known = self._users.get(module)
        if known is None:
            known = self._users[module] = self._has_user_file(module)
        return known

    def files_of(self, classes: Iterable[RemoteType]) -> list[str]:
        """Return the program's own source files with some classes; all of them where there are none."""
        of_classes = (self.of_class(klass) for klass in classes)
        own = [module for module in of_classes if module is not None and self.is_user(module)]
        own = own or [module for module, is_user in self._users.items() if is_user]
        files = (self._module_variable(module, "__file__") for module in own)
        return list(dict.fromkeys(file for file in files if file))

    def _has_user_file(self, module: int) -> bool:
        name = self._module_variable(module, "__name__") or ""
        if name == "__main__":
            return True
        package = self.by_name.get(name.partition(".")[0], module)
        return all(self.is_user_file(self._module_variable(part, "__file__")) for part in (module, package))

    def is_user_file(self, file: str | None) -> bool:
        return file is not None and not is_installed(file) and self.origin.is_user_file(file)

    def of_class(self, klass: RemoteType) -> int | None:
        """Return the module of a class; None where it is not loaded."""
        return self.by_name.get(klass.module)

    def name_of_class(self, klass: RemoteType) -> str:
        """Return what reports call a class, with its module."""
        main = self.by_name.get("__main__")
        of_main = klass.module == "__main__" and main is not None
        module = self.main_name(main) if of_main and main is not None else klass.module
        return f"{module}.{klass.qualified_name}"
