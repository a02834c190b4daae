"""Whose code a file is, by its path alone: the file need not be on this machine."""

from __future__ import annotations

import re
from typing import Final, Literal

CodeOwner = Literal["user", "library", "internal"]
"""Whose code a file is. `internal` is torch, memtriage, generated code and C++."""

_INSTALLED: Final = re.compile(r"(^|/)(site-packages|dist-packages|lib(64)?/python3\.\d+t?)/")
_TORCH: Final = re.compile(
    r"(^|/)(site-packages|dist-packages|pytorch)/torch/"  # installed, or in a clone of its repository
    r"|(^|/)torchinductor_[^/]*/"  # what torch.compile writes
)
# Typed in, passed with -c, or in a notebook; every other <...> is generated.
_TYPED: Final = re.compile(r"<(stdin|string|ipython-input|python-input)")


def is_installed(path: str) -> bool:
    """Whether a path is inside the standard library or an installed package, of any environment."""
    return _INSTALLED.search(path) is not None


def is_python(path: str) -> bool:
    """Whether a recorded frame's file is Python's: C++ frames name a source file, `??`, or nothing."""
    return path.endswith(".py") or path.startswith("<")


def is_torch(path: str) -> bool:
    """Whether a path is inside torch, or in the folder of the code that `torch.compile` writes."""
    return _TORCH.search(path) is not None


def code_owner(
    path: str, script_root: str | None = None, internal_folders: tuple[str, ...] = ()
) -> CodeOwner:
    """Return whose code a file of a call stack is.

    Args:
        path: the file as a code object or a recorded frame names it.
        script_root: folder of the user's script. Files below it are the user's even where the folder is an
            installed package.
        internal_folders: folders of torch and memtriage, where these are known.
    """
    if path.startswith("<"):
        return "user" if _TYPED.match(path) else "internal"
    if not path.endswith(".py"):
        return "internal"  # a C++ frame, or none at all
    if is_torch(path) or any(path_below(path, folder) for folder in internal_folders):
        return "internal"
    # A virtual environment inside the script's folder is still a library.
    relative = path_below(path, script_root)
    return "library" if is_installed(path if relative is None else relative) else "user"


def path_below(path: str, folder: str | None) -> str | None:
    """Return the path relative to a folder; None if it is not below the folder, or the folder is unknown."""
    if not folder:
        return None
    prefix = folder.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else None
