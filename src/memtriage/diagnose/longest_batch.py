"""Predict whether a batch that is still to come will fit, from what shorter ones needed. Pure.

What a step needs grows with the batch: in proportion to its elements, or with the square of the length if
attention keeps its weights. A fit to the steps so far says how fast, and how accurate that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memtriage.model.findings import Finding, Projection
from memtriage.model.units import count, size
from memtriage.playbook.out_of_memory import ADVICE

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ForecastPolicy:
    """What a forecast needs, and how certain it is.

    Attributes:
        sizes: different batch sizes that a fit needs. In a random order few steps raise the peak: about 5 of
            100.
        for_curve: readings that a curve needs beyond its three: noise bends a curve through few.
        deviations: least width of the error bar, in standard errors.
        for_few: with this many degrees of freedom the error bar is twice as wide: an error from few readings
            is uncertain.
        beyond: part of the rise above the largest reading that is added to the error bar: the fit does not
            know of kernels that change with the length.
    """

    sizes: int = 4
    for_curve: int = 8
    deviations: float = 3.0
    for_few: float = 5.0
    beyond: float = 0.05


POLICY: Final = ForecastPolicy()


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of an epoch, in order.

    Attributes:
        items: number of items of each batch.
        longest: length of the longest item of each batch, to which the others are padded.
    """

    items: Integers
    longest: Integers

    def __len__(self) -> int:
        return len(self.items)

    @classmethod
    def of(cls, batch: BatchSize) -> Batches:
        """Return one batch."""
        return cls(np.array([batch.items]), np.array([batch.length]))

    def size(self, batch: int) -> BatchSize:
        """Return the size of one batch, by its number."""
        return BatchSize(int(self.items[batch]), int(self.longest[batch]))


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How large a batch is: its items, and the length to which they are padded."""

    items: int
    length: int

    @property
    def volume(self) -> int:
        """Elements, padding included."""
        return self.items * self.length

    def __str__(self) -> str:
        return f"{self.items:,} x {self.length:,}"


class DrawnBatches:
    """Batches in an order that is not known in advance, for an epoch in which each item comes once.

    Args:
        items: number of items of a batch.
        lengths: lengths of the items of the data set.
    """

    def __init__(self, items: int, lengths: Integers) -> None:
        self.items = items
        self.batches = -(-len(lengths) // items)
        self._lengths = frozenset(lengths.tolist())
        self.longest = BatchSize(items, int(lengths.max()))

    def of(self, elements: int) -> BatchSize | None:
        """Return the size of a batch with this many elements; None if no item has its padded length."""
        length, rest = divmod(elements, self.items)
        return None if rest or length not in self._lengths else BatchSize(self.items, length)


@dataclass(frozen=True, slots=True)
class Needed:
    """Bytes that the step of one batch had in use at one instant, in addition to those before it."""

    batch: BatchSize
    bytes: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A fit of bytes to sizes of batches.

    Attributes:
        seen: what it was fitted to.
        coefficients: of 1, the volume and, if there is a third, the volume times the length, each relative to
            the largest seen.
        inverse: inverse of the normal matrix, for the error of a prediction.
        deviation: standard deviation of one reading from the fit, multiplied by a factor that is larger for
            few readings.
    """

    seen: Sequence[Needed]
    coefficients: Floats
    inverse: Floats
    deviation: float

    def at(self, batches: Batches) -> tuple[Floats, Floats]:
        """Return the expected bytes of each batch, and their error."""
        terms = _terms(batches.items, batches.longest, self._scale(), len(self.coefficients))
        expected = terms @ self.coefficients
        spread = np.einsum("ij,jk,ik->i", terms, self.inverse, terms)
        highest = max(needed.bytes for needed in self.seen)
        beyond = POLICY.beyond * np.maximum(0.0, expected - highest)
        return expected, self.deviation * np.sqrt(1.0 + spread) + beyond

    @property
    def last_error(self) -> float:
        """The error of the last coefficient: unless it is smaller than that, the term explains nothing."""
        return float(self.deviation * np.sqrt(self.inverse[-1, -1]))

    def _scale(self) -> tuple[float, float]:
        return _scale(self.seen)


