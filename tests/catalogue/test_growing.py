"""The part of a library that an object belongs to, by its classes."""

from __future__ import annotations

import pytest

from memtriage.catalogue.growing import GROWING, growing_part


@pytest.mark.parametrize(
    ("classes", "library"),
    [
        (
            ["program.Accuracy", "torchmetrics.metric.Metric", "torch.nn.modules.module.Module"],
            "torchmetrics",
        ),
        (["queue.Queue"], "queue"),
        (["program.Results", "multiprocessing.pool.IMapIterator"], "multiprocessing"),
        (["itertools._tee_dataobject"], "itertools"),
        (["program.Queue"], None),
        ([], None),
    ],
)
def test_an_object_belongs_to_a_part_by_any_of_its_classes(classes: list[str], library: str | None) -> None:
    part = growing_part(classes)
    assert (part and part.library) == library


def test_a_tracker_of_metrics_is_told_before_the_metric_that_it_also_is() -> None:
    part = growing_part(["torchmetrics.metric.Metric", "torchmetrics.wrappers.tracker.MetricTracker"])
    assert part is not None and "copy of its metric" in part.why


def test_each_class_is_of_one_part_that_says_what_to_change() -> None:
    classes = [name for part in GROWING for name in part.classes]
    assert len(classes) == len(set(classes))
    assert all(part.why and part.fix and part.classes for part in GROWING)
