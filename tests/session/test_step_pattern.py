"""Which calls of optimizers complete a step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest

from memtriage.session.step_pattern import POLICY, StepPattern, stepped


class Optimizer:
    """What the pattern sees of an optimizer; with parameters, one that says what it trains."""

    def __init__(self, *parameters: object) -> None:
        if parameters:
            self.param_groups = [{"params": [*parameters]}]


def counted(program: Sequence[Optimizer | None], pattern: StepPattern | None = None) -> list[bool]:
    """For each call of an optimizer whether it completes a step. None is a backward."""
    pattern = pattern or StepPattern()
    found = []
    for optimizer in program:
        if optimizer is None:
            pattern.backward_completes()
        else:
            found.append(pattern.step([stepped(optimizer)]))
    return found


B = None


def test_single_optimizer_counts_each_step() -> None:
    one = Optimizer()
    assert counted([B, one, B, B, B, one, B, one]) == [True, True, True]


def test_two_that_alternate_make_one_step_of_an_iteration() -> None:
    critic, actor = Optimizer(), Optimizer()
    assert counted(3 * [B, critic, B, actor]) == 3 * [True, False]


def test_each_of_two_players_may_have_several() -> None:
    a, b, c, d = (Optimizer() for _ in range(4))
    assert counted(3 * [B, a, b, B, c, d]) == 3 * [True, False, False, False]


def test_optimizers_of_single_parameters_make_one_step() -> None:
    several = [Optimizer(object()) for _ in range(3 * POLICY.alternating)]
    assert sum(counted(4 * [B, *several])) == 4


def test_the_order_may_change_from_step_to_step() -> None:
    one, two = Optimizer(), Optimizer()
    assert sum(counted([B, one, two, B, two, one, B, one, two])) == 3


@pytest.mark.parametrize("critic_first", [True, False])
def test_the_one_that_steps_most_often_counts(critic_first: bool) -> None:
    critic, generator = Optimizer(), Optimizer()
    often, once = 5 * [B, critic], [B, generator]
    steps = counted(10 * (often + once if critic_first else once + often))
    assert 49 <= sum(steps) <= 51  # one that comes late might be the optimizer of another model
    assert sum(steps[6:]) == 45


def test_rare_optimizer_adds_only_its_first_step() -> None:
    each, third = Optimizer(), Optimizer()
    assert sum(counted(5 * [B, each, B, each, B, each, B, third])) == 15 + 1


def test_new_optimizer_of_same_parameters_replaces_the_old() -> None:
    first, last = object(), object()
    epochs = [Optimizer(first, last) for _ in range(3)]
    assert all(counted([event for epoch in epochs for event in (B, epoch, B, epoch)]))


def test_optimizer_per_step_counts_once_the_last_is_gone() -> None:
    pattern = StepPattern()
    for _ in range(3):
        assert counted([B, Optimizer(object())], pattern) == [True]


@pytest.mark.parametrize("steps", [2, 3, 20])
def test_kept_optimizers_of_successive_models_all_count(steps: int) -> None:
    kept = [Optimizer(object()) for _ in range(3 * POLICY.alternating)]
    assert all(counted([event for call in kept for event in steps * (B, call)]))


def test_one_of_a_second_player_that_comes_late_counts_once() -> None:
    first, late = Optimizer(object()), Optimizer(object())
    assert sum(counted(5 * [B, first] + 5 * [B, first, B, late])) == 11


def test_two_that_come_late_one_after_the_other_belong_to_one_iteration() -> None:
    first, late, later = (Optimizer(object()) for _ in range(3))
    assert counted([B, first, B, late, B, late, B, later]) == [True, False, True, False]
    assert counted([B, first, B, late, B, late, B, late, B, later]) == [True, False, True, True, True]


def test_kept_unused_optimizers_do_not_stop_the_count() -> None:
    kept = [Optimizer(object()) for _ in range(10 * POLICY.alternating)]
    program = [event for call in kept for event in (B, call)]
    found = counted(program)
    assert not any(found[1 : POLICY.alternating])
    assert all(found[POLICY.alternating + 1 :])


def test_players_that_alternate_are_one_step_also_after_a_search() -> None:
    search = [Optimizer(object()) for _ in range(2 * POLICY.alternating)]
    critic, actor = Optimizer(), Optimizer()
    program = [event for call in search for event in (B, call)] + 10 * [B, critic, B, actor]
    assert sum(counted(program)[-16:]) == 8


def test_an_optimizer_whose_groups_grow_is_still_the_same() -> None:
    one = Optimizer(object())
    pattern = StepPattern()
    for _ in range(4):
        assert counted([B, one], pattern) == [True]
        one.param_groups.append({"params": [object()]})


def test_an_address_used_again_is_another_optimizer() -> None:
    kept = Optimizer(object())
    pattern = StepPattern()
    gone = Optimizer(object())
    assert counted([B, gone, B, kept], pattern) == [True, False]
    pattern._since[id(kept)] = weakref.ref(gone)  # as if `kept` were made where `gone` was
    pattern._trained.clear()
    assert counted([B, kept], pattern) == [False]


def test_repeated_optimizer_counts_without_backwards() -> None:
    one, two = Optimizer(), Optimizer()
    assert counted(3 * [one, two]) == 3 * [True, False]


def test_nothing_is_kept_alive() -> None:
    one = Optimizer(object())
    gone = weakref.ref(one)
    pattern = StepPattern()
    assert counted([B, one], pattern) == [True]
    del one
    gc.collect()
    assert gone() is None


def test_groups_that_are_no_lists_are_not_asked() -> None:
    class Lazy(Optimizer):
        @property
        def param_groups(self) -> list[object]:
            raise AssertionError("asked")

    one = Lazy()
    assert counted(2 * [B, one]) == [True, True]


def test_optimizers_of_the_same_parameters_train_the_same() -> None:
    first, second, third = object(), object(), object()
    trains = stepped(Optimizer(first, second)).trains
    assert trains is not None
    assert stepped(Optimizer(first, second)).trains == trains
    assert stepped(Optimizer(first, third)).trains != trains
    assert stepped(Optimizer(first)).trains != trains
    assert stepped(Optimizer()).trains is None


def test_parameters_of_the_last_group_tell_optimizers_apart() -> None:
    backbone, head, other = object(), object(), object()

    def of(*groups: list[object]) -> object:
        optimizer = Optimizer()
        optimizer.param_groups = [{"params": group} for group in groups]
        return stepped(optimizer).trains

    assert of([backbone], [head]) == of([backbone], [head]) == of([backbone], [], [head])
    assert of([backbone], [head]) != of([backbone], [other])
    assert of([backbone], [head]) != of([backbone], [other, head])
