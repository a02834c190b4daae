"""Learn how much of a device a phase needs from its earlier rounds, and prime memory for the next one.

When a phase begins on an emptied device, the sizes of segments depend on what it happens to request first.
Later allocations that stay (optimizer states, refilled caches) split the large ones, and the next large
request takes a new segment. In two large segments, free blocks stay next to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from memtriage.allocator.settings import SEGMENT_STEP
from memtriage.model.units import MIB
from memtriage.observe import cuda
from memtriage.treat.priming import CudaBlocks

SPARE: Final = 8
"""1/8 of what the phase makes is added. With 1/16, some steps of cases/fp8_refit reserve more."""
_LEFT_FREE: Final = 16
"""1/16 of the device stays free for NCCL and others that do not allocate from torch."""
_LEAST: Final = 256 * MIB
"""Priming with less is not worth it."""


@dataclass(slots=True)
class Need:
    """What one phase needs of one device, in bytes.

    Attributes:
        made: most bytes that it allocated in addition to what was allocated at its beginning, or parked then
            and coming back; None if not known.
        primed: bytes primed in the current round.
        returned: whether the primed memory was returned at the end of every round so far.
    """

    made: int | None = None
    primed: int = 0
    returned: bool = True
    _expected: int = 0
    _peak: int = 0

    def begin(self, allocated: int, peak: int, coming: int) -> None:
        """Begin a round.

        Args:
            peak: their highest value so far.
            coming: parked bytes that come back during the phase.
        """
        self._expected, self._peak = allocated + coming, peak
        self.primed = 0

    def blocks(self, reserved: int, free: int, memory: int) -> list[int]:
        """Sizes of the blocks to allocate and free, one after the other; empty if priming does not help.

        There are two, so that each is smaller than what the phase allocates and priming does not raise the
        peak. The second one does not fit into the segment of the first.
        """
        if self.made is None or not self.returned:
            return []
        wanted = self._expected + self.made + self.made // SPARE - reserved
        half = min(wanted, free - memory // _LEFT_FREE) // 2 // SEGMENT_STEP * SEGMENT_STEP
        return [half, half + SEGMENT_STEP] if 2 * half >= _LEAST else []

    def end(self, peak: int) -> None:
        """Learn from a round that ends, before anything leaves the device.

        Args:
            peak: highest allocated bytes until now. If the phase has not raised it, it needed no more; if it
                is lower than at the beginning, the counter was reset meanwhile.
        """
        made = max(0, peak - self._expected)
        if peak > self._peak:
            self.made = made
        elif peak == self._peak and self.made is not None:
            self.made = min(self.made, made)

    def left(self, stranded: int) -> None:
        """Note what the end could not return: priming must not make that worse."""
        if self.primed and stranded > self.primed // SPARE:
            self.returned = False


_needs: Final[dict[tuple[str, int], Need]] = {}
"""The needs, by phase and device."""


def begin(phase: str, coming: Mapping[int, int], *, prime: bool) -> dict[int, Need] | None:
    """Begin a phase: prime each device in use for its known needs.

    Args:
        coming: parked bytes that come back during the phase, by device.
        prime: False to only learn.

    Returns:
        Its needs by device, to be updated at its end; None if nothing can be learned now.
    """
    if cuda.initialized() and not _learns():
        return None
    needs = {}
    for device in cuda.devices():
        now = cuda.counters(device)
        if now.allocated is None or now.reserved is None or now.peak_allocated is None:
            continue
        need = needs[device] = _needs.setdefault((phase, device), Need())
        need.begin(now.allocated, now.peak_allocated, coming.get(device, 0))
        if prime:
            from memtriage.treat.device.cuda import CudaDevice

            blocks = need.blocks(now.reserved, CudaDevice(device).available(), cuda.capacity(device) or 0)
            need.primed = in_turn(blocks, CudaBlocks(device))
    return needs


def _learns() -> bool:
    """Whether figures mean what they do without a capture, and later requests can use a large free block:
    segments are not expandable, and it may be split."""
    if cuda.capturing() or cuda.backend() != "native":
        return False
    return not cuda.expandable_segments() and cuda.splits_any_block()


def end(phase: str, needs: dict[int, Need]) -> None:
    """Learn at the end of a phase, before anything leaves the devices.

    Args:
        phase: its name.
        needs: the result of `begin`. A device that was first used during the phase is added: it began with
            nothing.
    """
    first_used = [device for device in cuda.devices() if device not in needs]
    for device in first_used if _learns() else ():
        needs[device] = _needs.setdefault((phase, device), Need())
        needs[device].begin(0, 0, 0)
    for device, need in needs.items():
        peak = cuda.counters(device).peak_allocated
        if peak is not None:
            need.end(peak)


def left(needs: Mapping[int, Need]) -> None:
    """Note what is left after everything possible has left the devices. `needs` is the result of `begin`."""
    for device, need in needs.items():
        now = cuda.counters(device)
        if now.allocated is not None and now.reserved is not None:
            need.left(now.reserved - now.allocated)


def in_turn(sizes: list[int], source: CudaBlocks) -> int:
    """Allocate and free blocks one after the other; return their bytes, 0 if memory does not suffice.

    In that case all memory is returned.
    """
    try:
        for size in sizes:
            source.free(source.allocate(size))
    except (MemoryError, RuntimeError):  # torch.OutOfMemoryError is a RuntimeError
        source.give_back()
        return 0
    return sum(sizes)
