"""What a judgment rests on, of several ranks and in words."""

from __future__ import annotations

import pytest

from memtriage.diagnose.growth.judged import stated_limit, weakest, with_circumstances
from memtriage.model.judged import DetectionLimit, Judged, JudgedScale

SHORT = Judged(scale="step", points=3, reason="3 steps are too few, 12 are needed")


def flat(limit: int, scale: JudgedScale = "step") -> Judged:
    return Judged(scale=scale, points=40, detection_limit=DetectionLimit(limit, "step"))


def test_the_weakest_of_several_ranks_says_least() -> None:
    assert weakest([flat(512), flat(4096), flat(1024)]) == flat(4096)
    assert weakest([flat(4096), Judged(scale="step", points=30), flat(512)]) == Judged(
        scale="step", points=30
    )
    assert weakest([flat(4096), SHORT, Judged(scale="step", points=30)]) == SHORT


def test_a_limit_in_words_rests_on_steps_backwards_or_time() -> None:
    assert stated_limit({"cpu": flat(1434)}, steps=312, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 312 steps"
    )
    assert stated_limit({"cpu": flat(1434, "microbatch")}, steps=0, seconds=9.0) == (
        "no growth above 1.4 KiB per step on cpu in 40 backwards"
    )
    slow = Judged(scale="time", points=40, detection_limit=DetectionLimit(2048, "second"))
    assert stated_limit({"cpu": slow}, steps=0, seconds=64.0) == (
        "no growth above 2.0 KiB per second on cpu in 1 min 04 s"
    )
    assert stated_limit({"cpu": slow}, steps=0, seconds=None) == (
        "no growth above 2.0 KiB per second on cpu in 40 readings"
    )
    assert stated_limit({"cpu": SHORT}, steps=3, seconds=9.0) is None


@pytest.mark.parametrize(
    ("failed", "steps", "torch", "expected"),
    [
        (True, 0, True, "the script failed at once: 3 steps"),
        (True, 3, True, "the script failed after 3 steps: 3 steps"),
        (False, 0, False, "torch was not imported: 3 steps"),
        (False, 3, True, "3 steps"),
        (False, 3, False, "3 steps"),  # counted by `memtriage.step()`
    ],
)
def test_a_short_run_says_how_it_came_to_be_short(
    failed: bool, steps: int, torch: bool, expected: str
) -> None:
    judged = {"cpu": SHORT, "cuda:0": flat(512)}
    said = with_circumstances(judged, failed=failed, steps=steps, torch=torch)
    assert said["cpu"].reason == f"{expected} are too few, 12 are needed"
    assert said["cuda:0"] == flat(512)


def test_what_was_long_enough_keeps_its_reason() -> None:
    noisy = {"cpu": Judged(scale="step", points=30, reason="it moves"), "cuda:0": Judged(reason="no counter")}
    assert with_circumstances(noisy, failed=True, steps=30, torch=False) == noisy
