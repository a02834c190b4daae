"""What a run's judgment says beside its findings."""

from __future__ import annotations

from typing import Any

import pytest

from memtriage.diagnose.growth.counter import Counter
from memtriage.diagnose.growth.holders import AwaitingCollector
from memtriage.session.schedule.judgment import judge_devices
from memtriage.session.schedule.scale import ScaleScheduler

MIB = 2**20
NOTHING: Any = None


def followed(*nbytes: int, collector_off: bool = False) -> ScaleScheduler:
    """A flat counter, and what awaited the collector at censuses five steps apart."""
    follower = ScaleScheduler("step", NOTHING, NOTHING, NOTHING)
    follower.counters["cpu"] = Counter("cpu")
    for step in range(40):
        follower.counters["cpu"].add(step, 100 * MIB)
    follower.investigation.collector_off = collector_off
    for number, each in enumerate(nbytes):
        follower.investigation.waiting.append(AwaitingCollector(5.0 * number, {"cpu": each}, {"cpu": "Fold"}))
    return follower


def test_collector_note_has_class_and_step() -> None:
    judged = judge_devices(followed(2 * MIB, 30 * MIB, 4 * MIB), {"cpu": True})["cpu"]
    assert judged.note == "30.0 MiB in garbage cycles of Fold awaited the collector at step 5"
    assert judged.detection_limit is not None and judged.reason is None


@pytest.mark.parametrize(("nbytes", "off"), [((), False), ((MIB - 1,), False), ((30 * MIB,), True)])
def test_what_is_little_or_a_leak_is_no_note(nbytes: tuple[int, ...], off: bool) -> None:
    assert judge_devices(followed(*nbytes, collector_off=off), {"cpu": True})["cpu"].note is None
