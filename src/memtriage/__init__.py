"""memtriage: where every byte of GPU and host memory is in a PyTorch training run, and who holds it.

    memtriage run train.py

watches an unchanged training script. The functions here are for use inside a program. While no watch is on,
`mark()` and `step()` do nothing and cost nothing.

Names are imported when they are first used: `import memtriage` loads neither torch nor any report.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import memtriage.process.active  # noqa: F401  it notes which modules were loaded before memtriage
from memtriage.model.version import __version__ as __version__

with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as _stub:
    _HOMES: Final = {line.split()[3]: line.split()[1] for line in _stub if line.startswith("from ")}
"""The module that defines each public name."""

__all__ = sorted(name for name in _HOMES if not name.endswith("_ipython_extension"))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{__name__}.{name} needs torch, and there is none in this environment; expected 2.8 or newer: "
            f"install torch for {sys.executable}",
            name="torch",
        ) from None
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
