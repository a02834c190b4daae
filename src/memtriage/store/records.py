"""The lines of a rank's record: what each type holds. Sizes in bytes, None where unknown.

A line is one JSON object; its key `t` names the type. Marks, findings and ledgers are the types of
`memtriage.model`; the others are here. Readers ignore types and keys that they do not know, so that an
older memtriage reads a newer record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from memtriage.model.bounds import Rank, Ranks, Seconds, Whole
from memtriage.model.evidence import CensusSeen, Readings, Role, Situation
from memtriage.model.findings import Finding, Verdict
from memtriage.model.judged import Judged
from memtriage.process.json_text import encode

SCHEMA: Final = 2
"""Version of the line format, written in every `start` line. Version 1 had no evidence of growth."""

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a line raises that is cut, garbled, out of bounds or nested without end."""

RecordKind = Literal[
    "start", "mark", "host", "finding", "ledger", "note", "end", "readings", "census", "role", "situation"
]
EVIDENCE: Final[Mapping[type[msgspec.Struct], RecordKind]] = {
    Readings: "readings",
    CensusSeen: "census",
    Role: "role",
    Situation: "situation",
}
"""Lines that growth is judged from; they have the types of `model.evidence`."""


class Start(msgspec.Struct, kw_only=True):
    """First line of a rank's record: who runs, where, and what its limits are.

    Attributes:
        schema: version of the line format.
        run_id, restart: name of the run, and which restart of it this is.
        rank, world_size, local_rank: of the launcher.
        pid: process id.
        pid_start: when the kernel started that process, in clock ticks since boot (field 22 of
            `/proc/PID/stat`), because pids are reused.
        host: host name.
        argv: the script and its arguments.
        python, torch: versions.
        time: Unix time at which the watch began, in seconds.
        host_limit: the smaller of the cgroup limit and the machine's memory.
    """

    schema: Whole = SCHEMA
    run_id: str = ""
    restart: Whole = 0
    rank: Rank | None = None
    world_size: Ranks = 1
    local_rank: Whole | None = None
    pid: Whole | None = None
    pid_start: Whole | None = None
    host: str | None = None
    argv: list[str] = msgspec.field(default_factory=list)
    python: str | None = None
    torch: str | None = None
    time: Seconds | None = None
    host_limit: Whole | None = None


class HostSampleLine(msgspec.Struct, kw_only=True):
    """Host memory at one instant, sampled slowly.

    Attributes:
        time_s: seconds since the watch began.
        step: completed optimizer steps.
        rss, pss: resident and proportional set of the process.
        children_pss: proportional set of its children, together.
        cgroup_usage, cgroup_limit: of the tightest cgroup above the process.
        cgroup_reclaimable: the part of `cgroup_usage` that is page cache the kernel can drop.
        oom_kill: how often that cgroup's out-of-memory killer has struck so far.
        available: what the machine could still hand out (`MemAvailable`).
    """

    time_s: Seconds | None = None
    step: Whole | None = None
    rss: Whole | None = None
    pss: Whole | None = None
    children_pss: Whole | None = None
    cgroup_usage: Whole | None = None
    cgroup_limit: Whole | None = None
    cgroup_reclaimable: Whole | None = None
    oom_kill: Whole | None = None
    available: Whole | None = None


class RecordedFinding(Finding, kw_only=True):
    """A finding as written by a rank.

    Attributes:
        final: True when the rank came to its end and this is its judgment; False for what was known
            while it still ran, which counts only if the rank never wrote final ones.
    """

    final: bool = False


class Note(msgspec.Struct, kw_only=True):
    """A sentence for the reader of the report."""

    text: str


def line_of(kind: RecordKind, record: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return a line of a record."""
    body = encode(record)
    return b'{"t":"%s"%s%s\n' % (kind.encode(), b"," if len(body) > 2 else b"", body[1:])


def failed(exit_code: int | None, exception: object) -> bool:
    """Whether a program failed by itself. A status from 129 to 192 stands for the signal that ended it."""
    return exception is not None if exit_code is None else exit_code != 0 and not 128 < exit_code <= 192


class End(msgspec.Struct, kw_only=True):
    """Last line of a rank's record, missing when the process was killed.

    Attributes:
        verdict: this rank's own verdict.
        steps: completed optimizer steps.
        exception: type and text of the exception that ended the script; None when there was none.
        exit_code: exit status of the script; None when unknown.
        time_s: seconds since the watch began.
        device_limits: bytes that this process's allocator may have of each device, as far as known, e.g.
            `{"cuda:0": 150754820096}`.
        passing: how far memory rose between two marks and fell again, by CUDA device.
        peak_allocated, peak_reserved: the allocator's own peaks, by CUDA device, since its start or since
            the script reset them.
        peak_rss: highest resident set of the process.
        judged: by device, what the judgment of growth rests on; None in records that do not say it.
    """

    verdict: Verdict
    steps: Whole = 0
    exception: str | None = None
    exit_code: Whole | None = None
    time_s: Seconds | None = None
    device_limits: dict[str, Whole] = msgspec.field(default_factory=dict)
    passing: dict[str, Whole] = msgspec.field(default_factory=dict)
    peak_allocated: dict[str, Whole] = msgspec.field(default_factory=dict)
    peak_reserved: dict[str, Whole] = msgspec.field(default_factory=dict)
    peak_rss: Whole | None = None
    judged: dict[str, Judged] | None = None
