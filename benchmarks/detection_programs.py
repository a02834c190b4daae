"""Made-up training programs, healthy and leaking, for the power study: `detection.py --programs N`.

Each is a loop with holders and a counter; what is decided about it is decided by memtriage's own code, from
the plan of censuses to the verdict. Only the census is a stand-in (tests/support/simulated.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.simulated import Holder, Outcome, Program, watched

Series = NDArray[np.float64]
Chance = np.random.Generator
KIB: Final = 1024
MIB: Final = 1024 * KIB
LATEST_STOP: Final = 0.8
"""Part of a run after which what fills at a constant rate looks like a leak to censuses: the next would come
later. A counter that sees it shows a stop up to the last few readings."""


@dataclass(frozen=True)
class Case:
    """A program and what is true of it.

    Attributes:
        kind: of its healthy or leaking part.
        program: it.
        healthy: the same program without its leak.
        rate: bytes per step or second that it leaks; 0 where it does not.
    """

    kind: str
    program: Program
    healthy: Program
    rate: float


# --- what healthy programs keep -----------------------------------------------------------------------------


def storages(count: Series, each: float, **more: object) -> Holder:
    count = np.floor(count)
    return Holder(count * each, count, **more)  # type: ignore[arg-type]


def cache_with_a_bound(at: Series, chance: Chance) -> Holder:
    """Gets one entry after the other until it is full: an LRU cache, a replay buffer."""
    full = chance.uniform(0.02, LATEST_STOP) * len(at)
    every = float(chance.choice([1, 1, 1, 2, 5]))
    return storages(np.minimum(at, full) / every, size(chance))


def full_at_last(at: Series, chance: Chance) -> Holder:
    """Fills for nearly the whole run: one that the counter sees well."""
    return storages(np.minimum(at, chance.uniform(0.8, 0.93) * len(at)), 2 * size(chance) + 64 * KIB)


def cache_of_shapes(at: Series, chance: Chance) -> Holder:
    """Gets an entry for each shape that it has not seen: fewer and fewer new ones."""
    shapes = int(10 ** chance.uniform(1, 3))
    tau = chance.uniform(0.03, 0.5) * len(at)
    return storages(shapes * (1 - np.exp(-at / tau)), size(chance))


def seen_shapes(at: Series, chance: Chance) -> Holder:
    """The same with random shapes, one or several at each step."""
    shapes = int(chance.uniform(0.05, 0.5) * len(at)) + 2
    seen = chance.integers(0, shapes, len(at))
    new = np.zeros(len(at))
    new[np.unique(seen, return_index=True)[1]] = 1
    return storages(np.cumsum(new), size(chance))


def declared_bound(at: Series, chance: Chance) -> Holder:
    """A `deque(maxlen=...)` or `lru_cache(maxsize=...)`, that may still be filling at the end."""
    full = chance.uniform(0.05, 3) * len(at)
    return storages(np.minimum(at, full), size(chance), bound=int(full) + 1)


def emptied(at: Series, chance: Chance) -> Holder:
    """A list that is emptied every so many steps."""
    every = int(chance.uniform(0.01, 0.4) * len(at)) + 2
    count = (at + chance.integers(every)) % every
    return storages(count, size(chance), oldest=at - count)


def jumps(at: Series, chance: Chance) -> Holder:
    """Gets something once, or a few times in one part of the run."""
    when = chance.uniform(0.02, 0.95, int(chance.integers(1, 4))) * len(at)
    count = sum((at >= moment).astype(float) for moment in when)
    return storages(1.0 + count, size(chance) * 30)


def warm_up(at: Series, chance: Chance) -> Holder:
    """Grows over the first steps: workspaces, compiled shapes."""
    over = min(chance.uniform(5, 60), LATEST_STOP * len(at))
    return storages(np.minimum(at, over), size(chance) * 3)


def batches(at: Series, chance: Chance) -> Holder:
    """Has another size each time."""
    count = chance.integers(1, 20, len(at)).astype(float)
    return storages(count, size(chance), oldest=np.cumsum(count))


def queue(at: Series, chance: Chance) -> Holder:
    """Entries wait in it for a while: how many varies, and moves slowly."""
    level = np.zeros(len(at))
    swings = chance.normal(0, 1, len(at))
    keeps = 1 - 1 / chance.uniform(1, 0.1 * len(at) + 2)
    for step in range(1, len(at)):
        level[step] = keeps * level[step - 1] + swings[step]
    count = np.maximum(0, 20 + 8 * level / (level.std() + 1e-9))
    return storages(count, size(chance), oldest=np.floor(at * chance.uniform(0.1, 2)))


def evaluation(at: Series, chance: Chance) -> Holder:
    """Fills during an evaluation now and then and is emptied after it."""
    every = int(chance.uniform(0.05, 0.3) * len(at)) + 4
    takes = max(2, every // 4)
    into = at % every
    return storages(np.where(into >= every - takes, into - (every - takes), 0), size(chance))


def first_epochs(at: Series, chance: Chance) -> Holder:
    """A dataset's cache: fills in the first epoch, and gets what that missed in the second."""
    epoch = chance.uniform(0.05, 0.4) * len(at)
    count = np.minimum(at, epoch) + 0.2 * np.clip(at - epoch, 0, epoch)
    return storages(count, size(chance))


