"""Containers that grow between two walks, and what their entries weigh."""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from memtriage.observe.containers import (
    ContainerLengths,
    KnownLengths,
    alike,
    bound_of,
    containers_among,
    deep_size,
    grown_containers,
    known_bounds,
    most_grown,
)
from memtriage.observe.heap import HeapWalk
from memtriage.observe.heap_graph import HeapGraph
from memtriage.observe.kinds import KindTable

ENTRY = 20_000

SOURCE = """
import collections
import numpy as np

class Record:
    def __init__(self):
        self.text = bytes(20_000)

listed, mapped, keyed = [0], {"first": 0}, {0: bytes(20_000)}
recent = collections.deque([0])
counted = collections.defaultdict(list, a=[])
ordered = collections.OrderedDict(a=0)
several = {bytes(20_000)}
raw = bytearray(b"0")
arrays = [np.ones(1)]
records = [Record()]
steady, shrinking, replaced, empty = [0], [0, 1, 2], [0], []

def grow():
    global replaced
    for i in range(1, 5):
        listed.append(bytes(20_000))
        mapped[f"k{i}"] = bytes(20_000)
        recent.append(bytes(20_000))
        counted[i].append(bytes(20_000))
        ordered[i] = bytes(20_000)
        several.add(bytes([i]) * 20_000)
        arrays.append(np.ones(2_500)[:100])
        records.append(Record())
        empty.append(bytes(20_000))
    raw.extend(bytes(80_000))
    shrinking.pop()
    replaced = [bytes(20_000) for _ in range(5)]
"""


