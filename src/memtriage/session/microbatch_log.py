"""`memtriage run --per-microbatch`: a line of memory for every micro-batch, while the program runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memtriage.model.findings import Finding
from memtriage.model.paths import HolderPath
from memtriage.model.units import size
from memtriage.observe.counters import Reading


class MicrobatchLog:
    """Prints what each micro-batch leaves in use, and how much more that is than after the one before.

    Args:
        say: prints one line of text.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[str, int] = {}
        self._reported: set[tuple[str, HolderPath | str | None]] = set()

    def add(self, step: int, microbatch: int, readings: Sequence[Reading]) -> None:
        """Print the line of a complete micro-batch.

        Args:
            step: optimizer steps completed so far.
            microbatch: its number since then, from 1.
            readings: the counters. The CPU's are left out if a CUDA device is in use.
        """
        on_cuda = [reading for reading in readings if reading.device.startswith("cuda:")]
        shown = [self._in_words(reading) for reading in on_cuda or readings if reading.allocated is not None]
        if shown:
            self._say(f"step {step} micro-batch {microbatch}: {'; '.join(shown)}")

    def suspect(self, findings: Sequence[Finding]) -> None:
        """Print what looks like a leak so far, each once. By the end it may turn out not to be one."""
        for finding in findings:
            rate = finding.bytes_per_microbatch
            if rate is not None and (finding.device, finding.held_at) not in self._reported:
                self._reported.add((finding.device, finding.held_at))
                until = "" if finding.projection is None else f"; {finding.projection}"
                self._say(
                    f"grows by {size(rate)} per micro-batch on {finding.device}: {finding.holder}{until}"
                )

    def _in_words(self, reading: Reading) -> str:
        assert reading.allocated is not None
        before = self._before.get(reading.device)
        self._before[reading.device] = reading.allocated
        change = reading.allocated - (before or 0)
        more = "" if before is None else f" ({'' if change < 0 else '+'}{size(change)})"
        reserved = "" if reading.reserved is None else f", {size(reading.reserved)} reserved"
        return f"{reading.device} {size(reading.allocated)} allocated{more}{reserved}"
