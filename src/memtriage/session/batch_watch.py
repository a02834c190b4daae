"""Follow how much memory batches need by size, and warn if one in the rest of the epoch will not fit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from memtriage.diagnose.longest_batch import (
    Batches,
    BatchSize,
    DrawnBatches,
    Needed,
    first_too_large,
    forecast,
    too_large_finding,
)
from memtriage.model.findings import Finding, Projection
from memtriage.model.position import TrainingPosition
from memtriage.observe import cuda, host
from memtriage.observe.cgroup import counted, host_limit
from memtriage.observe.counters import Reading
from memtriage.observe.loaders import Epoch, LoaderHook
from memtriage.observe.malloc import malloc_info
from memtriage.process.stdlib import time
from memtriage.session.death_watch import BATCHES
from memtriage.session.marks import MarkPoint
from memtriage.session.record import SessionRecord, never_raises
from memtriage.session.schedule.limits import device_limit


@dataclass(frozen=True, slots=True)
class FollowPolicy:
    """What is followed, and when it is judged.

    Attributes:
        settled: steps after which the optimizer has its state, and a step needs as much as later ones.
        kept: readings kept of each kind and device.
        first: readings before the first judgment. The next ones follow whenever the readings have doubled, an
            epoch begins, or a step has raised the peak.
        read_ahead: batches that a program may have taken before it trains on them.
        epochs: most passes over loaders at the same time.
        unlike: batches of a random order that may have an unexplained size: the last of an epoch is smaller.
        lengths_share: part of the time that reading lengths and orders may take.
    """

    settled: int = 1
    kept: int = 512
    first: int = 8
    read_ahead: int = 64
    epochs: int = 4
    unlike: int = 1
    lengths_share: float = 0.002


POLICY: Final = FollowPolicy()


@dataclass(slots=True)
class _Followed:
    """The pass over a loader that the program trains on.

    Attributes:
        epoch: the pass.
        batches: what it will give.
        done: backwards that have begun since. Unless there is one per batch, the pass is not understood.
        unlike: batches whose size the data set does not explain.
    """

    epoch: Epoch
    batches: Batches | DrawnBatches
    done: int = 0
    unlike: int = 0

    def batch(self, elements: int | None) -> BatchSize | None:
        """Return the size of the batch that a backward is of; None where that is not known."""
        if isinstance(self.batches, Batches):
            return self.batches.size(self.done - 1)
        found = None if elements is None else self.batches.of(elements)
        self.unlike += elements is not None and found is None
        return found

    def coming(self, seen: Iterable[Needed]) -> tuple[Batches, int] | None:
        """Return batches, and the number of the first that is still to come.

        In a random order that is only the longest batch, until it has come.
        """
        if isinstance(self.batches, Batches):
            return self.batches, self.done
        longest = self.batches.longest
        came = any(needed.batch.length >= longest.length for needed in seen)
        if came or self.done >= self.batches.batches or self.unlike > POLICY.unlike:
            return None
        return Batches.of(longest), 0


class BatchWatch:
    """Learns from the steps of an epoch what the rest of it will need.

    On a GPU two instants of a step are followed: the beginning of its backward, when all that was saved for
    it is there, and its peak, which is only known for steps that raise the allocator's highest peak. On a CPU
    only the first is followed, by malloc's counter. What counts is how much more is in use than at the end of
    the previous step, so that neither growth nor filling caches disturb the fit. Only the first micro-batch
    of a step is read: later ones also have gradients.

    Args:
        rank: whose findings they are.
        record: gets findings, and a note if something fails.
        say: takes one line of text when a batch will not fit.
        passes: gets each pass over a loader as well.
    """

    def __init__(
        self,
        rank: int | None,
        record: SessionRecord,
        say: Callable[[str], None],
        passes: Callable[[Epoch], None] = lambda epoch: None,
    ) -> None:
        self._rank = rank
        self.record = record
        self._say = say
        self._passes = passes
        self._hook = LoaderHook(self._begins)
        self._begun: deque[Epoch] = deque(maxlen=POLICY.epochs)
        self._followed: _Followed | None = None
        self._of_step: list[BatchSize] = []
        self._at_backward: dict[str, deque[Needed]] = {}
        self._at_peak: dict[str, deque[Needed]] = {}
        self._before: dict[str, int] = {}  # in use after the last step, if the next one will be read
        self._counters: dict[str, tuple[int, int]] = {}  # allocated and peak after the last step
        self._due_s = self._lengths_due_s = 0.0
        self._next_judgment = POLICY.first
        self._found: dict[str, Finding] = {}

    def install(self) -> None:
        """Follow passes over loaders. torch must be imported."""
        self._hook.install()

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    # --- while the program runs -----------------------------------------------------------------------------

    def _begins(self, epoch: Epoch) -> None:
        self._begun.append(epoch)
        self._passes(epoch)

    @never_raises
    def backward_begins(self, elements: int | None) -> None:
        """Take the batch of a backward that begins: the next one. Reads the counters now and then.

        Args:
            elements: number of elements of the batch, if read.
        """
        before, self._before = self._before, {}
        batch = self._next_batch(elements)
        if batch is None:
            return
        self._of_step.append(batch)
        if not before:
            return
        now = time.perf_counter()
        for device, nbytes in _in_use().items():
            if device in before:
                self._keep(self._at_backward, device, Needed(batch, nbytes - before[device]))
        self._due_s = BATCHES.next_s(now, 2 * (time.perf_counter() - now))

    def _next_batch(self, elements: int | None) -> BatchSize | None:
        """Return the size of the batch that a backward is of; None where that is not known."""
        followed = self._followed
        given = None if followed is None else followed.epoch.given
        if followed is None or given is None or given <= followed.done:
            self._followed = followed = self._another(followed)
            given = None if followed is None else followed.epoch.given
        if followed is None or given is None:
            return None
        more = isinstance(followed.batches, Batches) and followed.done >= len(followed.batches)
        if more or given - followed.done > POLICY.read_ahead:
            self._followed = None
            return None
        followed.done += 1
        return followed.batch(elements)

    def _another(self, before: _Followed | None) -> _Followed | None:
        """Return the newest pass over a loader, if it has given batches and they are known."""
        while self._begun:
            epoch = self._begun.pop()
            if not epoch.given:
                continue
            self._begun.clear()
            now = time.perf_counter()
            if now < self._lengths_due_s:
                return None
            self._lengths_due_s = math.inf  # if reading fails it is not tried again
            plan = epoch.plan()
            self._lengths_due_s = now + (time.perf_counter() - now) / POLICY.lengths_share
            if plan is None:
                return None
            again = before is not None and epoch.is_of(before.epoch)
            if not again:
                self._at_backward.clear()
                self._at_peak.clear()
                self._next_judgment = POLICY.first
            if plan.batches is not None:
                return _Followed(epoch, Batches(*plan.batches))
            if again or plan.size is None:  # the longest batch came in an earlier epoch
                return None
            return _Followed(epoch, DrawnBatches(plan.size, plan.lengths))
        return None

    def _keep(self, kind: dict[str, deque[Needed]], device: str, needed: Needed) -> None:
        kind.setdefault(device, deque(maxlen=POLICY.kept)).append(needed)

    @never_raises
    def at_mark(self, mark: MarkPoint) -> None:
        """Take the peaks of a complete step, and judge now and then. Called last at a mark."""
        if mark.name != "step":
            return
        step, of_step, self._of_step = mark.position.step, self._of_step, []
        higher = self._take_peaks(mark.readings, of_step if step > POLICY.settled else [])
        readings = max(map(len, self._at_backward.values()), default=0)
        begins = self._followed is not None and self._followed.done == 1
        if higher or begins or readings >= self._next_judgment:
            self._next_judgment = max(2 * readings, POLICY.first)
            self._judge(mark.position)
        due = step >= POLICY.settled and of_step and time.perf_counter() >= self._due_s
        self._before = _in_use() if due else {}

    def _take_peaks(self, readings: Iterable[Reading], of_step: list[BatchSize]) -> bool:
        """Return whether a step has raised a device's highest peak."""
        higher = False
        for reading in readings:
            peak = None if reading.counters is None else reading.counters.peak_allocated
            if peak is None or reading.allocated is None:
                continue
            allocated, highest = self._counters.get(reading.device, (0, peak))
            self._counters[reading.device] = reading.allocated, peak
            if peak > highest and of_step:
                largest = max(of_step, key=lambda batch: batch.volume)
                self._keep(self._at_peak, reading.device, Needed(largest, peak - allocated))
                higher = True
        return higher

    @never_raises
    def _judge(self, position: TrainingPosition) -> None:
        before, self._found = self._found, dict(self._too_large(position))
        for device, finding in self._found.items():
            if device not in before:
                self.record.findings([finding], final=False)
                self._say(f"{finding.mechanism}; {finding.evidence[0]}")

    def _too_large(self, position: TrainingPosition) -> Iterable[tuple[str, Finding]]:
        followed = self._followed
        if followed is None:
            return
        for device, seen in self._at_backward.items():
            limit, before = _limit_and_use(device)
            fits = [
                fit for fit in (forecast(seen), forecast(self._at_peak.get(device, ()))) if fit is not None
            ]
            if limit is None or before is None or not fits:
                continue
            coming = followed.coming(seen)
            ahead = None if coming is None else first_too_large(fits, *coming, limit - before)
            if coming is None or ahead is None:
                continue
            batches, since = coming
            full = Projection(device=device, limit=limit)
            if batches is followed.batches:
                steps = (ahead.batch - since) // max(1, position.microbatches_per_step)
                full = msgspec.structs.replace(full, step=position.step + 1 + steps)
            finding = too_large_finding(ahead, batches, before, full)
            finding.rank, finding.step = self._rank, position.step
            yield device, finding

    # --- at the end -----------------------------------------------------------------------------------------

    def findings(self, position: TrainingPosition) -> list[Finding]:
        """Return a finding for each device that a batch still to come would not fit on."""
        self._judge(position)
        return list(self._found.values())


def _in_use() -> dict[str, int]:
    """Return bytes in use by device: of the GPUs, else of malloc."""
    if cuda.initialized():
        counters = {f"cuda:{index}": cuda.counters(index).allocated for index in cuda.devices()}
        return {device: allocated for device, allocated in counters.items() if allocated is not None}
    info = malloc_info()
    return {} if info is None else {"cpu": info.in_use}


def _limit_and_use(device: str) -> tuple[int | None, int | None]:
    """Return the bytes that a device has, and those in use as its limit counts them.

    malloc's free memory is not in use: the next step takes it first.
    """
    if device.startswith("cuda:"):
        return device_limit(int(device[5:])), _in_use().get(device)
    info, used, limit = malloc_info(), host.in_use(), host_limit()
    if info is None or used is None:
        return limit.bytes, None
    return limit.bytes, max(0, counted(limit, used) - info.from_kernel) + info.in_use
