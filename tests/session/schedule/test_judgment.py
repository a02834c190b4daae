"""What a run's judgment says beside its findings."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from memtriage.diagnose.growth.counter import WatchedCounter
from memtriage.diagnose.growth.holders import AwaitingCollector, DataGrowth, HolderGrowth
from memtriage.diagnose.growth.judged import NO_COUNTER
from memtriage.diagnose.growth.proof import Proof
from memtriage.model.findings import Finding
from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.model.position import TrainingPosition
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import HostLimit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.schedule import judgment
from memtriage.session.schedule.judgment import device_limit, find_leaks, judge_devices, limits_and_use
from memtriage.session.schedule.ordinary_data import OrdinaryData
from memtriage.session.schedule.scale import ScaleScheduler
from support.growths import TEXTS, data_of, evidence, grown
from support.paths import items_of

MIB = 2**20
NOTHING: Any = None


def followed(*nbytes: int, collector_off: bool = False) -> ScaleScheduler:
    """A flat counter, and what awaited the collector at censuses five steps apart."""
    follower = ScaleScheduler("step", NOTHING, NOTHING, NOTHING)
    follower.counters["cpu"] = WatchedCounter("cpu")
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


@pytest.mark.parametrize(("step", "judged"), [(40, True), (52, True), (60, False), (400, False)])
def test_what_was_not_read_for_long_is_not_clean(step: int, judged: bool) -> None:
    follower = followed()
    follower.at_mark(TrainingPosition(step=step), {}, censuses=False)
    judgment = judge_devices(follower, {"cpu": True})["cpu"]
    assert (judgment.detection_limit is not None) is judged
    assert judgment.reason == (None if judged else "its counter was not read after step 39")


def growing(
    harmless: float = 0.0, *, waits: int = 0, fills: bool = False, off: bool = False, device: str = "cpu"
) -> Any:
    """A counter that rises by 1 MiB per step, as far as the judgment asks for it."""
    counter = WatchedCounter(device)
    for step in range(60):
        counter.add(step, (100 + step) * MIB)
    investigation = SimpleNamespace(
        scale="step",
        collector_off=off,
        waiting=[AwaitingCollector(10.0 * at, {device: waits}, {device: "Fold"}) for at in range(3)],
    )
    return SimpleNamespace(
        scale="step",
        now=59.0,
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


def test_what_would_not_be_reported_is_explained() -> None:
    """A harmless holder explains less than 0.7 of a noisy counter's rate, but all that surely grows."""
    schedule, noise = growing(1800.0), random.Random(0)
    schedule.counters["cpu"] = WatchedCounter("cpu")
    for step in range(300):
        schedule.counters["cpu"].add(step, 100 * MIB + 2700 * step + noise.randrange(300_000))
    estimate = schedule.counters["cpu"].estimate()
    assert estimate.state == "growing" and 0.7 * estimate.rate > 1800
    judged = judge_devices(schedule, {"cpu": True})["cpu"]
    assert judged.detection_limit is not None and judged.detection_limit.bytes == math.ceil(estimate.high)


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


def seen(
    held: Sequence[HolderGrowth] = (), data: Sequence[DataGrowth] = (), *, waits: int = 0, off: bool = False,
    within: Sequence[HolderGrowth] = (), period: float | None = None, resident: float = 0.0,
    covered: bool = True, fills: bool = False, names_all: bool = False,
) -> Any:  # fmt: skip
    """What censuses found, as far as the judgment asks for it.

    Args:
        held: what grew from step to step.
        data: containers of ordinary data that grew.
        waits: bytes on the CPU that awaited the collector at each census.
        off: the program has turned the collector off.
        within: what grew from backward to backward.
        period: backwards of each micro-batch of the program's own.
        resident: rate of the resident set.
        covered: censuses were taken while the counter grew.
        fills: a cache of generated code may fill.
        names_all: holders explain all of the counter.
    """

    def investigation(scale: str) -> Any:
        waiting = [AwaitingCollector(10.0 * at, {"cpu": waits}, {"cpu": "Fold"}) for at in range(3)]
        return SimpleNamespace(
            scale=scale, collector_off=off, waiting=waiting, details={}, period=period, data=OrdinaryData()
        )

    main = SimpleNamespace(
        investigation=investigation("step"), data=lambda: list(data), growths=lambda: held,
        counters=SimpleNamespace(contradicts=lambda name, rate, since: resident < rate),
        names_all=lambda counter: names_all, held_rate=lambda counter: 0.0,
        covers_growth=lambda counter: covered, fills_with_code=lambda since: fills,
    )  # fmt: skip
    within_steps = SimpleNamespace(
        done=[investigation("microbatch")] if within else [], growths=lambda investigation: within
    )
    return SimpleNamespace(main=main, within_steps=within_steps)


def rates(leaks: Sequence[Finding]) -> dict[str | None, tuple[int | None, str | None]]:
    return {leak.holder: (leak.bytes_per_step, leak.certainty) for leak in leaks}


