"""What parking and bringing back report. Sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Refusal:
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
    """What one call of `park` moved. As a context manager it brings back, at the end, what is still parked of
    it.

    Attributes:
        serials: numbers of the entries, for `unpark`.
        nbytes: bytes of all storages.
        storages: how many.
        owners: bytes by owner.
        refused: what was asked for and could not be parked.
        seconds: time of the whole call.
        host_seconds: the part of it that went into finding, or making, host memory: nearly none once a cycle
            before it has left enough.
        copy_seconds: the part in which bytes were copied, whatever else the host did then.
    """

    serials: frozenset[int]
    nbytes: int
    storages: int
    owners: dict[str, int]
    refused: tuple[Refusal, ...]
    seconds: float
    host_seconds: float
    copy_seconds: float

    def unpark(self) -> Moved:
        """Bring back what is still parked of it.

        Raises:
            ParkError: nothing of it is parked any more.
        """
        from memtriage.treat.park.api import unpark

        return unpark(self)

    def __enter__(self) -> Parked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from memtriage.treat.park.api import is_parked

        if is_parked(self):
            self.unpark()
