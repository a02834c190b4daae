"""Read the loaded modules without running their code.

Modules of special classes (lazy ones, `torch.ops`) may run code for `module.__name__`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from memtriage.observe.classes import module_of, variables_of
from memtriage.observe.origin import CodeOrigin
from memtriage.process.stdlib import os


def modules() -> list[ModuleType]:
    """Return all loaded modules; other objects that are in `sys.modules` are left out."""
    return [module for module in list(sys.modules.values()) if issubclass(type(module), ModuleType)]


def own_modules() -> list[tuple[str, ModuleType]]:
    """Return memtriage's modules, with their names in `sys.modules`."""
    loaded = list(sys.modules.items())
    return [(name, module) for name, module in loaded if name.partition(".")[0] == "memtriage"]


def module_variable(module: Any, name: str) -> str | None:
    """Return a module's `__name__` or `__file__`; None if it is not a text, or `module` is not a module."""
    value = variables_of(module).get(name) if issubclass(type(module), ModuleType) else None
    return value if type(value) is str else None


def is_user_module(module: ModuleType, origin: CodeOrigin) -> bool:
    """Whether a module is the user's, not a library's."""
    name = module_variable(module, "__name__") or ""
    if name == "__main__":
        return True
    package = sys.modules.get(name.partition(".")[0], module)  # torch.ops has a file of its own kind
    files = (module_variable(part, "__file__") for part in (module, package))
    return all(origin.is_user_file(file) for file in files)


def main_name(module: ModuleType) -> str:
    """Return what reports call `__main__`: its file without the suffix, or its package started with `-m`."""
    file = module_variable(module, "__file__")
    if not file:
        return "__main__"
    stem = os.path.splitext(os.path.basename(file))[0]
    return os.path.basename(os.path.dirname(os.path.abspath(file))) if stem == "__main__" else stem


def module_name_of(klass: type) -> str:
    """Return what reports call the module of a class."""
    name = module_of(klass)
    return main_name(sys.modules["__main__"]) if name == "__main__" else name
