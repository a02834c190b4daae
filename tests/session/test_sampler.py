"""The thread that samples the host, and makes marks where nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from memtriage.model.position import TrainingPosition
from memtriage.session import sampler
from memtriage.session.host_watch import HostWatch
from memtriage.session.sampler import Sampler
from memtriage.store.records import HostSample


class Quiet:
    """A session in which nothing happens, and that notes what the sampler does.

    Args:
        quiet_s: seconds since the last mark, as the sampler is given them.
        stop_at: whether the sampler has done what the test waits for.
    """

    def __init__(self, quiet_s: float, stop_at: Callable[[str], bool]) -> None:
        self.done: list[str] = []
        self.samples: list[HostSample] = []
        self.reached = threading.Event()
        self._stop_at = stop_at
        self.sampler = Sampler(
            HostWatch(),
            now=lambda: TrainingPosition(step=7, time_s=1.5),
            since_mark=lambda: quiet_s,
            mark=lambda: self._did("time"),
            write=self._write,
            failed=lambda where, error: self._did(f"{where}: {error}"),
        )

    def _did(self, what: str) -> None:
        self.done.append(what)
        if self._stop_at(what):
            self.reached.set()

    def _write(self, sample: HostSample) -> None:
        self.samples.append(sample)
        self._did("sample")


def sampled(quiet: Quiet, monkeypatch: pytest.MonkeyPatch) -> Quiet:
    """The sampler at work until the session has what it waits for."""
    monkeypatch.setattr(sampler, "_WAKE_S", 0.001)
    quiet.sampler.start()
    assert quiet.reached.wait(30)
    quiet.sampler.stop()
    quiet.sampler.stop()
    assert not quiet.sampler._thread.is_alive
    return quiet


def test_where_no_marks_are_made_the_sampler_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = sampled(Quiet(5.0, lambda what: what == "time"), monkeypatch)
    assert quiet.done[:2] == ["sample", "time"]
    (sample,) = quiet.samples  # of one instant: the next is due after five seconds
    assert (sample.time_s, sample.step) == (1.5, 7)
    assert (sample.rss or 0) > 0 and (sample.available or 0) > 0


def test_where_marks_are_made_the_sampler_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = sampled(Quiet(0.5, lambda what: what == "sample"), monkeypatch)
    assert "time" not in quiet.done


def test_a_sample_that_fails_does_not_end_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Any) -> Any:
        raise OSError("a file that vanished")

    monkeypatch.setattr(sampler, "host_sample", raising)
    quiet = sampled(Quiet(5.0, lambda what: what == "time"), monkeypatch)
    assert quiet.done[0] == "host sample: a file that vanished"
