"""All ranks of a job, in groups of equals, without tracing each.

Where the world size is a power of two, so is each axis of its mesh, and each binary digit of a rank belongs
to one of them. From rank 0 one digit at a time is changed. If that changes nothing, the digit is taken to
change nothing for any rank; all values of the others are traced together. Otherwise every rank is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from memtriage.model.prediction import Prediction, RankPeaks
from memtriage.model.units import ranks_in_words, size

TRACED_AT_MOST: Final = 256
"""Ranks: a job in which more differ is refused."""


def all_ranks(world_size: int, predict: Callable[[int], Prediction]) -> Prediction:
    """The prediction of the largest rank, with `ranks` for all of them and a note that compares them.

    Args:
        predict: the prediction of one rank; called once for each of those that are traced.

    Raises:
        ValueError: too many ranks differ.
    """
    predictions: dict[int, Prediction] = {}

    def of(rank: int) -> Prediction:
        if rank not in predictions:
            predictions[rank] = predict(rank)
        return predictions[rank]

    if world_size & (world_size - 1) == 0:
        digits = [1 << place for place in range(world_size.bit_length() - 1)]
        mask = sum(digit for digit in digits if _peaks(of(digit)) != _peaks(of(0)))
        stands_for = {rank: rank & mask for rank in range(world_size)}
    else:
        stands_for = {rank: rank for rank in range(world_size)}
    traced = sorted(set(stands_for.values()))
    if len(traced) > TRACED_AT_MOST:
        raise ValueError(
            f"{len(traced)} of {world_size} ranks may differ; expected at most {TRACED_AT_MOST}: predict "
            "single ones with --rank"
        )
    if _peaks(of(world_size - 1)) != _peaks(of(stands_for[world_size - 1])):
        stands_for[world_size - 1] = world_size - 1
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, like in stands_for.items():
        groups.setdefault(_peaks(of(like)), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (-group[0][1], -group[0][0]))
    largest = of(stands_for[ordered[0][1][0]])
    largest.ranks = [
        RankPeaks(ranks=ranks, peak_allocated=peaks[0], peak_reserved=peaks[1]) for peaks, ranks in ordered
    ]
    largest.notes.append(
        _note(world_size, len(predictions), ordered, largest, of(stands_for[ordered[-1][1][0]]))
    )
    return largest


def _note(
    world_size: int,
    traced: int,
    ordered: list[tuple[tuple[int, int], list[int]]],
    largest: Prediction,
    smallest: Prediction,
) -> str:
    if len(ordered) == 1:
        return f"all {world_size} ranks have the same peaks; {traced} were traced"
    more = {
        owner: held - smallest.by_owner.get(owner, 0)
        for owner, held in largest.by_owner.items()
        if held > smallest.by_owner.get(owner, 0)
    }
    owner = max(more, key=lambda each: more[each], default=None)
    why = "" if owner is None else f", most of it {owner} ({size(more[owner])})"
    between = size(ordered[0][0][1] - ordered[-1][0][1])
    return (
        f"{ranks_in_words(ordered[0][1])} reserve most, {between} more than {ranks_in_words(ordered[-1][1])}"
        f"{why}; {traced} of {world_size} ranks were traced"
    )


def _peaks(prediction: Prediction) -> tuple[int, int]:
    return prediction.peak_allocated, prediction.peak_reserved
