"""A mark: a named instant of training with the counters read at it."""

from __future__ import annotations

import msgspec

from memtriage.model.bounds import Rank, Seconds, Whole


class Mark(msgspec.Struct, kw_only=True, gc=False):
    """Counters of one device at one named instant. Sizes in bytes; None if there is no such counter.

    Attributes:
        name: `backward` (end of a micro-batch), `step` (end of an optimizer step), `time`, `start`,
            `end`, or the name given to `memtriage.mark`.
        step: completed optimizer steps so far (a `step` mark counts its own).
        microbatch: completed backwards since the last step (a `backward` mark counts its own).
        rank: None in a run without ranks.
        time_s: seconds since the watch began.
        device: `cuda:N`, or `cpu`: then `allocated` is malloc's bytes in use, and `reserved` what malloc has
            from the kernel.
        allocated, reserved, requested: the allocator's counters.
        outside: device memory in use that this process's allocator did not reserve.
        host_rss: resident set of the process.
        host_pinned: bytes owned by the pinned-memory allocator.
    """

    name: str
    step: Whole
    microbatch: Whole
    rank: Rank | None
    time_s: Seconds
    device: str
    allocated: Whole | None = None
    reserved: Whole | None = None
    requested: Whole | None = None
    outside: Whole | None = None
    host_rss: Whole | None = None
    host_pinned: Whole | None = None