def holder(name: str, rate: float, device: str = "cpu", certainty: Any = "proven") -> HolderGrowth:
    path = items_of("main", name)
    return grown(
        path, path, owner="variable", device=device, proof=Proof(certainty, rate, 3, 4, "of a reason")
    )


A, B, C = (f"frame main(): {name}[*]" for name in "abc")


def test_what_holders_and_containers_keep_more_of_are_leaks() -> None:
    scheduler = seen([holder("a", MIB)], [data_of()])
    assert rates(find_leaks(scheduler, evidence())) == {
        A: (MIB, "proven"),
        "train.texts[*]": (MIB, "proven"),
    }


@pytest.mark.parametrize(
    ("suspected", "device", "kept"),
    [
        pytest.param(100_000, "cpu", True, id="a tenth of both"),
        pytest.param(99_999, "cpu", False, id="less than a tenth of both"),
        pytest.param(1, "cuda:0", True, id="in other memory"),
    ],
)
def test_a_suspicion_is_left_out_only_next_to_much_larger_proven_leaks(
    suspected: int, device: str, kept: bool
) -> None:
    proven = [holder("a", 600_000), holder("b", 400_000)]
    found = rates(find_leaks(seen([*proven, holder("c", suspected, device, "suspected")]), evidence()))
    assert (C in found) is kept
    assert {A, B} <= set(found)


def test_growth_of_a_counter_that_nothing_explains_is_a_leak_too() -> None:
    leaks = find_leaks(seen([holder("a", MIB)], resident=3 * MIB), evidence(3 * MIB))
    assert [(leak.device, leak.bytes_per_step, leak.certainty) for leak in leaks] == [
        ("cpu", MIB, "proven"),
        ("host", 2 * MIB, "proven"),
    ]


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(seen(names_all=True), id="holders name all"),
        pytest.param(seen(waits=900 * MIB), id="garbage awaits the collector"),
        pytest.param(seen(fills=True), id="a cache of generated code fills"),
    ],
)
def test_what_explains_a_counter_leaves_no_leak(scheduler: Any) -> None:
    assert find_leaks(scheduler, evidence(MIB)) == []


def test_garbage_explains_nothing_where_nothing_collects_it() -> None:
    (leak,) = find_leaks(seen(waits=900 * MIB, off=True, resident=MIB), evidence(MIB))
    assert (leak.device, leak.bytes_per_step) == ("host", MIB)


@pytest.mark.parametrize("resident", [MIB // 2, MIB // 2 - 1])
def test_half_of_native_growth_must_be_resident(resident: int) -> None:
    (leak,) = find_leaks(seen(resident=resident), evidence(MIB))
    assert leak.certainty == ("proven" if 2 * resident >= MIB else "suspected")


def test_a_gpus_growth_needs_no_resident_memory() -> None:
    (leak,) = find_leaks(seen(), evidence(MIB, counter="cuda:0"))
    assert (leak.device, leak.certainty) == ("cuda:0", "proven")


def test_growth_after_the_last_census_is_suspected_only() -> None:
    (leak,) = find_leaks(seen(covered=False, resident=MIB), evidence(MIB))
    assert leak.certainty == "suspected"


def test_the_host_s_counter_is_a_witness_and_no_leak() -> None:
    assert find_leaks(seen(), evidence(MIB, counter="host")) == []


def test_native_objects_of_a_container_are_a_part_of_its_leak() -> None:
    tables = data_of(native="Table")
    leaks = find_leaks(seen([holder("a", 2 * MIB)], [tables], resident=9 * MIB), evidence(9 * MIB))
    assert rates(leaks) == {"train.texts[*]": (7 * MIB, "proven"), A: (2 * MIB, "proven")}
    assert leaks[0].holder_path == TEXTS


def test_what_grows_within_steps_is_a_leak_per_micro_batch() -> None:
    scheduler = seen(within=[holder("a", MIB)], period=2.0)
    (leak,) = find_leaks(scheduler, evidence())
    assert (leak.holder, leak.bytes_per_step, leak.bytes_per_microbatch) == (A, None, MIB)
    assert any("2 backwards for each micro-batch of its own" in line for line in leak.evidence)


def test_nodes_on_the_host_belong_to_the_tensors_on_the_gpu() -> None:
    gpu, host = holder("a", MIB, "cuda:0"), holder("a", MIB // 4, "host")
    (leak,) = find_leaks(seen([gpu, host]), evidence())
    assert (leak.device, leak.bytes_per_step) == ("cuda:0", MIB)
    assert leak.evidence[-1] == "in addition 4.0 MiB of host memory: nodes of the autograd graph"
    (alone,) = find_leaks(seen([host]), evidence())
    assert alone.device == "host"


@pytest.mark.parametrize(("waits", "leaks"), [(900 * MIB, 0), (0, 1)])
def test_native_holders_of_garbage_that_awaits_the_collector_are_no_leak(waits: int, leaks: int) -> None:
    native = (PathSegment(SegmentKind.NATIVE, "Tensor"),)
    growth = replace(grown(native, native, owner="variable"), proof=Proof("proven", MIB, 3, 4))
    assert len(find_leaks(seen([growth], waits=waits), evidence())) == leaks
