"""Compile `adamw.cpp` once for this machine's processor, and keep it in the user's cache.

The library calls neither Python nor torch, so it only needs a compiler. (torch's extension loader also needs
ninja and torch's headers, and if a build is killed, later ones wait for its lock.)
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("adamw.cpp")
FLAGS: Final = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-ffp-contract=off",
    # Without these two, loops with sqrt and divisions are not vectorized; no result changes.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
    "-fPIC",
)
COMPILERS: Final = ("c++", "g++", "clang++")
TIME_LIMIT_S: Final = 120


class NotBuilt(RuntimeError):
    """There is no compiled kernel; the message says why."""


def built() -> Path:
    """The library, compiled now if it is not in the cache.

    Raises:
        NotBuilt: there is no compiler (`CXX`, or the first found of `COMPILERS`), it fails, or the cache
            cannot be used.
    """
    try:
        compiler = _compiler()
        folder = _cache()
        target = folder / f"adamw-{_key(compiler)}.so"
        if not target.exists():
            _compile(compiler, folder, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"the kernel could not be compiled: {_first_line(error)}") from error
    return target


def _compiler() -> list[str]:
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"none of {', '.join(COMPILERS)} is installed")
    return [compiler]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "memtriage"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Its files will be executed.
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PermissionError(f"others can write to {folder}")
    return folder


def _key(compiler: list[str]) -> str:
    """A key that differs if the library would differ, also by processor, because homes may be shared."""
    version = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, timeout=TIME_LIMIT_S
    ).stdout
    parts = (SOURCE.read_bytes(), version, repr((compiler, FLAGS)).encode(), _processor())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _processor() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    fields = (b"flags", b"Features", b"model name", b"CPU part")
    return platform.machine().encode() + b"".join(sorted({line for line in lines if line.startswith(fields)}))


def _compile(compiler: list[str], folder: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, library = Path(scratch, "adamw.o"), Path(scratch, "adamw.so")
        for arguments in (
            [*FLAGS, "-c", str(SOURCE), "-o", str(made)],
            ["-shared", "-pthread", str(made), "-o", str(library)],
        ):
            subprocess.run([*compiler, *arguments], check=True, capture_output=True, timeout=TIME_LIMIT_S)
        # Several ranks may do this at once: each replaces the whole file by an equal one.
        library.replace(target)


def _first_line(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the compiler ended with status {error.returncode}"
    return str(error)
