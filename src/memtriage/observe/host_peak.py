"""The highest resident set during a call: the kernel's high-water mark, or samples if it cannot be reset."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from memtriage.observe.host import SELF, host_peak, rss
from memtriage.process.stdlib import threading
from memtriage.process.threads import OwnThread

_SAMPLED_EVERY_S: Final = 0.002
_SLACK: Final = 64 << 20
"""After a reset the mark must be this near the resident set, else the kernel did not reset it. It need not be
equal, because counters of the resident set are batched per processor."""


class PeakMeter:
    """Measures between `start` and `stop`. Meters may be nested: an inner reset does not hide a peak.

    Resetting the mark (writing `5` to `/proc/self/clear_refs`) lowers `VmHWM` for every reader. If that is
    forbidden, a thread samples the resident set.

    Args:
        proc: the process's folder in `/proc`.
    """

    def __init__(self, proc: Path = SELF) -> None:
        self._proc = proc
        self.source: Literal["kernel", "sampled"] = "kernel"
        self._highest = 0
        self._stop = threading.Event()
        self._thread: OwnThread | None = None

    def start(self) -> None:
        """Begin."""
        _note_peak()
        self._highest = rss() or 0
        _running.append(self)
        if not _reset(self._proc):
            self.source = "sampled"
            self._thread = OwnThread(self._sample)
            self._thread.start()

    def stop(self) -> int:
        """End; the peak in bytes."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        else:
            _note_peak()
        self.note(rss() or 0)
        _running.remove(self)
        return self._highest

    def note(self, resident: int) -> None:
        """Note a figure that was reached while this meter ran."""
        self._highest = max(self._highest, resident)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLED_EVERY_S):
            self.note(rss() or 0)


_running: Final[list[PeakMeter]] = []


def _note_peak() -> None:
    """Pass the kernel's mark to the running meters before it is reset."""
    highest = host_peak() or 0
    for meter in _running:
        if meter.source == "kernel":
            meter.note(highest)


def _reset(proc: Path) -> bool:
    """Set the kernel's high-water mark to the current resident set; return whether that worked."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    highest, now = host_peak(proc), rss()
    return highest is not None and now is not None and abs(highest - now) < _SLACK
