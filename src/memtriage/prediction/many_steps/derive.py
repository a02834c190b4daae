"""Steps of shapes that were not traced, from those that were.

The sizes of a step's tensors are polynomials of its dimensions, mostly of the second degree at most: `batch`,
`batch * length`, `batch * length ** 2`. So each allocation's size is fitted over the traced shapes, and where
the fit is not exact, interpolated between the two that are nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any, Final

import numpy as np

from memtriage.prediction.many_steps.shapes import Shape, varying
from memtriage.prediction.many_steps.step_trace import StepTrace

EXACT: Final = 0.25
"""Bytes by which a fit may miss a traced size and still count as exact: sizes are whole."""


def derive(traced: Mapping[Shape, StepTrace], wanted: Sequence[Shape]) -> dict[Shape, StepTrace]:
    """Steps of shapes of the forms that were traced.

    A derived step has the allocations of the traced one whose shape is nearest.
    """
    groups: dict[Any, list[Shape]] = {}
    for shape, step in traced.items():
        groups.setdefault((shape.form, step.structure()), []).append(shape)
    models = {key: _Sizes({shape: traced[shape] for shape in members}) for key, members in groups.items()}
    derived = {}
    for shape in wanted:
        nearest = min(
            (each for each in traced if each.form == shape.form),
            key=lambda each: abs(each.volume - shape.volume),
        )
        model = models[shape.form, traced[nearest].structure()]
        derived[shape] = traced[nearest].with_sizes(model.of(shape))
    return derived


class _Sizes:
    """The sizes of the allocations of steps with one structure, as a function of the shape."""

    def __init__(self, traced: Mapping[Shape, StepTrace]) -> None:
        self._shapes = sorted(traced, key=lambda shape: shape.volume)
        self._sizes = np.array([traced[shape].sizes() for shape in self._shapes], dtype=np.float64)
        self._dimensions = varying(self._shapes)
        self._powers: list[tuple[int, ...]] = [()]
        for degree in (1, 2, 3):
            powers = [*self._powers, *combinations_with_replacement(range(len(self._dimensions)), degree)]
            if len(powers) >= len(self._shapes) or not self._dimensions:
                break  # a fit is known to be exact only where there is a shape more than it has terms
            self._powers = powers
        numbers = self._numbers(self._shapes)
        self._scale = numbers.max(axis=0, initial=1.0)
        terms = self._terms(numbers)
        self._fit = np.linalg.lstsq(terms, self._sizes, rcond=None)[0]
        self._exact = np.abs(terms @ self._fit - self._sizes).max(axis=0) < EXACT

    def of(self, shape: Shape) -> list[int]:
        """The sizes for a shape, in bytes."""
        fitted = self._terms(self._numbers([shape]))[0] @ self._fit
        sizes = np.where(self._exact, fitted, self._between(shape.volume))
        return [max(int(size), 1) for size in np.rint(sizes)]

    def _numbers(self, shapes: Sequence[Shape]) -> Any:
        return np.array(
            [[shape.numbers[dimension] for dimension in self._dimensions] for shape in shapes],
            dtype=np.float64,
        ).reshape(len(shapes), len(self._dimensions))

    def _terms(self, numbers: Any) -> Any:
        scaled = numbers / self._scale
        return np.stack([scaled[:, list(power)].prod(axis=1) for power in self._powers], axis=1)

    def _between(self, volume: int) -> Any:
        """Between the two nearest shapes, in proportion."""
        volumes = np.array([shape.volume for shape in self._shapes], dtype=np.float64)
        after = int(np.clip(np.searchsorted(volumes, volume), 1, max(len(volumes) - 1, 1)))
        if len(volumes) == 1:
            return self._sizes[0]
        low, high = volumes[after - 1], volumes[after]
        share = (volume - low) / (high - low) if high > low else 1.0
        return self._sizes[after - 1] + share * (self._sizes[after] - self._sizes[after - 1])
