"""What parking and bringing back report and raise. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


class ParkError(RuntimeError):
    """Something cannot be parked or brought back; nothing was moved. The text says what and why."""


class ParkedError(ParkError):
    """A parked tensor was used: its values are on the host, its device memory is freed."""


class ParkRefused(RuntimeWarning):
    """Some of the chosen storages cannot be parked and stay where they are."""


@dataclass(frozen=True, slots=True)
class NotParked:
    """A storage that was asked for and stays where it is.

    Attributes:
        name: owner and name.
        nbytes: its size.
        reason: why it cannot be parked.
    """

    name: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """What came back.

    Attributes:
        nbytes: bytes of all storages.
        storages: how many.
        owners: bytes by owner.
        seconds: time taken.
    """

    nbytes: int
    storages: int
    owners: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Parked:
    """What one call of `park` moved. As a context manager, it brings back what is still parked at the end.

    Attributes:
        serials: numbers of the entries, for `unpark`.
        nbytes: bytes of all storages.
        storages: how many.
        owners: bytes by owner.
        refused: what was asked for and could not be parked.
        seconds: time of the whole call.
        host_seconds: the part spent on getting host memory: nearly none if an earlier cycle left enough.
        copy_seconds: the part in which bytes were copied, whatever else the host did then.
        bring_back: brings entries back by number; None if none of them is parked.
    """

    serials: frozenset[int]
    nbytes: int
    storages: int
    owners: dict[str, int]
    refused: tuple[NotParked, ...]
    seconds: float
    host_seconds: float
    copy_seconds: float
    bring_back: Callable[[frozenset[int]], Moved | None] = field(repr=False, compare=False)

    def unpark(self) -> Moved:
        """Bring back the part that is still parked.

        Raises:
            ParkError: none of it is parked any more.
        """
        moved = self.bring_back(self.serials)
        if moved is None:
            raise ParkError("nothing of what was given is parked (brought back already?)")
        return moved

    def __enter__(self) -> Parked:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bring_back(self.serials)
