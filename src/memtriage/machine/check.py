"""All checks of a machine, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from memtriage.machine.capabilities import capabilities
from memtriage.machine.limits import limits
from memtriage.machine.settings import huge_pages, settings
from memtriage.machine.versions import devices, versions
from memtriage.model.machine import Fact
from memtriage.observe.host import release_of, text_of


def check_machine(env: Mapping[str, str]) -> Iterator[Fact]:
    """Check this machine. Works without a GPU and without torch; never makes a CUDA context.

    Args:
        env: environment variables.
    """
    torch, why_not = _torch()
    yield from versions(torch, why_not)
    yield from devices(torch)
    yield from limits()
    yield from settings(env, None if torch is None else release_of(torch.__version__))
    yield huge_pages(text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled")))
    if torch is not None:
        yield from capabilities(torch)


def _torch() -> tuple[ModuleType | None, str]:
    """Return torch, or None and why it cannot be imported."""
    try:
        import torch
    except ImportError as error:
        return None, str(error)
    except OSError as error:  # a shared library of torch that cannot be loaded
        return None, f"{type(error).__name__}: {error}"
    return torch, ""
