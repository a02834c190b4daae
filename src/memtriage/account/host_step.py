"""The host ledger before and after a call, subtracted: `memtriage.host_step`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType

from memtriage.account.census import take_census
from memtriage.account.host_ledger import TensorPlace
from memtriage.account.host_reading import HostReading, read_host
from memtriage.model.census import StorageRecord
from memtriage.model.host_step import HostDelta, HostStep
from memtriage.model.ledger import Ledger
from memtriage.model.paths import HolderPath
from memtriage.observe.host_peak import PeakMeter
from memtriage.observe.malloc import trim

RowKey = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class HostPicture:
    """The host at one instant: ledger, and each tensor's place. Plain data; nothing is held."""

    ledger: Ledger
    places: tuple[TensorPlace, ...]


class host_step(ContextDecorator):
    """Measure what a block, or each call of a function, does to this process's host memory.

        with memtriage.host_step("optimizer.step") as step:
            optimizer.step()
        print(step.result)

    As a decorator, `results` has one entry per call. A block that raises has a result, too.

    Before the block, a census is taken and malloc is trimmed, so that what the block needs shows as growth
    instead of filling free memory. Both take time (0.5 s and more): do not judge the block's speed here.

    Attributes:
        results: one per block so far, oldest first.

    Limits: what other threads allocate and free counts, too. If a tensor is freed and a new one of the same
    size gets its address, the old one seems to have stayed. Child processes are not included: see
    `ledger("job")`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.results: list[HostStep] = []
        self._open: list[tuple[HostPicture, PeakMeter]] = []

    @property
    def result(self) -> HostStep:
        """The result of the last block.

        Raises:
            RuntimeError: no block has ended yet.
        """
        if not self.results:
            raise RuntimeError(f"host_step({self.name!r}) has no result yet: its block has not ended")
        return self.results[-1]

    def __enter__(self) -> host_step:
        """Begin.

        Raises:
            OSError: this platform has no `/proc/self/smaps`.
        """
        before = _picture_before()
        meter = PeakMeter()
        meter.start()
        self._open.append((before, meter))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, meter = self._open.pop()
        peak = meter.stop()
        reading = _read()
        census = take_census()
        on_host = [record for record in census.storages if record.device == "cpu"]
        after = _picture(reading, on_host)
        result = subtract(before, after, self.name, peak, meter, census.parameters or None)
        self.results.append(result)


def subtract(
    before: HostPicture, after: HostPicture, name: str, peak: int, meter: PeakMeter, parameters: int | None
) -> HostStep:
    """Compute the result from two pictures and the peak in between."""
    rows_before, rows_after = _rows(before.ledger), _rows(after.ledger)
    changes = _tensor_changes(before.places, after.places)
    deltas = []
    for key in {**rows_before, **rows_after}:
        change = changes.get(key, _RowChange())
        nbytes = rows_after.get(key, 0) - rows_before.get(key, 0)
        if nbytes or change.new or change.first_touch or change.gone or change.moved:
            deltas.append(
                HostDelta(
                    row=key[0],
                    owner=key[1],
                    bytes=nbytes,
                    new=change.new,
                    first_touch=change.first_touch,
                    gone=change.gone,
                    moved=change.moved,
                    holder_path=change.path,
                )
            )
    retained = ("malloc retained", None)
    return HostStep(
        name=name,
        before=before.ledger.total,
        after=after.ledger.total,
        peak=max(peak, before.ledger.total, after.ledger.total),
        peak_source=meter.source,
        parameters=parameters,
        deltas=tuple(sorted(deltas, key=lambda delta: -abs(delta.bytes))),
        retained=rows_after.get(retained, 0) - rows_before.get(retained, 0),
    )


@dataclass(slots=True)
class _RowChange:
    """What happened to the tensors of one row."""

    new: int = 0
    first_touch: int = 0
    gone: int = 0
    moved: int = 0
    path: HolderPath | None = None
    largest: int = 0

    def came(self, nbytes: int, path: HolderPath | None) -> None:
        if nbytes > self.largest:
            self.largest, self.path = nbytes, path


def _tensor_changes(
    before: Sequence[TensorPlace], after: Sequence[TensorPlace]
) -> Mapping[RowKey, _RowChange]:
    changes: dict[RowKey, _RowChange] = defaultdict(_RowChange)
    earlier = {(place.address, place.nbytes): place for place in before}
    for place in after:
        change = changes[place.row, place.owner]
        known = earlier.pop((place.address, place.nbytes), None)
        more = place.resident - (0 if known is None else known.resident)
        change.came(more, place.path)
        if known is None:
            change.new += more
            continue
        change.first_touch += max(more, 0)
        if (known.row, known.owner) != (place.row, place.owner):
            change.moved += min(known.resident, place.resident)
            changes[known.row, known.owner].moved -= known.resident
    for place in earlier.values():
        changes[place.row, place.owner].gone += place.resident
    return changes


def _rows(ledger: Ledger) -> dict[RowKey, int]:
    return {(row.row, row.owner): row.bytes for row in ledger.rows}


def _picture_before() -> HostPicture:
    on_host = [record for record in take_census().storages if record.device == "cpu"]
    # Discard one look: the first loads numpy and grows buffers, which must not count as the block's doing.
    _picture(_read(), on_host)
    trim()
    return _picture(_read(), on_host)


def _picture(reading: HostReading, on_host: list[StorageRecord]) -> HostPicture:
    return HostPicture(reading.ledger(on_host), tuple(reading.places(on_host)))


def _read() -> HostReading:
    reading = read_host()
    if reading is None:
        raise OSError("host_step needs /proc/self/smaps, which this platform does not have")
    return reading
