"""Giving back what malloc keeps, and settings with which it keeps less."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from memtriage.observe.host import rss
from memtriage.observe.malloc import malloc_info, trim

MALLOC_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}
)
"""Environment of glibc's malloc with which freed tensors go back to the kernel.

By default the mmap threshold climbs to 32 MiB with the first large block that is freed, so later tensors
are on the heap, where one survivor keeps everything below it. Setting a threshold stops the climb; 64 KiB is
below the smallest tensor that matters. Figures and the price (page faults) are in docs/host-memory.md.
"""


class Trimmed(msgspec.Struct, frozen=True):
    """What a trim gave back. Sizes in bytes.

    Attributes:
        before, after: resident set before and after; None where the platform does not say.
        supported: False where the C library has no `malloc_trim` (musl, macOS) or malloc is another library's
            (jemalloc, tcmalloc): nothing was done then.
    """

    before: int | None
    after: int | None
    supported: bool

    @property
    def returned(self) -> int:
        """Bytes that went back to the kernel; 0 when unknown. Another thread's doing meanwhile counts too."""
        if self.before is None or self.after is None:
            return 0
        return max(self.before - self.after, 0)


def malloc_trim() -> Trimmed:
    """Give memory that was freed, and that the C library keeps, back to the system. Sizes in bytes.

    For the end of a phase: after loading a checkpoint, after evaluation. Freed tensors up to 32 MiB stay
    resident otherwise; `gc.collect()` does not change that. What is alive is not touched.

    Limits: does nothing (and says so: `supported`) where malloc is not glibc's.
    """
    before = rss()
    done = trim()
    return Trimmed(before, rss() if done else before, supported=done)


def tuned_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment with malloc's settings; what it sets already stays, and so does all the rest."""
    return {**MALLOC_SETTINGS, **environ}


def is_tuned(environ: Mapping[str, str]) -> bool:
    """Whether every setting has a value, this one's or the user's own."""
    return all(environ.get(name) for name in MALLOC_SETTINGS)


def restart_tuned() -> None:
    """Start this process again in its own place, with malloc's settings; return if there is nothing to gain.

    malloc reads its environment before the first line of Python. The process id, open files and the command
    line stay; what ran so far is lost, so call it first. Returns where the settings are there already (so a
    process restarts once), and where malloc is not glibc's.

    Raises:
        OSError: the interpreter could not be started again.
    """
    if is_tuned(os.environ) or malloc_info() is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned_environment(os.environ))


def malloc_settings() -> dict[str, str]:
    """Environment variables under which freed host memory goes back to the system, for a launcher to set.

    `memtriage run --host-tuning` starts a script with them. malloc reads them when a process begins: setting
    them in `os.environ` helps processes that are started later, not this one.

    Limits: glibc only. A model trained on the CPU gets slower: every temporary tensor is faulted in again.
    """
    return dict(MALLOC_SETTINGS)
