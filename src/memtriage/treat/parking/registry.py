"""The parked storages of this process, for all parts of parking.

A storage can only be parked once, whoever parks it, so this is state of the process, like the storages.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.treat.parking.arena import Home, HostArena
from memtriage.treat.parking.choose import Chosen, inner_tensors

LOCK: Final = threading.RLock()
"""Held while storages are moved."""
PARKED: Final[dict[int, ParkedStorage]] = {}
"""By the address of the `StorageImpl`, which an entry keeps alive."""


@dataclass(slots=True, eq=False)
class ParkedStorage:
    """A parked storage. Its values are in `home` until they are back on the device.

    Attributes:
        serial: a unique number in this process.
        storage: of size 0 on its device meanwhile.
        device: where it was.
        stream: handle of the stream of its memory.
        nbytes: its size.
        title: owner and name, for messages.
        owner: what it is: `parameter`, `optimizer state`, ...
        home: where its values are.
        arena: the arena of `home`.
        tensors: the guarded objects.
        arriving: it has device memory again, but not yet all of its values.
    """

    serial: int
    storage: torch.UntypedStorage
    device: torch.device
    stream: int
    nbytes: int
    title: str
    owner: str
    home: Home
    arena: HostArena
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    arriving: bool = False

    @property
    def key(self) -> int:
        """Its key in `PARKED`."""
        return int(self.storage._cdata)

    @property
    def wanted(self) -> bool:
        """Whether anything but this entry still has the storage; True if torch cannot say.

        Tensors have it in C++; programs that keep the storage itself have the same Python object.
        """
        count = getattr(torch._C, "_storage_Use_Count", None)
        return count is None or int(count(self.storage._cdata)) > 1 or _references(self) > _ALONE


def _references(holder: Any) -> int:
    return sys.getrefcount(holder.storage)


_ALONE: Final = _references(SimpleNamespace(storage=object()))
"""The count of an object without other references; it differs between versions of Python."""
_SERIALS: Final = itertools.count()


def entry_for(chosen: Chosen, home: Home, arena: HostArena) -> ParkedStorage:
    """Make an entry that is not yet in `PARKED`."""
    storage = chosen.storage
    return ParkedStorage(
        serial=next(_SERIALS),
        storage=storage,
        device=storage.device,
        stream=chosen.stream,
        nbytes=storage.nbytes(),
        title=chosen.title,
        owner=chosen.owner,
        home=home,
        arena=arena,
    )


def entry_of(tensor: Tensor) -> ParkedStorage | None:
    """The entry of a tensor's storage, or of the first parked one inside a wrapper; None if there is none."""
    if not PARKED:
        return None
    for part in inner_tensors(tensor):
        try:
            with torch._C.DisableTorchFunctionSubclass():
                entry = PARKED.get(part.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # sparse: it has no storage of its own
            continue
        if entry is not None:
            return entry
    return None


def title_of(tensor: Tensor) -> str | None:
    """The title of a parked tensor; None if it is not parked."""
    entry = entry_of(tensor)
    return None if entry is None else entry.title


def parked_bytes(entries: Iterable[ParkedStorage] | None = None) -> int:
    """Bytes of some entries, or of all."""
    return sum(entry.nbytes for entry in (PARKED.values() if entries is None else entries))