def forecast(seen: Sequence[Needed]) -> Forecast | None:
    """Fit what batches needed to their sizes; None if there are too few, or sizes do not explain it."""
    if len({needed.batch for needed in seen}) < POLICY.sizes:
        return None
    straight, curved = _fit(seen, 2), _fit(seen, 3) if len(seen) >= 3 + POLICY.for_curve else None
    if straight is None or straight.coefficients[-1] <= straight.last_error:
        return None
    return straight if curved is None or abs(curved.coefficients[-1]) <= curved.last_error else curved


def _fit(seen: Sequence[Needed], degree: int) -> Forecast | None:
    items = np.array([needed.batch.items for needed in seen])
    longest = np.array([needed.batch.length for needed in seen])
    values = np.array([needed.bytes for needed in seen], dtype=float)
    terms = _terms(items, longest, _scale(seen), degree)
    sums = terms.T @ terms
    if np.linalg.matrix_rank(sums) < degree:
        return None
    freedom = len(seen) - degree
    inverse: Floats = np.linalg.inv(sums)
    coefficients: Floats = inverse @ terms.T @ values
    left = values - terms @ coefficients
    deviation = np.sqrt(left @ left / freedom)
    factor = POLICY.deviations * (1.0 + POLICY.for_few / freedom)
    return Forecast(seen, coefficients, inverse, factor * float(deviation))


def _terms(items: Integers, longest: Integers, scale: tuple[float, float], degree: int) -> Floats:
    volume = items * (longest / scale[0])
    terms = np.stack([np.ones(len(items)), volume, volume * longest / scale[1]], axis=1)
    return terms[:, :degree]


def _scale(seen: Sequence[Needed]) -> tuple[float, float]:
    """The largest volume and length, at least 1, to give the terms of a fit the same magnitude."""
    volume = max(needed.batch.volume for needed in seen)
    return float(max(1, volume)), float(max(1, *(needed.batch.length for needed in seen)))


@dataclass(frozen=True, slots=True)
class Ahead:
    """A batch that will not fit.

    Attributes:
        batch: its number in the epoch.
        expected, error: bytes that its step needs.
        seen: the readings that the forecast was fitted to.
    """

    batch: int
    expected: int
    error: int
    seen: Sequence[Needed]


def first_too_large(fits: Sequence[Forecast], batches: Batches, since: int, limit: int) -> Ahead | None:
    """Return the first batch that will not fit, even if its forecast is too high by its error.

    Args:
        fits: forecasts for different instants of a step on the same device; one that exceeds is enough.
        batches: those of the epoch.
        since: number of the first one that is still to come.
        limit: bytes of the device.
    """
    coming = Batches(batches.items[since:], batches.longest[since:])
    if not len(coming):
        return None
    found: Ahead | None = None
    for fit in fits:
        expected, error = fit.at(coming)
        places = np.flatnonzero(expected - error > limit)
        if len(places) and (found is None or since + places[0] < found.batch):
            first = int(places[0])
            found = Ahead(since + first, int(expected[first]), int(error[first]), fit.seen)
    return found


def too_large_finding(ahead: Ahead, batches: Batches, before: int, full: Projection) -> Finding:
    """Make the finding of a batch that will not fit.

    Args:
        ahead: the batch.
        batches: those of its epoch.
        before: bytes in use between steps.
        full: the device, its limit, and the step of the batch if known.
    """
    batch, longest = batches.size(ahead.batch), int(batches.longest.max())
    if full.step is None:
        where, which = "the longest batch", "it may come at any step: the sampler draws the order as it goes"
    else:
        where, which = f"the batch of step {full.step:,}", "the longest of this epoch"
        if batch.length != longest:
            which = f"the first too long; the longest of this epoch has {longest:,}"
    smallest, largest = (pick(ahead.seen, key=lambda needed: needed.batch.volume) for pick in (min, max))
    advice = ADVICE["longest batch"]
    return Finding(
        kind="out_of_memory",
        device=full.device,
        bytes=before + ahead.expected,
        certainty="suspected",
        mechanism=f"{where} will not fit: {batch} elements, padding included ({which}); activations grow "
        "with the batch",
        fix=advice.fix,
        playbook=advice.entry,
        projection=full,
        evidence=[
            f"{where} needs {size(before + ahead.expected)} ± {size(ahead.error)}, of which "
            f"{size(before)} are in use between steps; {full.device} has {size(full.limit)}",
            f"fitted to {count(len(ahead.seen), 'step')}, from {size(smallest.bytes)} with {smallest.batch} "
            f"to {size(largest.bytes)} with {largest.batch}",
            "lengths are those of the data set: this is wrong if the collator shortens items",
        ],
    )