def log(at: Series, chance: Chance) -> Holder:
    """Detached losses: a few bytes at each step."""
    return storages(at, float(chance.choice([4, 8, 64])))


def cached_data(at: Series, chance: Chance) -> Holder:
    """Ordinary data up to a bound: decoded samples."""
    return replace(cache_with_a_bound(at, chance), data=True)


def native_cache(at: Series, chance: Chance) -> Holder:
    """Kernels for each shape, which no census finds."""
    return replace(cache_with_a_bound(at, chance), named=False)


def size(chance: Chance) -> float:
    """Bytes of one entry."""
    return float(round(2 ** chance.uniform(12, 22)))


HEALTHY: Final[dict[str, Callable[[Series, Chance], Holder]]] = {
    shape.__name__: shape
    for shape in (
        cache_with_a_bound, full_at_last, cache_of_shapes, seen_shapes, declared_bound, emptied, jumps,
        warm_up, batches, queue, evaluation, first_epochs, log, cached_data, native_cache,
    )
}  # fmt: skip


# --- what leaks ---------------------------------------------------------------------------------------------


def every_step(at: Series, chance: Chance) -> Series:
    return at + 1


def every_k_steps(at: Series, chance: Chance) -> Series:
    every = int(chance.integers(2, max(3, len(at) // 12)))
    return np.floor((at + chance.integers(every)) / every)


def every_epoch(at: Series, chance: Chance) -> Series:
    every = max(3, len(at) // int(chance.integers(8, 20)))
    return np.floor((at + 1) / every)


def late(at: Series, chance: Chance) -> Series:
    return np.maximum(0, at - round(chance.uniform(0.1, 0.6) * len(at)))


def at_random(at: Series, chance: Chance) -> Series:
    return np.cumsum(chance.random(len(at)) < chance.uniform(0.2, 0.9)).astype(float)


LEAKING: Final[dict[str, Callable[[Series, Chance], Series]]] = {
    growth.__name__: growth for growth in (every_step, every_k_steps, every_epoch, late, at_random)
}


# --- programs -----------------------------------------------------------------------------------------------


def programs(count: int, noise: Callable[[int, Chance], Series], seed: int) -> Iterator[tuple[Case, Case]]:
    """So many healthy programs, each with a leaking one."""
    chance = np.random.default_rng(seed)
    for number in range(count):
        healthy = list(HEALTHY)[number % len(HEALTHY)]
        yield (
            a_healthy(healthy, noise, chance),
            a_leaking(list(LEAKING)[number % len(LEAKING)], noise, chance),
        )


def a_loop(noise: Callable[[int, Chance], Series], chance: Chance, *, shortest: int) -> Program:
    steps = round(shortest * (4000 / shortest) ** chance.random())
    by_time = bool(chance.random() < 0.15)
    step_s = float(10 ** chance.uniform(-2, 0)) if not by_time else float(chance.uniform(6, 60)) / steps
    pace = np.ones(steps) if not by_time else np.repeat(chance.uniform(0.5, 2, steps // 20 + 1), 20)[:steps]
    on_gpu = bool(chance.random() < 0.3)
    return Program(
        {"model": storages(np.full(steps, 50.0), MIB)},
        np.zeros(steps) if on_gpu else noise(steps, chance),
        np.cumsum(pace) * step_s,
        float(chance.choice([0.02, 0.1, 0.4])),
        "cuda:0" if on_gpu else "cpu",
        by_time,
    )


def a_healthy(kind: str, noise: Callable[[int, Chance], Series], chance: Chance) -> Case:
    """A program that keeps something of a kind, and by chance of another."""
    loop = a_loop(noise, chance, shortest=30)
    at = np.arange(len(loop.noise), dtype=np.float64)
    holders = loop.holders | {kind: HEALTHY[kind](at, chance)}
    if kind != "full_at_last" and chance.random() < 0.4:
        also = str(chance.choice([shape for shape in HEALTHY if shape != "full_at_last"]))
        holders["also_" + also] = HEALTHY[also](at, chance)
    program = replace(loop, holders=holders)
    return Case(kind, program, program, 0.0)


def a_leaking(kind: str, noise: Callable[[int, Chance], Series], chance: Chance) -> Case:
    """A program with a leak of a kind, and by chance with something healthy."""
    loop = a_loop(noise, chance, shortest=60)
    at = np.arange(len(loop.noise), dtype=np.float64)
    count = LEAKING[kind](at, chance)
    began = np.flatnonzero(count > count[0])[0] if kind == "late" else 0
    time = loop.at_s if loop.by_time else at
    rate = (count[-1] - count[began]) / (time[-1] - time[began])
    if kind.startswith("every") and not loop.by_time:
        rises = np.flatnonzero(np.diff(count)) + 1
        rate = (count[rises[-1]] - count[rises[0]]) / (rises[-1] - rises[0])  # whole periods
    each = max(KIB, float(2 ** chance.uniform(12, 20)) / rate)  # smaller ones are log entries
    form = str(chance.choice(["named", "named", "named", "data", "native"]))
    if form == "data":
        each = max(each, 64 * KIB / rate)  # the resident set sees no less
    leak = storages(count, each, named=form != "native", data=form == "data")
    healthy = loop
    if chance.random() < 0.4:
        also = str(chance.choice(["emptied", "jumps", "warm_up", "batches", "log"]))
        healthy = replace(loop, holders=loop.holders | {"also_" + also: HEALTHY[also](at, chance)})
    program = replace(healthy, holders=healthy.holders | {"leak": leak})
    return Case(f"{kind}, {form}", program, healthy, float(rate * each))


def promised(case: Case) -> bool:
    """Whether the healthy program's own limit says that such a leak would be found.

    What the leak has kept by the end counts, per step or second of the whole run. malloc's counter does not
    see ordinary data: for a leak of that the limit is the resident set's, of at least 16 MiB in the run.
    """
    outcome = watched(case.healthy)
    leak, at_s = case.program.holders["leak"], case.program.at_s
    said = outcome.judged[case.program.device].detection_limit
    limit = outcome.resident_limit if leak.data else None if said is None else said.bytes
    over = at_s[-1] - at_s[0] if case.program.by_time else len(at_s) - 1
    return limit is not None and float(leak.nbytes[-1] - leak.nbytes[0]) / float(over) > limit


def found(case: Case, outcome: Outcome) -> bool:
    """LEAK, with a rate within 20 %."""
    return outcome.verdict == "leak" and abs(outcome.proven - case.rate) <= 0.2 * case.rate
