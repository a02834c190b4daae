"""Sizes of steps that were not traced: exact where they are polynomials of the shape, else in between."""

from collections.abc import Callable

import pytest

from memtriage.prediction.many_steps.derive import derive
from memtriage.prediction.many_steps.shapes import Shape, input_of
from memtriage.prediction.many_steps.step_trace import StepTrace

Sizes = Callable[..., list[int]]


def shape(*numbers: int) -> Shape:
    return input_of(numbers).shape


def derived(sizes: Sizes, traced: list[tuple[int, ...]], wanted: tuple[int, ...]) -> list[int]:
    """What is derived for a shape of steps whose allocations have the sizes that a function gives."""
    steps = {shape(*numbers): StepTrace(sizes(*numbers)) for numbers in traced}
    return derive(steps, [shape(*wanted)])[shape(*wanted)].operations


@pytest.mark.parametrize(
    ("sizes", "traced", "wanted"),
    [
        pytest.param(lambda n: [7, 4 * n, n * n + 3], [(8,), (1000,), (64,), (200,)], (500,), id="squares"),
        pytest.param(lambda n: [n**3, n], [(2,), (10,), (30,), (50,), (90,)], (71,), id="cubes"),
        pytest.param(lambda n: [3 * n], [(5,), (9,), (70,)], (700,), id="beyond the largest"),
        pytest.param(
            lambda n, m: [n * m, 5 * n * n + m, 9],
            [(n, m) for n in (2, 3, 8) for m in (10, 64, 90)],
            (5, 33),
            id="two dimensions",
        ),
        pytest.param(
            lambda n, m, k: [n * k, 4],
            [(n, 7, n) for n in (3, 9, 20, 33)],
            (11, 7, 11),
            id="equal dimensions",
        ),
        pytest.param(lambda n: [11, 5], [(6,)], (8,), id="one shape"),
        pytest.param(lambda n: [2 * n - 19], [(12,), (20,), (64,)], (30,), id="lines"),
    ],
)
def test_polynomials_are_followed_exactly(
    sizes: Sizes, traced: list[tuple[int, ...]], wanted: tuple[int, ...]
) -> None:
    assert derived(sizes, traced, wanted) == sizes(*wanted)


WORKSPACES = {10: 512, 20: 1024, 100: 10240, 1000: 20}
"""Bytes that are chosen by the shape."""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (10, 512),
        (15, 768),
        (20, 1024),
        (60, 5632),
        (100, 10240),
        (550, 5130),
        (1000, 20),
        (5, 256),
        (2000, 1),
    ],
)
def test_other_sizes_are_in_between_the_nearest_traced_ones(wanted: int, expected: int) -> None:
    traced = [(n,) for n in reversed(WORKSPACES)]
    assert derived(lambda n: [WORKSPACES[n], 2 * n], traced, (wanted,)) == [expected, 2 * wanted]


def test_the_nearest_shape_of_the_same_form_lends_its_allocations() -> None:
    small, large = StepTrace([10, -1, 30]), StepTrace([100, 200, 300])
    steps = {shape(1): small, shape(2): StepTrace([20, -1, 60]), shape(9): large, shape(3, 3): StepTrace([1])}
    wanted = [shape(3), shape(6), shape(12), shape(4, 2)]
    found = derive(steps, wanted)
    assert [found[each].operations for each in wanted] == [
        *([30, -1, 90], [100, 200, 300], [100, 200, 300], [1])
    ]
