"""Strip the lines of a log of colors, timestamps, and the tags of ranks and workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_LONGEST: Final = 16_384
"""Characters of a line that are read together. Messages are shorter than 3,000."""
_CUT: Final = 1024
"""Characters before that limit in which a line is cut at a space, if it has one there."""

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u200b\ufeff]")

_TIMES: Final = re.compile(
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?\]?:? *|"
    r"\[?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})?\]? *|"
    r"[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?: [\w.-]{1,64} kernel:)? *|"
    r"\[?\d\d:\d\d:\d\d(?:[.,]\d{1,6})?\]? *|"
    r"\[?[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{1,9} *|"
    r"\[ *\d{1,9}\.\d{6}\] *|"
    r"\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d \d{4}\] *|"
    r"(?:\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?(?=[ :|]))[ :|]*"
)
_TAGS: Final = re.compile(
    r"\[(?:rank|default|Rank|RANK|local_rank|GPU|gpu)[ =:]?(?P<torch>\d{1,6})\]:? *|"
    r"(?:rank|Rank|RANK)[ =:]?(?P<word>\d{1,6})[:|\]] *|"
    r"<?\[\d{1,6},(?P<mpi>\d{1,6})\](?:<std(?:err|out|diag)>)?:? *|"
    r" {0,6}(?P<srun>\d{1,6}): (?=.)|"
    r"\((?P<ray>[\w.:-]{1,80}?)?(?:_TP(?P<tp>\d{1,4})(?:_EP\d+)?)? ?"
    r"\(?pid=(?P<pid>\d{1,10})(?:, ip=[\w.:]{1,40})?\)"
    r"(?: \[repeated [^\]]{0,80}\])? *|"
    r"\[pod/(?P<pod>[\w.-]{1,120})/[\w.-]{1,80}\] *|"
    r"(?P<compose>[\w.-]{1,60}[-_]\d{1,5}) +\| +"
)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log.

    Attributes:
        number: counted from 1.
        text: what is left of it.
        source: who wrote it, by its tag: `rank 3`, `pid 548`, `pod train-3`; None without one.
        bare: nothing had been put in front of it.
    """

    number: int
    text: str
    source: str | None
    bare: bool


def read_line(number: int, raw: str) -> LogLine:
    """Take a line apart. What is longer than is read together is cut: see `read_lines`."""
    text = _CONTROLS.sub("", _ESCAPES.sub("", raw[:_LONGEST])).rstrip()
    source: str | None = None
    at = 0
    for _ in range(8):  # a prefix has fewer parts
        prefix = _TIMES.match(text, at)
        if prefix is None:
            prefix = _TAGS.match(text, at)
            if prefix is None:
                break
            named = _source(prefix)
            if source is None or (named.startswith("rank ") and not source.startswith("rank ")):
                source = named
        at = prefix.end()
    return LogLine(number, text[at:], source, bare=at == 0)


def read_lines(text: str, first: int = 1) -> Iterator[LogLine]:
    """Take the lines of a text apart, numbered from the first.

    A carriage return, as of progress bars, begins a line of the same number, and so does each piece of a line
    that is longer than is read.
    """
    for number, line in enumerate(text.removesuffix("\n").split("\n"), first):
        for part in line.rstrip("\r").split("\r"):
            while len(part) > _LONGEST:
                at = part.rfind(" ", _LONGEST - _CUT, _LONGEST) + 1 or _LONGEST
                yield read_line(number, part[:at])
                part = part[at:]
            yield read_line(number, part)


def _source(tag: re.Match[str]) -> str:
    parts = tag.groupdict()
    for name in ("torch", "word", "mpi", "srun", "tp"):
        if parts[name] is not None:
            return f"rank {int(parts[name])}"
    if parts["pid"] is not None:
        return f"{parts['ray'] or 'process'} {parts['pid']}".replace("  ", " ")
    return f"pod {parts['pod']}" if parts["pod"] else str(parts["compose"])