class _Batches:
    """As the iterator of a loader: only the loop that runs over it keeps it alive."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> int:
        size = len(self.kept)
        self.kept[size] = bytes(ENTRY)
        return size


def test_what_only_a_running_loop_leads_to_is_followed() -> None:
    lengths: list[ContainerLengths] = []
    for size in _Batches():
        with HeapWalk() as graph:
            found = grown_containers(graph, lengths[-1].by_address()) if lengths else []
            of_loop = [
                each for each in found if type(graph.objects[graph.parents[each.position]]) is _Batches
            ]
            sizes = [(each.more, each.entry_bytes // ENTRY) for each in of_loop]
            lengths.append(ContainerLengths(graph.objects))
        if size == 2:
            break
    assert sizes == [(1, 1)]


def test_growth_of_every_kind_of_container(program: Any) -> None:
    program.run(SOURCE)
    names = {id(value): name for name, value in vars(program.module).items()}
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    program["grow"]()
    with HeapWalk() as graph:
        growing = grown_containers(graph, before.by_address(), most=1000)
        grown = {names.get(id(graph.objects[each.position]), "?"): each for each in growing}
    more = {name: (each.more, each.kind) for name, each in grown.items() if name != "?"}
    assert more == {
        "listed": (4, "list"),
        "mapped": (4, "dict"),
        "recent": (4, "deque"),
        "counted": (4, "defaultdict"),
        "ordered": (4, "OrderedDict"),
        "several": (4, "set"),
        "raw": (80_000, "bytearray"),
        "arrays": (4, "list"),
        "records": (4, "list"),
    }
    assert list(grown.values()) == sorted(grown.values(), key=lambda each: -each.more * each.entry_bytes)
    for name in ("listed", "mapped", "recent", "counted", "ordered", "several", "arrays", "records"):
        assert ENTRY <= grown[name].entry_bytes < ENTRY + 2_000, name
        assert grown[name].native is None
    assert grown["raw"].entry_bytes == 1


def test_an_entry_takes_its_place_in_the_container() -> None:
    kept = [0]
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    kept.extend(range(10**6, 10**6 + 50_000))
    with HeapWalk() as graph:
        grown = grown_containers(graph, before.by_address(), most=1000)
        (entry,) = [each.entry_bytes for each in grown if graph.objects[each.position] is kept]
    assert sys.getsizeof(kept[-1]) + 8 <= entry <= 32 + 9  # a number, in units of 16 bytes, and a pointer


def test_what_entries_have_in_common_is_no_part_of_an_entry() -> None:
    class Answer:
        def __init__(self, service: object, text: bytes) -> None:
            self.service, self.text = service, text

    class Service:
        def __init__(self) -> None:
            self.answers: list[Answer] = []
            self.tables = [[number] for number in range(3_000)]

        def answer(self) -> None:
            self.answers.append(Answer(self, bytes(count(ENTRY))))

    service = Service()
    service.answer()
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    for _ in range(5):
        service.answer()
    with HeapWalk() as graph:
        grown = grown_containers(graph, before.by_address(), most=1000)
        sizes = [each.entry_bytes for each in grown if graph.objects[each.position] is service.answers]
    assert [ENTRY <= size < ENTRY + 2_000 for size in sizes] == [True], sizes


def test_what_was_there_before_and_did_not_grow_is_no_growth() -> None:
    kept = [1, 2, 3]
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
        assert before.by_address().of(id(kept)) == (3, id(kept[0]))
        grown = grown_containers(graph, before.by_address())
        assert not [each for each in grown if graph.objects[each.position] is kept]


def test_deep_size_counts_parts_once_and_not_what_others_share() -> None:
    kinds = KindTable()
    assert deep_size(kinds, "x" * count(5_000)) > 5_000
    assert deep_size(kinds, {"a": ["x" * count(5_000)], "b": ("y" * count(5_000),)}) > 10_000
    twice = ["x" * count(5_000)] * 2
    assert 5_000 < deep_size(kinds, twice) < 5_500
    shared = "x" * count(5_000)
    everybody = [[shared] for _ in range(10)]
    assert deep_size(kinds, everybody[0]) < 500


def count(number: int) -> int:
    """Keeps the compiler from making a constant, which the code would hold as well."""
    return number


def test_deep_size_counts_what_the_allocator_takes() -> None:
    """It deals out units of 16 bytes: a float has 24."""
    assert deep_size(KindTable(), float(count(1))) == 32
    number = 2.0 ** count(40)
    assert deep_size(KindTable(), (number,)) == 32 + sys.getsizeof((number,))


def test_deep_size_of_arrays_is_that_of_their_memory() -> None:
    base = np.ones(10_000)
    assert deep_size(KindTable(), base) == base.nbytes
    assert deep_size(KindTable(), base[:10]) == base.nbytes
    assert deep_size(KindTable(), [base[:10], base[10:]]) < base.nbytes + 200


def test_deep_size_leaves_out_what_is_accounted_for_elsewhere() -> None:
    def function() -> None: ...

    function.heavy = bytes(10_000)  # type: ignore[attr-defined]
    klass = type("Heavy", (), {"heavy": bytes(10_000)})
    for entry in (torch.ones(10_000), torch.nn.Linear(100, 100), function, klass, sys):
        assert deep_size(KindTable(), [entry]) < 500


def test_deep_size_ends_on_cycles_and_large_structures() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert deep_size(KindTable(), cycle) == 96 == sys.getsizeof(cycle) + 8
    assert deep_size(KindTable(), [[number] for number in range(100_000)]) < 100_000 * 100


class Strict:
    """Its length and entries are only for the program."""

    def __len__(self) -> int:
        raise AssertionError

    __iter__ = __bool__ = __getitem__ = items = __len__


def test_containers_of_derived_classes_are_followed_by_no_code_of_theirs() -> None:
    kinds = (list, dict, set, deque, OrderedDict, defaultdict)
    classes = [type("Own", (Strict, kind), {}) for kind in kinds]
    kept = [klass() for klass in classes]
    added: list[Any] = [list.append, None, set.add, deque.append, None, None]

    def grow(numbers: range) -> None:
        for number in numbers:
            for container, add in zip(kept, added, strict=True):
                dict.__setitem__(container, number, 0) if add is None else add(container, number)

    grow(range(3))
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    grow(range(3, 10))
    with HeapWalk() as graph:
        grown = grown_containers(graph, before.by_address(), most=1000)
        more = {id(graph.objects[each.position]): each.more for each in grown}
    assert [more.get(id(container)) for container in kept] == [7] * len(kept)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_longer_copy_continues_the_container_that_it_replaces(kind: Any) -> None:
    def made(count: int) -> Any:
        return kind((number, [number]) for number in range(count))

    first, other = made(100), made(100)
    longer = first | {-1: [0]} if kind is dict else first + kind([0])
    earlier = ContainerLengths([first, other])
    assert list(ContainerLengths([longer, other]).copies_of(earlier)) == [(id(longer), id(first))]
    both = ContainerLengths([longer, first, other])  # nothing was replaced
    assert list(both.copies_of(earlier)) == []
    assert list(ContainerLengths([made(200)]).copies_of(earlier)) == []  # of other entries


def test_containers_of_one_class_of_holders_are_alike() -> None:
    class Worker:
        def __init__(self) -> None:
            self.log, self.names = [0], {0: [0]}

    workers, others = [Worker() for _ in range(40)], [[0] for _ in range(9)]
    with HeapWalk() as graph:
        found, factor = alike(graph, graph.index[id(workers[0].log)])
        lists = {id(part) for worker in workers for part in (worker.log, worker.names[0])}
        assert {id(graph.objects[each]) for each in found} == lists and factor == 1
        some, factor = alike(graph, graph.index[id(workers[0].log)], most=20)
        assert len(some) <= 20 and len(some) * factor == pytest.approx(80, rel=0.8)
        assert set(some) < set(found)
    assert len(others) == 9


def test_an_entry_of_a_dict_is_its_key_and_its_value() -> None:
    kept = {number + 0.5: number + 0.25 for number in range(9)}
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    kept.update((number + 0.5, number + 0.25) for number in range(9, 10_000))
    with HeapWalk() as graph:
        grown = grown_containers(graph, before.by_address(), most=1000)
        (entry,) = [each.entry_bytes for each in grown if graph.objects[each.position] is kept]
    assert entry == 2 * 32 + sys.getsizeof(kept) // len(kept)  # two floats of 24 bytes, in units of 16


def test_lengths_of_every_kind_of_container() -> None:
    graph = HeapGraph()
    graph.objects += [
        [5],
        {5: 1},
        {5},
        deque([5]),
        OrderedDict({5: 1}),
        defaultdict(list, {5: []}),
        bytearray(1),
    ]
    graph.objects += [[], {}, set(), deque(), OrderedDict(), defaultdict(list), bytearray()]
    noted = ContainerLengths(graph.objects)
    lengths = noted.by_address()
    first, nameless, queue = id(5), -1, id(weakref.ref(graph.objects[3]))
    wanted = [first, first, nameless, queue, first, first, nameless]
    assert [lengths.of(id(each)) for each in graph.objects] == [(1, each) for each in wanted] + [None] * 7


def test_noting_lengths_returns_the_containers_that_have_entries() -> None:
    kept = [[1], {2: 3}, {4}, bytearray(b"5")]
    noted = ContainerLengths().add([*kept, [], {}, (6,), "7", object()])
    assert sorted(id(each) for of_base in noted.values() for each in of_base) == sorted(map(id, kept))


def test_a_queue_that_lost_its_first_entries_is_still_the_same() -> None:
    queue, later = deque(range(3)), deque(range(9))
    noted = ContainerLengths([queue])
    known = noted.by_address()
    queue.popleft()
    queue.extend(range(9))
    assert most_grown(containers_among([queue]), known) == [queue]
    at_its_address = KnownLengths({id(later): 3}, {id(later): known.firsts[id(queue)]})
    assert most_grown(containers_among([later]), at_its_address) == []


def test_those_that_got_most_entries_come_first() -> None:
    kept: list[list[int]] = [[0], [0], [0, 1], [0, 1]]
    earlier = ContainerLengths(kept).by_address()
    for container, more in zip(kept, (2, 5, 0, 1), strict=True):
        container += range(more)
    kept[3][0] = 1000  # another first entry: not the container that was there
    kept[3].insert(0, 10**9)
    assert most_grown(containers_among(kept), earlier) == [kept[1], kept[0]]
    assert most_grown(containers_among(kept), earlier, most=1) == [kept[1]]
    assert most_grown(containers_among([[1, 2]]), earlier) == []


def test_entries_of_native_types_are_known_also_as_a_part_of_an_entry(program: Any) -> None:
    program.run("import torch\nmapped, paired, plain = {0: 0}, [0], [0]")
    with HeapWalk() as graph:
        before = ContainerLengths(graph.objects)
    schemas = [torch._C.parse_schema(f"f{number}() -> int") for number in range(3)]
    program["mapped"].update(enumerate(schemas, 1))
    program["paired"].extend((schema, 1) for schema in schemas)
    program["plain"].extend(range(3))
    with HeapWalk() as graph:
        growing = grown_containers(graph, before.by_address(), most=1000)
        native = {id(graph.objects[each.position]): each.native for each in growing}
    of = {name: native[id(program[name])] for name in ("mapped", "paired", "plain")}
    assert of == {"mapped": "FunctionSchema", "paired": "FunctionSchema", "plain": None}


def test_containers_with_a_bound_of_their_own_say_it() -> None:
    class Lying(list[int]):
        def __len__(self) -> int:
            raise AssertionError

    assert bound_of(deque([1, 2], maxlen=3), {}) == (3, 2)
    assert bound_of(deque([1, 2]), {}) == (None, 2)
    for size in (5, None):
        cached = lru_cache(maxsize=size)(abs)
        cached(-1)
        assert bound_of(cached, {}) == (size, 1)
    assert bound_of(Lying([1, 2]), {}) == (None, 2)


def test_caches_of_the_standard_library_and_of_torch_are_bounded() -> None:
    known = known_bounds([])
    re.compile("bounded caches are known")
    assert bound_of(re._cache, known) == (re._MAXCACHE, len(re._cache))  # type: ignore[attr-defined]
    assert bound_of(linecache.cache, known)[0] is not None
    assert bound_of({}, known) == (None, 0)
    assert bound_of(object(), known) == (None, None)


def test_a_container_beyond_its_bound_has_none() -> None:
    seen = list(range(5))
    assert bound_of(seen, {id(seen): 5}) == (5, 5)
    assert bound_of(seen, {id(seen): 4}) == (None, 5)


def test_the_history_of_lbfgs_is_bounded() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], history_size=7, max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    (state,) = optimizer.state.values()
    known = known_bounds([optimizer])
    assert {bound_of(state[name], known)[0] for name in ("old_dirs", "old_stps")} == {7}


def test_a_bounded_cache_is_no_growing_container() -> None:
    with HeapWalk() as graph:
        cached: dict[Any, Any] = re._cache  # type: ignore[attr-defined]
        newest = cached.popitem()
        before = ContainerLengths(graph.objects)
        cached.update([newest])
        growing = grown_containers(graph, before.by_address(), most=1000)
        assert all(graph.objects[container.position] is not re._cache for container in growing)  # type: ignore[attr-defined]
