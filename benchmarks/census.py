"""What a census costs: a million Python objects and 100,000 autograd nodes, against the usual ways to look.

    python benchmarks/census.py [--objects N] [--nodes N] [--rounds N] [--json FILE]

All run in turns over the same heap, in this one process. A fifth of the nodes keeps a tensor that nothing but
the graph holds, as activations do; "found" says how much of that each way gets to see.

gc.get_objects      the floor: Python's list of its objects, looked at by nobody
gc and is_tensor    the snippet that everybody pastes: every tensor that `gc` knows
gc.get_referrers    one step up from one tensor; a path takes one such call for each of its hops
objgraph, pympler   where they are installed: a count of objects by type, and all objects reachable
take_census         who holds each storage, by path (`memtriage.account.census.take_census()`)
closer look         the same, then what the largest holder alone keeps alive (dominators, other holders)
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from memtriage.account.census import Look, take_census

CHAIN: Final = 1000
"""Nodes in one graph: a few hundred to some thousands is what a training step builds."""

KEPT_EVERY: Final = 5
KEPT_ELEMENTS: Final = 256


@dataclass(frozen=True, slots=True)
class Found:
    """What one look saw: objects, nodes, and bytes of tensors; None where it does not say."""

    objects: int | None = None
    nodes: int | None = None
    tensor_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; seconds."""

    way: str
    repeats: int
    median_s: float
    fastest_s: float
    slowest_s: float
    found: Found


class Record:
    """An object as programs have them: an instance with a dictionary and a list."""

    def __init__(self, number: int) -> None:
        self.name = str(number)
        self.values = [number]


def main() -> None:
    args = arguments()
    records = objects(args.objects)
    losses = graphs(args.nodes)
    # As in a running program: young objects have been looked at before.
    gc.collect()
    ways = ways_to_look(losses)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    looks: dict[str, Found] = {}
    for number in range(args.rounds):
        for name, look in ways.items():
            started = time.perf_counter()
            seen = look()
            seconds[name].append(time.perf_counter() - started)
            # Of the first round: once a census has read a saved tensor, it has a Python object, which lives
            # as long as the tensor, and then gc sees it too.
            looks.setdefault(name, seen)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    rows = [
        Row(name, len(times), statistics.median(times), min(times), max(times), looks[name])
        for name, times in seconds.items()
    ]
    kept = len(losses) * len(range(0, CHAIN, KEPT_EVERY)) * KEPT_ELEMENTS * 4
    machine = f"python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}"
    print_table(f"{machine}; {len(records):,} records; tensors that only graphs keep: {kept:,} B", rows)
    if args.json is not None:
        result = {"schema": 1, "machine": machine, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE as well")
    return parser.parse_args()


def objects(count: int) -> list[Record]:
    """Enough records for `count` objects that the collector tracks, those that exist already included."""
    gc.collect()
    before = len(gc.get_objects())
    sample = [Record(number) for number in range(1000)]
    for record in sample:
        vars(record)  # from Python 3.11 on an instance gets its dictionary when somebody asks for it
    each = (len(gc.get_objects()) - before) / len(sample)
    records = sample + [
        Record(number) for number in range(max(0, int((count - before) / each) - len(sample)))
    ]
    for record in records:
        vars(record)
    return records


def graphs(nodes: int) -> list[torch.Tensor]:
    """Ends of graphs with that many nodes together: chains of operations, some of which keep a tensor."""
    ends = []
    for _ in range(max(1, nodes // CHAIN)):
        value = torch.ones(KEPT_ELEMENTS, requires_grad=True)
        for number in range(CHAIN):
            # tanh saves its result, for backward; neg saves nothing.
            value = value.tanh() if number % KEPT_EVERY == 0 else value.neg()
        ends.append(value)
    return ends


def ways_to_look(losses: list[torch.Tensor]) -> dict[str, Callable[[], Found]]:
    """The ways by name; those that see less come first, see `main`."""
    ways: dict[str, Callable[[], Found]] = {
        "gc.get_objects": floor,
        "gc and is_tensor": pasted_snippet,
        "gc.get_referrers": lambda: one_hop(losses[-1]),
    }
    if importlib.util.find_spec("objgraph"):
        ways["objgraph.typestats"] = objgraph_types
    if importlib.util.find_spec("pympler"):
        ways["pympler muppy"] = muppy_objects
    return ways | {"take_census": census, "take_census, closer look": closer_look}


def census() -> Found:
    seen = take_census()
    return Found(seen.objects, seen.nodes, sum(storage.nbytes for storage in seen.storages))


def closer_look() -> Found:
    with Look() as view:
        seen = view.census()
        largest = seen.groups[0]
        view.details([(largest.device, largest.anchor)], lambda tensor: None)
    return Found(seen.objects, seen.nodes, sum(storage.nbytes for storage in seen.storages))


def floor() -> Found:
    return Found(objects=len(gc.get_objects()))


def pasted_snippet() -> Found:
    everything = gc.get_objects()
    # By type: `isinstance` runs code of proxies that it meets, and some of them raise.
    tensors = [item for item in everything if issubclass(type(item), torch.Tensor)]
    return Found(len(everything), tensor_bytes=storage_bytes(tensors))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def one_hop(tensor: torch.Tensor) -> Found:
    return Found(objects=len(gc.get_referrers(tensor)))


def objgraph_types() -> Found:
    import objgraph

    return Found(objects=sum(objgraph.typestats().values()))


def muppy_objects() -> Found:
    from pympler import muppy

    return Found(objects=len(muppy.get_objects()))


def print_table(title: str, rows: Sequence[Row]) -> None:
    print(title + "\n")
    head = ("way", "n", "median", "fastest", "slowest", "objects", "nodes", "bytes of tensors found")
    lines = [head, *(cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def cells(row: Row) -> tuple[str, ...]:
    seen = row.found
    times = (f"{seconds:.3f} s" for seconds in (row.median_s, row.fastest_s, row.slowest_s))
    counts = (
        "" if number is None else f"{number:,}" for number in (seen.objects, seen.nodes, seen.tensor_bytes)
    )
    return (row.way, str(row.repeats), *times, *counts)


if __name__ == "__main__":
    main()
