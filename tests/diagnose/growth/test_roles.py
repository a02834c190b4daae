"""Growth of the job's other processes: judged by the same rules, and joined by the work they do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from memtriage.diagnose.growth.evidence import WARM_UP, Evidence
from memtriage.diagnose.growth.judgment import Judgment, judge
from memtriage.diagnose.growth.roles import ITSELF, SEGMENTS
from memtriage.model.evidence import CensusSeen, Role, Situation
from memtriage.model.paths import ANY_ITEM, PathSegment, SegmentKind
from memtriage.model.position import TrainingPosition
from support.observed import data

MIB = 1 << 20
STEPS = 120
CACHE = (
    PathSegment(SegmentKind.FRAME, "main"),
    PathSegment(SegmentKind.VARIABLE, "dataset"),
    PathSegment(SegmentKind.ATTRIBUTE, "cache"),
    ANY_ITEM,
)


def follow(evidence: Evidence, role: str, group: str, sizes: Sequence[int], lived_s: float = 60.0) -> None:
    """Add a process whose size was read at each step, half a second apart."""
    known = Role(role=role, where="worker", group=group, lived_s=lived_s, highest=max(sizes))
    evidence.add(known)
    for step, size in enumerate(sizes, 1):
        evidence.of_role(role).run["step"].read(step, {"cpu": size})
        evidence.of_role(role).run["second"].read(step / 2, {"cpu": size})


def flat_main() -> Evidence:
    evidence = Evidence()
    for step in range(1, STEPS + 1):
        evidence.run["step"].read(step, {"cpu": 100 * MIB})
    position = TrainingPosition(step=STEPS, backwards=STEPS, microbatches_per_step=1)
    evidence.add(
        Situation(position=position, limits={"host": 1 << 34}, used={"host": 1 << 30}, readable={"cpu": True})
    )
    return evidence


def growing(rate: int, start: int = 200 * MIB) -> list[int]:
    return [start + rate * step for step in range(STEPS)]


def judged(evidence: Evidence) -> Judgment:
    return judge(evidence)


def test_workers_that_grow_alike_are_one_leak_with_the_holder_that_was_read_in_one() -> None:
    """Pages of a process grow by more than its holder, as malloc's do: in the others, too."""
    evidence, rate, entry = flat_main(), MIB, 64 * 1024
    for worker in range(3):
        follow(evidence, f"worker {worker} of loader", "workers of loader", growing(rate * 5 // 4))
    for step in (40, 70, 100):
        seen = msgspec.structs.replace(data(step * rate // entry, entry), path=CACHE)
        where = TrainingPosition(step=step, time_s=step / 2)
        census = CensusSeen(position=where, work_s=step / 2, data=[seen], partial=True)
        evidence.of_role("worker 1 of loader").add(census)
    (leak,) = judged(evidence).leaks
    assert leak.path == CACHE and leak.certainty == "proven"
    assert leak.where == "worker" and leak.process == "3 workers of loader"
    assert leak.rates["step"] == pytest.approx(3 * rate, rel=0.02)
    assert leak.event == "step" and leak.rate * leak.spacing == pytest.approx(3 * rate, rel=0.02)
    assert leak.by_role[0][0] == "worker 1 of loader"


@pytest.mark.parametrize("makes_steps", [False, True])
def test_what_the_program_loads_before_its_first_step_is_no_growth(makes_steps: bool) -> None:
    evidence = flat_main()
    if not makes_steps:
        evidence.run["step"] = Evidence().run["step"]
    evidence.add(Role(role=ITSELF, where="main", group=ITSELF, lived_s=60.0, highest=growing(MIB)[-1]))
    for at, size in enumerate(growing(MIB), 1):
        evidence.of_role(ITSELF).run["second"].read(at / 2, {"cpu": size})
    leaks = judged(evidence).leaks
    assert not leaks if makes_steps else [leak.rates.keys() for leak in leaks] == [{"second"}]


def test_what_fills_the_host_in_several_processes_has_one_end_and_the_share_of_each() -> None:
    evidence = flat_main()
    evidence.run["step"] = Evidence().run["step"]
    for step in range(1, STEPS + 1):
        evidence.run["step"].read(step, {"cpu": 100 * MIB + step * MIB})
    for worker in range(2):
        follow(evidence, f"worker {worker} of loader", "workers of loader", growing(2 * MIB))
    leaks = judged(evidence).leaks
    (end,) = {str(leak.projection) for leak in leaks}
    assert len(leaks) == 2 and "2 workers of loader 80 %" in end and "this process 20 %" in end
    risen = 2 * (STEPS - 1 - WARM_UP) * 2 * MIB
    left = ((1 << 34) - (1 << 30) - risen) / (5 * MIB)
    first = leaks[0].projection
    assert first is not None and first.step == pytest.approx(STEPS + left, rel=0.02)


def test_growth_whose_holder_was_not_read_is_suspected() -> None:
    evidence = flat_main()
    follow(evidence, "worker 0 of loader", "workers of loader", growing(MIB))
    (leak,) = judged(evidence).leaks
    assert leak.certainty == "suspected" and leak.path is None and leak.process == "worker 0 of loader"
    assert (leak.cause, leak.unread) == ("not read", None)
    about = evidence.roles["worker 0 of loader"].role
    assert about is not None
    about.unread = "another Python"
    (leak,) = judged(evidence).leaks
    assert leak.unread == "another Python"


def test_processes_of_other_work_are_leaks_of_their_own() -> None:
    evidence = flat_main()
    follow(evidence, "worker 0 of train_loader", "workers of train_loader", growing(MIB))
    follow(evidence, "worker 0 of val_loader", "workers of val_loader", growing(MIB))
    assert {leak.process for leak in judged(evidence).leaks} == {
        "worker 0 of train_loader",
        "worker 0 of val_loader",
    }


def test_a_process_that_fills_a_cache_and_stays_flat_is_judged_and_clean() -> None:
    evidence = flat_main()
    sizes = [200 * MIB + min(step, 20) * 2 * MIB for step in range(STEPS)]
    follow(evidence, "worker 0 of loader", "workers of loader", sizes)
    judgment = judged(evidence)
    assert judgment.leaks == []
    limit = judgment.judged["worker 0 of loader"].limit
    assert limit is not None and limit.bytes < MIB


def test_workers_that_begin_anew_with_each_epoch_do_not_grow() -> None:
    evidence = flat_main()
    sizes = [200 * MIB + (step % 20) * 2 * MIB for step in range(STEPS)]
    follow(evidence, "worker 0 of loader", "workers of loader", sizes)
    assert judged(evidence).leaks == []


def test_a_process_that_lived_too_short_says_so_and_one_that_hardly_grew_does_not_matter() -> None:
    evidence = flat_main()
    follow(evidence, "worker 0 of loader", "workers of loader", growing(20 * MIB)[:6], lived_s=3.0)
    follow(evidence, "rank 0", "spawned ranks", [300 * MIB + step * 1024 for step in range(6)])
    loads = [200 * MIB, 280 * MIB, *[340 * MIB] * 5]
    follow(evidence, "compiler", "compiler", loads, lived_s=3.5)
    judgment = judged(evidence)
    assert judgment.judged["compiler"].obstacle == "small"
    assert (judgment.judged["worker 0 of loader"].obstacle, judgment.judged["worker 0 of loader"].figure) == (
        "lived",
        3.0,
    )
    assert judgment.judged["rank 0"].obstacle == "small" and judgment.judged["rank 0"].scale is None


def test_a_record_gives_the_same_judgment() -> None:
    evidence = flat_main()
    follow(evidence, "worker 0 of loader", "workers of loader", growing(MIB))
    lines = [evidence.situation, *(role.role for role in evidence.roles.values() if role.role is not None)]
    for scale in ("step", "second"):
        lines += evidence.run[scale].new_readings(last=True)
        for name, role in evidence.roles.items():
            for line in role.run[scale].new_readings(last=True):
                line.role = name
                lines.append(line)
    again = judged(Evidence.of(lines))
    assert [(leak.process, leak.rates) for leak in again.leaks] == [
        (leak.process, leak.rates) for leak in judged(evidence).leaks
    ]


def test_segments_that_no_process_maps_are_a_leak_of_the_job() -> None:
    evidence = flat_main()
    follow(evidence, SEGMENTS, SEGMENTS, growing(MIB, start=0))
    (leak,) = judged(evidence).leaks
    assert (leak.cause, leak.process, leak.certainty) == ("shared memory", SEGMENTS, "proven")
    assert leak.rates["step"] == pytest.approx(MIB, rel=0.01)


def test_a_queue_that_fills_and_empties_is_nothing_to_judge() -> None:
    evidence = flat_main()
    follow(evidence, SEGMENTS, SEGMENTS, [40 * MIB * (step % 7) for step in range(STEPS)])
    judgment = judged(evidence)
    assert judgment.leaks == [] and set(judgment.judged) == {"cpu"}
