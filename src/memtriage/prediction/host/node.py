"""What the ranks of a node need together."""

from __future__ import annotations

from typing import Final

from memtriage.model.prediction import HOST_PEAK, HostCourse, Prediction
from memtriage.prediction.host.memory import FILES
from memtriage.prediction.host.replay import LIBRARIES, highest, with_peak

LAUNCHER: Final = "launcher"


def add_node(prediction: Prediction, courses: list[HostCourse], ranks: int) -> None:
    """Give a prediction its `host_node`: rank 0, which often saves for all, and others like rank 1.

    Args:
        courses: of rank 0, and of rank 1 where there is one.
        ranks: of the node.
    """
    prediction.host_node = node(courses, ranks)
    if ranks > 1:
        prediction.notes.append(
            f"the node has {ranks} ranks of the job: rank 0, and {ranks - 1} that need as much as rank 1"
        )


def node(courses: list[HostCourse], ranks: int) -> dict[str, int]:
    """Bytes by class when the resident sets of a node's processes are largest, and their sum as `peak`.

    Args:
        courses: of rank 0 and of one that all others are like.
        ranks: of the node.
    """
    counts = [1, ranks - 1][: len(courses)]
    lengths = {len(course.stretches) for course in courses}
    if len(lengths) == 1:
        # Collectives are where all ranks are at the same place of the program.
        moments = [list(parts) for parts in zip(*(course.stretches for course in courses), strict=True)]
    else:
        moments = [[highest(course.stretches) for course in courses]]
    launcher = {LAUNCHER: courses[0].launcher} if ranks > 1 else {}
    return highest(
        [with_peak({**_together(parts, counts, courses[0].shared), **launcher}) for parts in moments]
    )


def _together(parts: list[dict[str, int]], counts: list[int], shared: int) -> dict[str, int]:
    held: dict[str, int] = {}
    for part, count in zip(parts, counts, strict=True):
        for kind, size in part.items():
            if kind == HOST_PEAK:
                continue
            if kind == FILES:
                held[kind] = max(held.get(kind, 0), size)  # pages of a file are there once
            else:
                held[kind] = held.get(kind, 0) + size * count
    held[LIBRARIES] -= shared * (sum(counts) - 1)
    return held
