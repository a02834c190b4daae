"""Where training is: on each scale, and relative to the batches before."""

from __future__ import annotations

import pytest

from memtriage.model.position import TrainingPosition


def test_a_position_on_each_scale() -> None:
    at = TrainingPosition(step=7, microbatch=3, time_s=2.5)
    assert (at.on("step"), at.on("microbatch"), at.on("second")) == (7, 3, 2.5)


def test_after_a_step_no_backward_has_completed_since() -> None:
    assert TrainingPosition(microbatch=3).into_step == 3
    assert TrainingPosition(microbatch=3, at_step_end=True).into_step == 0


@pytest.mark.parametrize(
    ("elements", "largest", "longest"), [(9, 8, True), (8, 8, False), (None, 8, None), (8, None, None)]
)
def test_the_longest_batch_is_larger_than_all_before(
    elements: int | None, largest: int | None, longest: bool | None
) -> None:
    assert TrainingPosition(batch_elements=elements, largest_batch=largest).longest_batch is longest
