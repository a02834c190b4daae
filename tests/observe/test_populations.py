"""The container of most Python objects is found and measured; tensors are no such objects."""

from __future__ import annotations

import sys

import pytest

from memtriage.account.census import Look
from memtriage.model.paths import in_words
from memtriage.observe.heap_graph import HeapGraph
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


def population(
    *objects: object, own: int | None = None, unrooted: int | None = None
) -> tuple[int, int] | None:
    """Place and entries of the largest among objects, of which the last are the watch's own, or unrooted."""
    graph = HeapGraph()
    graph.objects += objects
    graph.first_garbage = len(objects)
    graph.first_unrooted = len(objects) if unrooted is None else unrooted
    graph.first_own = graph.first_unrooted if own is None else own
    found = largest_population(graph)
    return None if found is None else found[:2]


def texts(count: int, length: int = 100) -> list[str]:
    return [f"{number:>{length}}" for number in range(count)]


def test_small_containers_are_no_population() -> None:
    assert population(texts(19_999)) is None
    assert population(texts(20_000)) == (0, 20_000)


def test_every_kind_of_container_is_measured_and_most_bytes_win() -> None:
    small, large = texts(20_000), texts(20_000, length=300)
    for of in (list, tuple, set, dict.fromkeys):
        assert population(small, of(large)) == (1, 20_000)
        assert population(of(large), small) == (0, 20_000)
    assert population(texts(30_000), small) == (0, 30_000)


def test_what_the_watch_has_is_left_out_and_what_only_a_stack_has_is_not() -> None:
    mine, others = texts(20_000), texts(20_000, length=300)
    assert population(mine, others, own=1) == (0, 20_000)
    assert population(mine, others, own=1, unrooted=1) == (1, 20_000)
