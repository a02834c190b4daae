"""The session: marks go in, a record comes out, and nothing of it ever reaches the program."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.findings import Finding
from memtriage.observe.counters import CounterReader, Reading
from memtriage.session.core import Session
from memtriage.session.death_watch import DeathWatch
from memtriage.session.ends import Terminated
from memtriage.session.growth_watch import GrowthWatch
from memtriage.session.host_watch import HostWatch
from memtriage.session.progress import TrainingProgress
from memtriage.session.schedule.investigation import Investigator
from memtriage.store.layout import RankIdentity
from support import censuses

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Censuses that were asked for; none is taken: it would walk all that pytest holds."""
    return censuses.leave_out(monkeypatch)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A session that has begun, and ends with the test."""
    made = begun(tmp_path)
    yield made
    made.finish()


def begun(directory: Path) -> Session:
    who = RankIdentity(run_id="run", restart=0, rank=None, world_size=1, local_rank=None)
    made = Session(directory, who, ["train.py", "--lr", "1"], str(directory))
    made.start()
    return made


def lines(session: Session, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in session.path.read_text().splitlines()]
    return [record for record in records if record["t"] == kind]


def deaths(session: Session) -> list[dict[str, Any]]:
    """What ended it: the process of the tests may have host findings of its own."""
    return [finding for finding in lines(session, "finding") if finding["kind"] == "out_of_memory"]


def marks(session: Session) -> list[tuple[str, int, int]]:
    seen = [(mark["name"], mark["step"], mark["microbatch"]) for mark in lines(session, "mark")]
    return [mark for mark in seen if mark[0] != "time"]


def training() -> tuple[Any, Any]:
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# --- the record ---------------------------------------------------------------------------------------------


def test_the_record_begins_with_who_runs_and_ends_with_how(session: Session) -> None:
    model, optimizer = training()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    session.finish(exit_code=3)
    (start,) = lines(session, "start")
    assert (start["argv"], start["pid"], start["run_id"]) == (["train.py", "--lr", "1"], os.getpid(), "run")
    assert start["torch"] == torch.__version__ and start["host_limit"] > 0
    (end,) = lines(session, "end")
    assert (end["verdict"], end["steps"], end["exit_code"], end["exception"]) == ("not_judged", 1, 3, None)
    assert end["judged"]["cpu"]["reason"] == (
        "the script failed after 1 step: 1 step is too few, 12 are needed"
    )
    assert end["device_limits"]["cpu"] > 0
    assert marks(session) == [("start", 0, 0), ("backward", 0, 1), ("step", 1, 1), ("end", 1, 1)]
    assert lines(session, "note") == []


def test_a_finished_session_does_nothing_more(session: Session) -> None:
    session.finish()
    before = session.path.read_bytes()
    session.mark("late")
    session.user_step()
    session.finish(exit_code=1)
    session.finish(Terminated.by(signal.SIGTERM), 128 + signal.SIGTERM, brief=True)
    assert session.path.read_bytes() == before
    assert not session.running


def test_each_device_has_its_line_of_a_mark(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [Reading("cpu", 5, 9), Reading("cuda:0", 7, 8, 6, 3)]
    monkeypatch.setattr(CounterReader, "read", lambda reader, within_step: readings)
    session.mark("after refit")
    cpu, gpu = [mark for mark in lines(session, "mark") if mark["name"] == "after refit"]
    assert (cpu["device"], cpu["allocated"], cpu["requested"]) == ("cpu", 5, None)
    assert (gpu["device"], gpu["allocated"], gpu["reserved"], gpu["outside"]) == ("cuda:0", 7, 8, 3)
    assert cpu["host_rss"] == gpu["host_rss"] > 0
    assert session._ledgers.baselines == {0: 3}


# --- what goes wrong in here stays in here ------------------------------------------------------------------


def raising(*args: Any, **kwargs: Any) -> Any:
    raise OSError("a file that vanished")


def test_a_mark_that_fails_is_noted_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CounterReader, "read", raising)
    model, optimizer = training()
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    (note,) = lines(session, "note")
    assert note["text"].endswith("(mark): OSError: a file that vanished")
    assert session.position.step == 3


def test_a_part_that_fails_takes_no_mark_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def fails(*_: object) -> None:
        raise TypeError("odd")

    monkeypatch.setattr(DeathWatch, "observe", fails)
    monkeypatch.setattr(GrowthWatch, "at_mark", lambda _, mark: seen.append(mark.name))
    session = begun(tmp_path)
    session.mark("step")
    session.finish()
    assert seen.count("step") == 1
    (note,) = (line["text"] for line in lines(session, "note") if "could not" in line["text"])
    assert "TypeError: odd" in note


def test_death_is_judged_when_the_census_has_no_memory(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Investigator, "look", no_memory)
    session.finish(MemoryError(), 1)
    assert "(last look): MemoryError" in lines(session, "note")[0]["text"]
    (finding,) = deaths(session)
    (end,) = lines(session, "end")
    assert finding["kind"] == end["verdict"] == "out_of_memory"


def test_a_forked_child_is_not_watched(session: Session) -> None:
    model, optimizer = training()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            session.mark("in the child")
            session.finish(exit_code=9)
            status = int(session.running or session.position.step)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert session.running
    assert marks(session) == [("start", 0, 0)]


# --- how it ends --------------------------------------------------------------------------------------------


def test_a_termination_signal_takes_no_census(session: Session, asked: list[object]) -> None:
    session.finish(Terminated.by(signal.SIGTERM), 128 + signal.SIGTERM, brief=True)
    (end,) = lines(session, "end")
    assert (end["exception"], end["exit_code"]) == ("terminated by SIGTERM", 128 + signal.SIGTERM)
    assert asked == []


def test_an_ordinary_end_takes_one_for_the_ledger(session: Session, asked: list[object]) -> None:
    session.finish()
    assert len(asked) == 1


def test_findings_so_far_are_replaced_by_the_last_word(session: Session) -> None:
    session._report_suspects([Finding(kind="leak", device="cpu", holder="train.kept[*]")])
    (suspicion,) = lines(session, "finding")
    assert (suspicion["holder"], suspicion["final"]) == ("train.kept[*]", False)
    session.finish(MemoryError(), 1)
    (finding,) = deaths(session)
    assert (finding["kind"], finding["device"], finding["final"]) == ("out_of_memory", "host", True)
    assert not any(line["final"] for line in lines(session, "finding") if line["kind"] == "leak")
    (end,) = lines(session, "end")
    assert (end["verdict"], end["exception"]) == ("out_of_memory", "MemoryError")


# --- what the program is doing ------------------------------------------------------------------------------


def test_backwards_read_the_host_without_steps(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    whole = CounterReader.read

    def noted(reader: CounterReader, within_step: bool) -> list[Reading]:
        read.append(f"within: {within_step}")
        return whole(reader)

    monkeypatch.setattr(HostWatch, "at_mark", lambda host, readings, rss, step: read.append(f"host {step}"))
    monkeypatch.setattr(CounterReader, "read", noted)
    model, optimizer = training()
    for _ in range(2):
        model(torch.randn(2, 8)).sum().backward()
    assert read == 2 * ["within: False", "host 0"]
    optimizer.step()
    model(torch.randn(2, 8)).sum().backward()
    assert read[4:] == ["within: False", "host 1", "within: True"]


def test_marks_of_several_threads_do_not_mix(session: Session) -> None:
    threads = [
        threading.Thread(target=lambda name=name: [session.mark(name) for _ in range(50)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for name, _, _ in marks(session)]
    assert [names.count(name) for name in "abcd"] == [50] * 4
    assert lines(session, "note") == []


def test_backward_begins_under_the_census_lock(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    owned: list[bool] = []
    lock: Any = session._lock
    monkeypatch.setattr(TrainingProgress, "backward_begins", lambda progress: owned.append(lock._is_owned()))
    session.backward_begins()
    assert owned == [True]


# --- what the verdict rests on ------------------------------------------------------------------------------


def test_memory_of_the_watch_is_not_taken_for_a_steps(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    monkeypatch.setattr(HostWatch, "while_training", lambda watch: looked.append(True))
    monkeypatch.setattr(GrowthWatch, "recording", True)  # of allocation sites, whose tables are in malloc
    session.backward_begins()
    with session._lock:  # as in a census
        monkeypatch.setattr(GrowthWatch, "recording", False)
        sampler = threading.Thread(target=session._within_step)
        sampler.start()
        sampler.join()
        assert not looked
    session.backward_begins()
    assert looked


def test_a_flat_counter_makes_a_clean_run(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [Reading("cpu", 5 << 20, 9 << 20)]
    monkeypatch.setattr(CounterReader, "read", lambda reader, within_step: readings)
    monkeypatch.setattr(CounterReader, "in_malloc", lambda reader: readings[0].allocated)
    model, optimizer = training()
    for _ in range(14):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    session.finish()
    (judged,) = session.conclusion.judged.values()
    assert (judged.scale, judged.points, judged.reason) == ("step", 14, None)
    assert judged.detection_limit is not None and judged.detection_limit.per == "step"
    assert session.conclusion.verdict == lines(session, "end")[0]["verdict"] == "clean"
