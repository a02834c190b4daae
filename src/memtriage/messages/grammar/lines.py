"""Strip the lines of a log of colors, timestamps, and the tags of ranks and workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
class LineSource:
    """Who wrote a line, by its tag.

    Attributes:
        name: the tag in words: `rank 3`, `pid 548`, `pod train-3`.
        rank: the rank, where the tag is one.
    """

    name: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log.

    Attributes:
        number: counted from 1.
        text: what is left of it.
        source: who wrote it; None without a tag.
        bare: nothing had been put in front of it.
    """

    number: int
    text: str
    source: LineSource | None
    bare: bool


def read_line(number: int, raw: str) -> LogLine:
    """Take a line apart. What is longer than is read together is cut: see `read_pieces`."""
    text = _CONTROLS.sub("", _ESCAPES.sub("", raw[:_LONGEST])).rstrip()
    source: LineSource | None = None
    at = 0
    for _ in range(8):  # a prefix has fewer parts
        prefix = _TIMES.match(text, at)
        if prefix is None:
            prefix = _TAGS.match(text, at)
            if prefix is None:
                break
            source = _more_telling(source, _source(prefix))
        at = prefix.end()
    return LogLine(number, text[at:], source, bare=at == 0)


def read_pieces(number: int, raw: str) -> Iterator[LogLine]:
    """Take a line of any length apart: as several lines of the same number if it is longer than is read."""
    while len(raw) > _LONGEST:
        at = raw.rfind(" ", _LONGEST - _CUT, _LONGEST) + 1 or _LONGEST
        yield read_line(number, raw[:at])
        raw = raw[at:]
    yield read_line(number, raw)


def read_lines(texts: Iterable[str], first: int = 1) -> list[LogLine]:
    """Take lines apart; `first` is the number of the first."""
    return [line for number, raw in enumerate(texts, first) for line in read_pieces(number, raw)]


def _source(tag: re.Match[str]) -> LineSource:
    parts = tag.groupdict()
    for name in ("torch", "word", "mpi", "srun", "tp"):
        if parts[name] is not None:
            return LineSource(f"rank {int(parts[name])}", int(parts[name]))
    if parts["pid"] is not None:
        return LineSource(f"{parts['ray'] or 'process'} {parts['pid']}".replace("  ", " "))
    return LineSource(f"pod {parts['pod']}" if parts["pod"] else parts["compose"])


def _more_telling(first: LineSource | None, second: LineSource) -> LineSource:
    return first if first is not None and (first.rank is not None or second.rank is None) else second
