"""Whether this process uses the compiled kernel: built, loaded, and proven, once."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from memtriage.treat.offload.native.build import NotBuilt, built
from memtriage.treat.offload.native.library import Crew, Library
from memtriage.treat.offload.native.proof import difference

_log = logging.getLogger(__name__)

Kernel = Literal["auto", "compiled", "torch"]


class NotProven(RuntimeError):
    """The compiled kernel does not give torch's bits here; the message says where."""


def proven() -> Library:
    """The compiled kernel.

    Raises:
        NotBuilt, NotProven: why there is none.
    """
    try:
        library = Library(built())
    except OSError as error:
        raise NotBuilt(f"the compiled kernel cannot be loaded: {error}") from error
    threads = torch.get_num_threads()
    # With all threads on tensors so small, most of the time would go by in waiting for other processes.
    torch.set_num_threads(1)
    crew = Crew(library, 1)
    try:
        where = difference(crew.job)
    finally:
        crew.close()
        torch.set_num_threads(threads)
    if where is not None:
        raise NotProven(f"the compiled kernel's bits are not those of this torch: {where}")
    return library


def library_for(kernel: Kernel) -> Library | None:
    """The compiled kernel if it is to be used, for `OffloadedAdamW(kernel=...)`.

    Raises:
        NotBuilt, NotProven: when it has to be used and there is none.
    """
    if kernel == "torch":
        return None
    return proven() if kernel == "compiled" else available()


@functools.cache
def available() -> Library | None:
    """The compiled kernel, or None, which the log explains once: torch's kernels then do the same."""
    try:
        return proven()
    except (NotBuilt, NotProven) as error:
        _log.warning("OffloadedAdamW uses torch's own kernels, which are slower: %s", error)
        return None
