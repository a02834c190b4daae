"""The thread that samples the host, and asks for marks where nothing else makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.observe.cgroup import CgroupMemory
from memtriage.observe.host import ChildSample
from memtriage.session import sampler
from memtriage.session.host_watch import HostWatch
from memtriage.session.sampler import Sampler
from memtriage.session.time_marks import TimeMarks
from memtriage.store.records import HostSampleLine


class Quiet:
    """A session in which nothing happens, and that notes what the sampler does.

    Args:
        stop_at: whether the sampler has done what the test waits for.
    """

    def __init__(self, stop_at: Callable[[str], bool]) -> None:
        self.done: list[str] = []
        self.samples: list[HostSampleLine] = []
        self.reached = threading.Event()
        self._stop_at = stop_at
        self.sampler = Sampler(
            HostWatch(),
            now=lambda: TrainingPosition(step=7, time_s=1.5),
            marks=cast(TimeMarks, self),
            within_step=lambda: None,
            write=self._write,
            job=lambda: None,
            whole=lambda own, below, group: None,
            failed=lambda where, error: self._did(f"{where}: {error}"),
        )

    def at_wake(self) -> float:
        self._did("asked for marks")
        return 0.001

    def stop(self) -> None:
        self._did("no more marks")

    def _did(self, what: str) -> None:
        self.done.append(what)
        if self._stop_at(what):
            self.reached.set()

    def _write(self, sample: HostSampleLine) -> None:
        self.samples.append(sample)
        self._did("sample")


def sampled(quiet: Quiet) -> Quiet:
    """The sampler at work until the session has what it waits for."""
    quiet.sampler.start()
    assert quiet.reached.wait(30)
    quiet.sampler.stop()
    quiet.sampler.stop()
    assert not quiet.sampler._thread.is_alive
    return quiet


def test_it_samples_the_host_and_wakes_when_marks_are_due() -> None:
    wakes: list[str] = []
    quiet = sampled(Quiet(lambda what: what == "asked for marks" and len(wakes.append(what) or wakes) == 3))
    assert quiet.done[:4] == ["sample", *3 * ["asked for marks"]]
    assert quiet.done[-1] == "no more marks"
    (sample,) = quiet.samples  # of one instant: the next is due after five seconds
    assert (sample.time_s, sample.step) == (1.5, 7)
    assert (sample.rss or 0) > 0 and (sample.available or 0) > 0


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (None, (None, None, None, None)),
        (
            CgroupMemory(version=2, path="/", usage=70, limit=100, inactive_file=20, oom_kill=1),
            (70, 100, 20, 1),
        ),
    ],
)
@pytest.mark.parametrize(
    ("shares", "below"), [([], None), ([None], None), ([5, None, 7], 12)], ids=["no child", "unknown", "some"]
)
def test_a_sample_is_of_the_process_its_children_and_its_group(
    group: CgroupMemory | None,
    told: tuple[int | None, ...],
    shares: list[int | None],
    below: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "cgroup_memory", lambda: group)
    monkeypatch.setattr(
        sampler,
        "children",
        lambda: [ChildSample(pid=1, name="worker", rss=9, pss=share) for share in shares],
    )
    sample = Quiet(lambda what: False).sampler.sample()
    assert (
        sample.cgroup_usage, sample.cgroup_limit, sample.cgroup_reclaimable, sample.oom_kill,
    ) == told  # fmt: skip
    assert sample.children_pss == below


@pytest.mark.parametrize("error", [OSError("a file that vanished"), SystemExit("an audit hook")])
def test_a_sample_that_fails_does_not_end_the_sampler(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def raising(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(sampler, "host_sample", raising)
    monkeypatch.setattr(sampler, "descendants", lambda: [1])
    monkeypatch.setattr(sampler, "_WAKE_S", 0.001)
    quiet = sampled(Quiet(lambda what: what == "asked for marks"))
    assert quiet.done[0] == f"host sample: {error}"
