"""In which order trials run: every variant equally often in each place, and after each other variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean


def round_order(count: int, number: int) -> list[int]:
    """Return the order of `count` variants in a round, as their indices.

    Rounds form a Williams design: over `count` rounds each variant stands once in each place, and over
    `count` rounds (twice as many when `count` is odd) each follows each other one equally often. So what
    drifts, and what a trial leaves behind for the next (heat, page cache), falls on all alike.
    """
    mirrored = count % 2 == 1 and (number // count) % 2 == 1
    # 0, count - 1, 1, count - 2, 2 ...: neighbors differ by every amount.
    first = [place // 2 if place % 2 == 0 else count - 1 - place // 2 for place in range(count)]
    order = [(place + number) % count for place in first]
    return order[::-1] if mirrored else order


def schedule(names: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """Return all trials as (round, variant), in the order in which they run."""
    return [(number, names[index]) for number in range(repeats) for index in round_order(len(names), number)]


def given_up(failures: Mapping[int, bool], after: int) -> bool:
    """Return whether a variant has failed so often in a row, at the end, that it is not tried again.

    Args:
        failures: for each round that ended, whether the trial failed.
    """
    last = [failures[number] for number in sorted(failures)][-after:]
    return len(last) == after and all(last)


def remaining_s(pending: Sequence[str], took: Mapping[str, Sequence[float]]) -> float | None:
    """Return how long trials will take: each the average of its variant so far, or else that of all.

    Args:
        pending: a variant's name for each trial to come.
    """
    everything = [seconds for durations in took.values() for seconds in durations]
    if not everything:
        return None
    means = {name: fmean(durations) for name, durations in took.items() if durations}
    return sum(means.get(name, fmean(everything)) for name in pending)
