"""Return malloc's free memory to the system, and settings with which malloc keeps less."""

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
"""Environment variables with which glibc's malloc returns freed tensors to the kernel.

By default the mmap threshold grows up to 32 MiB as large blocks are freed. Later tensors are then on the
heap, where one survivor keeps everything below it. Setting a threshold stops its growth; 64 KiB is below the
smallest tensor that matters. Figures and the cost (page faults) are in docs/host-memory.md.
"""


class Trimmed(msgspec.Struct, frozen=True):
    """What a trim returned to the system. Sizes in bytes.

    Attributes:
        before, after: resident set before and after; None if the platform does not say.
        supported: False if the C library has no `malloc_trim` (musl, macOS) or malloc is another library's
            (jemalloc, tcmalloc): nothing was done then.
    """

    before: int | None
    after: int | None
    supported: bool

    @property
    def returned(self) -> int:
        """Bytes returned to the kernel; 0 if unknown. What other threads do meanwhile counts, too."""
        if self.before is None or self.after is None:
            return 0
        return max(self.before - self.after, 0)


def malloc_trim() -> Trimmed:
    """Return freed memory that the C library keeps to the system. Sizes in bytes.

    Call it at the end of a phase: after loading a checkpoint, after evaluation. Otherwise freed tensors up to
    32 MiB stay resident, even after `gc.collect()`. Live memory is not touched.

    Limits: does nothing if malloc is not glibc's; `supported` is False then.
    """
    before = rss()
    done = trim()
    return Trimmed(before, rss() if done else before, supported=done)


def tuned_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Add malloc's settings to an environment; variables that are set already keep their values."""
    return {**MALLOC_SETTINGS, **environ}


def is_tuned(environ: Mapping[str, str]) -> bool:
    """Whether every setting has a value, ours or the user's."""
    return all(environ.get(name) for name in MALLOC_SETTINGS)


def restart_tuned() -> None:
    """Restart this process with malloc's settings; return if there is nothing to gain.

    malloc reads its environment before the first line of Python. The process id, open files and the command
    line stay; what ran so far is lost, so call it first. Returns if the settings are there already (so a
    process restarts once), or if malloc is not glibc's.

    Raises:
        OSError: the interpreter could not be started again.
    """
    if is_tuned(os.environ) or malloc_info() is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], tuned_environment(os.environ))


def malloc_settings() -> dict[str, str]:
    """Environment variables, for a launcher to set, with which freed host memory returns to the system.

    `memtriage run --host-tuning` starts a script with them. malloc reads them when a process begins: setting
    them in `os.environ` affects child processes only, not this one.

    Limits: glibc only. A model trained on the CPU gets slower: every temporary tensor is faulted in again.
    """
    return dict(MALLOC_SETTINGS)
