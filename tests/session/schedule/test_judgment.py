"""What a run's judgment says beside its findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.diagnose.growth.counter import Counter
from memtriage.diagnose.growth.holders import AwaitingCollector
from memtriage.diagnose.growth.judged import NO_COUNTER
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import HostLimit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.schedule import judgment
from memtriage.session.schedule.judgment import device_limit, judge_devices, limits_and_use
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


def growing(
    harmless: float = 0.0, *, waits: int = 0, fills: bool = False, off: bool = False, device: str = "cpu"
) -> Any:
    """A counter that rises by 1 MiB per step, as far as the judgment asks for it."""
    counter = Counter(device)
    for step in range(60):
        counter.add(step, (100 + step) * MIB)
    investigation = SimpleNamespace(
        scale="step",
        collector_off=off,
        waiting=[AwaitingCollector(10.0 * at, {device: waits}, {device: "Fold"}) for at in range(3)],
    )
    return SimpleNamespace(
        scale="step",
        counters={device: counter},
        investigation=investigation,
        harmless_rate=lambda of: harmless if of == device else 0.0,
        fills_with_code=lambda since: fills,
    )


@pytest.mark.parametrize(
    ("schedule", "has_limit"),
    [
        pytest.param(growing(), False, id="nothing explains it"),
        pytest.param(growing(0.69 * MIB), False, id="harmless holders explain too little"),
        pytest.param(growing(0.72 * MIB), True, id="harmless holders explain it"),
        pytest.param(growing(fills=True), True, id="a cache of code fills"),
        pytest.param(growing(waits=100 * MIB), True, id="garbage waits for the collector"),
        pytest.param(growing(waits=100 * MIB, off=True), False, id="the collector is off"),
    ],
)
def test_growth_that_is_explained_still_has_a_limit(schedule: Any, has_limit: bool) -> None:
    judged = judge_devices(schedule, {"cpu": True})["cpu"]
    assert (judged.detection_limit is not None) == has_limit
    if judged.detection_limit is not None:
        assert judged.detection_limit.bytes >= MIB and judged.detection_limit.per == "step"


def test_only_native_memory_fills_with_code() -> None:
    schedule = growing(fills=True, device="cuda:0")
    assert judge_devices(schedule, {"cuda:0": True})["cuda:0"].detection_limit is None


def test_a_device_whose_counter_cannot_be_read_is_not_judged() -> None:
    assert judge_devices(growing(), {"cpu": False}) == {"cpu": NO_COUNTER}
    unknown = judge_devices(growing(), {"cuda:0": True})["cuda:0"]
    assert unknown.points == 0 and unknown.reason


def test_a_mebibyte_of_garbage_is_worth_a_note() -> None:
    judged = judge_devices(followed(MIB), {"cpu": True})["cpu"]
    assert judged.note is not None and judged.note.startswith("1.0 MiB")


GIB = 2**30


@pytest.mark.parametrize(
    ("cap", "total", "used", "reserved", "limit"),
    [
        pytest.param(None, 80 * GIB, 10 * GIB, 6 * GIB, 76 * GIB, id="what others leave"),
        pytest.param(None, 80 * GIB, 5 * GIB, 6 * GIB, 80 * GIB, id="nobody else"),
        pytest.param(40 * GIB, 80 * GIB, 10 * GIB, 6 * GIB, 40 * GIB, id="the cap"),
        pytest.param(79 * GIB, 80 * GIB, 10 * GIB, 6 * GIB, 76 * GIB, id="less than the cap"),
        pytest.param(40 * GIB, None, 10 * GIB, 6 * GIB, 40 * GIB, id="capacity unknown"),
        pytest.param(None, 80 * GIB, None, 6 * GIB, None, id="use unknown"),
        pytest.param(None, 80 * GIB, 10 * GIB, None, None, id="reserved unknown"),
    ],
)
def test_what_an_allocator_may_have(
    cap: int | None, total: int | None, used: int | None, reserved: int | None, limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "per_process_limit", lambda device: cap)
    monkeypatch.setattr(cuda, "capacity", lambda device: total)
    monkeypatch.setattr(cuda, "counters", lambda device: SimpleNamespace(reserved=reserved))
    monkeypatch.setattr(driver, "used", lambda device: used)
    assert device_limit(3) == limit


def test_memory_that_comes_and_goes_counts_as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(judgment, "device_limit", lambda device: asked.append(device) or 80 * GIB)
    readings = [
        Reading("cuda:12", allocated=3 * GIB),
        Reading("cuda:1", allocated=GIB),
        Reading("cpu", allocated=5),
    ]
    limits, used = limits_and_use(None, [*readings, Reading("cuda:0")], {"cuda:12": GIB})
    assert limits == {"cuda:12": 80 * GIB, "cuda:1": 80 * GIB} and asked == [12, 1]
    assert used == {"cuda:12": 4 * GIB, "cuda:1": GIB}


def test_host_memory_has_one_limit_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgment, "host_limit", lambda: HostLimit(9 * GIB, "RLIMIT_DATA"))
    limits, used = limits_and_use(InUse(mapped=1, resident=2, data=3), [], {})
    assert limits == {"cpu": 9 * GIB, "host": 9 * GIB} and used == {"cpu": 3, "host": 3}
