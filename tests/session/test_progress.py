"""Where training stands, by the events of the hooks."""

from __future__ import annotations

import threading

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.session.progress import TrainingProgress


@pytest.fixture
def progress() -> TrainingProgress:
    return TrainingProgress()


class Optimizer:
    """An optimizer, as far as progress is concerned."""


ADAM = Optimizer()


def backward(progress: TrainingProgress, in_closure: bool = False) -> bool:
    progress.backward_begins()
    return progress.backward_completes(in_closure)


def optimizer(progress: TrainingProgress, which: Optimizer = ADAM, closures: int = 0) -> bool:
    progress.optimizer_begins()
    for _ in range(closures):
        assert not backward(progress, in_closure=True)
    completes = progress.optimizer_ends(which, False)
    if completes:
        progress.step_completes()
    return completes


def test_before_anything_happens_it_is_setup(progress: TrainingProgress) -> None:
    assert progress.position == TrainingPosition(phase="setup")
    assert progress.thread is None


def test_inner_gradients_before_the_first_backward_are_no_micro_batches(progress: TrainingProgress) -> None:
    """Meta-learning computes them in each inner step, and then runs one backward through all of these."""
    assert [progress.gradients_complete() for _ in range(3)] == [True] * 3
    assert (progress.position.backwards, progress.position.microbatch) == (3, 0)
    backward(progress)
    assert not progress.gradients_complete()
    assert (progress.position.backwards, progress.position.microbatch) == (4, 1)


def test_backwards_count_within_their_step(progress: TrainingProgress) -> None:
    seen = []
    for _ in range(2):
        for _ in range(3):
            backward(progress)
            seen.append((progress.position.step, progress.position.microbatch, progress.position.into_step))
        optimizer(progress)
        seen.append((progress.position.step, progress.position.microbatch, progress.position.into_step))
    assert seen == [
        *[(0, 1, 1), (0, 2, 2), (0, 3, 3), (1, 3, 0)],
        *[(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 3, 0)],
    ]
    assert (progress.position.backwards, progress.position.microbatches_per_step) == (6, 3)
    assert progress.thread == threading.get_ident()


def test_a_backward_that_fails_counts_nothing(progress: TrainingProgress) -> None:
    progress.backward_begins()
    assert progress.position.phase == "backward"
    progress.backward_fails()
    assert progress.position == TrainingPosition(phase="forward")


def test_several_optimizers_between_two_backwards_make_one_step(progress: TrainingProgress) -> None:
    backward(progress)
    assert [optimizer(progress, which=Optimizer()) for _ in range(3)] == [True, False, False]
    assert progress.position.step == 1


def test_backwards_of_a_closure_make_no_microbatch(progress: TrainingProgress) -> None:
    assert [optimizer(progress, closures=4) for _ in range(3)] == [True, True, True]
    position = progress.position
    assert (position.step, position.backwards, position.microbatch, position.microbatches_per_step) == (
        3, 0, 0, 0,
    )  # fmt: skip


def test_after_a_backward_of_a_closure_the_optimizer_goes_on(progress: TrainingProgress) -> None:
    progress.optimizer_begins()
    backward(progress, in_closure=True)
    assert progress.position.phase == "optimizer"
    progress.backward_begins()
    progress.backward_fails(in_closure=True)
    assert progress.position.phase == "optimizer"


def test_a_step_without_a_backward_has_no_microbatch(progress: TrainingProgress) -> None:
    for _ in range(2):
        backward(progress)
    optimizer(progress)
    assert progress.user_step() is False
    assert progress.user_step()
    progress.step_completes()
    assert (progress.position.step, progress.position.microbatches_per_step) == (2, 0)


def test_it_trains_from_the_first_event_on(progress: TrainingProgress) -> None:
    assert not progress.trains
    progress.backward_begins()
    assert progress.trains


def test_user_step_counts_alternating_optimizers_once(progress: TrainingProgress) -> None:
    critic, actor = Optimizer(), Optimizer()
    for which in (critic, actor):
        backward(progress)
        optimizer(progress, which=which)
    assert not progress.user_step()  # a hook has counted this iteration
    for which in (critic, actor):
        backward(progress)
        assert not optimizer(progress, which=which)
    assert progress.user_step()


def test_the_program_s_word_replaces_the_hooks(progress: TrainingProgress) -> None:
    backward(progress)
    optimizer(progress)
    assert not progress.user_step()  # the hook has counted this one
    backward(progress)
    assert not optimizer(progress)
    assert progress.user_step()


def test_positions_are_those_of_their_scale() -> None:
    position = TrainingPosition(step=7, microbatch=3, time_s=41.6)
    assert [position.on(scale) for scale in ("step", "microbatch", "second")] == [7, 3, 41.6]


def test_the_longest_batch_is_unknown_where_a_size_is() -> None:
    assert TrainingPosition(batch_elements=9).longest_batch is None
    assert TrainingPosition(batch_elements=9, largest_batch=8).longest_batch is True
    assert TrainingPosition(batch_elements=8, largest_batch=8).longest_batch is False
