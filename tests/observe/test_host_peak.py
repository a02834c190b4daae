"""The peak of a block: by the kernel's mark, or by samples; nested blocks hide nothing from outer ones."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from memtriage.observe.host import rss
from memtriage.observe.host_peak import PeakMeter

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")


def spike(nbytes: int) -> None:
    """Pages of the kernel's own: malloc may serve from free pages that other tests have left in its heap."""
    with mmap.mmap(-1, nbytes) as pages:
        for page in range(0, nbytes, mmap.PAGESIZE):
            pages[page] = 1


def test_a_spike_between_start_and_stop_is_seen() -> None:
    spike(100 * MIB)  # an earlier one counts for nothing
    meter = PeakMeter()
    meter.start()
    before = rss() or 0
    spike(50 * MIB)
    peak = meter.stop()
    assert meter.source == "kernel"
    assert 40 * MIB < peak - before < 80 * MIB


def test_an_inner_meter_hides_no_peak_of_the_outer_one() -> None:
    outer, inner = PeakMeter(), PeakMeter()
    outer.start()
    before = rss() or 0
    spike(50 * MIB)
    inner.start()
    assert inner.stop() - before < 40 * MIB
    assert outer.stop() - before > 40 * MIB


def test_where_the_mark_cannot_be_reset_samples_stand_in(tmp_path: Path) -> None:
    meter = PeakMeter(tmp_path / "gone")
    meter.start()
    kept = bytearray(b"x") * (30 * MIB)
    assert meter.stop() >= (rss() or 0) - MIB
    assert meter.source == "sampled"
    assert kept[0] == ord("x")


def test_a_reset_that_does_nothing_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(f"VmHWM:\t{(500 << 30) >> 10} kB\n")
    meter = PeakMeter(tmp_path)
    meter.start()
    meter.stop()
    assert meter.source == "sampled"
