"""The container of most Python objects is found and measured; tensors are no such objects."""

from __future__ import annotations

import sys

import pytest

from memtriage.account.census import Look
from memtriage.model.paths import in_words
from memtriage.observe.populations import largest_population

torch = pytest.importorskip("torch")
names: list[str] = []
table: dict[int, tuple[str, str]] = {}


def test_the_largest_container_of_objects() -> None:
    names.extend(f"a name that is long enough to matter {number}" for number in range(30_000))
    table.update((number, ("x" * 200, f"{number}")) for number in range(5_000))
    try:
        with Look() as view:
            population = largest_population(view.graph)
            assert population is not None
            position, entries, nbytes = population
            assert view.path(position)[-1].name == "names"
    finally:
        names.clear()
        table.clear()
    assert entries == 30_000
    each = sys.getsizeof("a name that is long enough to matter 12345")
    assert nbytes == pytest.approx(30_000 * each, rel=0.1)


def test_tensors_are_counted_as_their_headers() -> None:
    global kept
    kept = [torch.zeros(64) for _ in range(20_000)]
    try:
        with Look() as view:
            population = largest_population(view.graph)
            position = -1 if population is None else population[0]
            named = "" if population is None else in_words(view.path(position))
    finally:
        kept.clear()
    assert population is None or not named.endswith("kept") or population[2] < 20_000 * 200


def test_what_is_immortal_is_not_counted() -> None:
    """Reading it writes no reference count, so forked workers keep sharing it."""
    names.extend(sys.intern(f"a name that is {'long ' * 40} {number}") for number in range(60_000))
    try:
        if sys.getrefcount(names[0]) < 1 << 29:
            pytest.skip("interned strings are immortal in CPython 3.12 only")
        with Look() as view:
            population = largest_population(view.graph)
            named = "" if population is None else in_words(view.path(population[0]))
    finally:
        names.clear()
    assert not named.endswith("names")


kept: list[object] = []
