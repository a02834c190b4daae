"""The parked storages of this process, for all parts of parking.

A storage can only be parked once, whoever parks it, so this is state of the process, like the storages.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from memtriage.treat.parking.arena import Home, HostArena
from memtriage.treat.parking.choose import Chosen, inner_tensors, storage_of

LOCK: Final = threading.RLock()
"""Held while storages are moved."""
PARKED: Final[dict[int, ParkedStorage]] = {}
"""By the address of the `StorageImpl`, which an entry keeps alive."""


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

    def __init__(self, chosen: Chosen, home: Home, arena: HostArena) -> None:
        """Not yet in `PARKED`; `chosen` is not kept, because it keeps tensors alive."""
        self.serial = next(_SERIALS)
        self.storage = chosen.storage
        self.device: torch.device = chosen.storage.device
        self.stream = chosen.stream
        self.nbytes: int = chosen.storage.nbytes()
        self.title, self.owner = chosen.title, chosen.owner
        self.home, self.arena = home, arena
        self.tensors: list[weakref.ref[Tensor]] = []
        self.arriving = False

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


def title_of(tensor: Tensor) -> str | None:
    """The title of a parked tensor, or of the first parked one inside a wrapper; None if none is parked."""
    for part in inner_tensors(tensor) if PARKED else ():
        storage = storage_of(part)
        entry = None if storage is None else PARKED.get(storage._cdata)
        if entry is not None:
            return entry.title
    return None


def parked_bytes(entries: Iterable[ParkedStorage] | None = None) -> int:
    """Bytes of some entries, or of all."""
    return sum(entry.nbytes for entry in (PARKED.values() if entries is None else entries))
