"""Finds every message about memory in some lines of a log, whoever wrote it and however it was wrapped."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Final

from memtriage.messages.grammar import accelerators, aftermath, allocation, devices, engines, host
from memtriage.messages.grammar.lines import LineSource, LogLine, read_lines
from memtriage.messages.grammar.message import ALLOCATORS, Grammar, Message
from memtriage.model.explanation import Field

_GRAMMARS: Final = (
    *accelerators.GRAMMARS,
    *devices.GRAMMARS,
    *host.GRAMMARS,
    *engines.GRAMMARS,
    *aftermath.GRAMMARS,
    *allocation.GRAMMARS,
)
_TIGHT: Final = tuple(grammar for grammar in _GRAMMARS if grammar.tight)
_LOOSE: Final = tuple(grammar for grammar in _GRAMMARS if not grammar.tight)

_LONGEST: Final = 4096
"""Characters without white space that a message can take; a full one of CUDA's has about 900."""
_TOGETHER: Final = 600
"""Two messages of one family within so many characters that do not contradict each other are one."""
_SAME_SIZE: Final = 8 * 1024
"""Bytes by which two prints of one size can differ: the last digit of a figure in MiB is 10 KiB."""
_EXCERPT: Final = 400
_BEFORE: Final = 40
"""Characters of an excerpt before the message, if that is far from the line's beginning."""
_TRACEBACK_LINES: Final = 400

_FRAME: Final = re.compile(r'^\s*File "([^"]{1,300})", line (\d{1,7}), in (\S{1,100})')
_WORDS_IN_MIDDLE: Final = frozenset({"Triedtoallocate"})


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message and where it stood.

    Attributes:
        message: what it says.
        line: number of the line on which it begins.
        source: who wrote it; None without a tag.
        excerpt: that line, shortened.
        frames: (file, function, line) of the traceback above it, innermost first.
    """

    message: Message
    line: int
    source: LineSource | None
    excerpt: str
    frames: tuple[tuple[str, str, int], ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, by the line's tag or by the message itself."""
        if self.source is not None and self.source.rank is not None:
            return self.source.rank
        rank = self.message.facts.get("rank", self.message.facts.get("local_rank"))
        return rank if isinstance(rank, int) else None


class _Text:
    """The lines of one source, from one on, as one text, and the line of each of its characters."""

    def __init__(self, lines: Sequence[LogLine], skip: int, *, tight: bool) -> None:
        pieces = ["".join(line.text.split()) if tight else f"{line.text}\n" for line in lines[skip:]]
        self.text = "".join(pieces)
        self._starts = [0, *accumulate(len(piece) for piece in pieces)]
        self._tight = tight
        self._skip = skip
        self._last = len(lines) - 1

    def line_at(self, position: int) -> int:
        """Index of the line that has the character at a position."""
        return min(bisect_right(self._starts, position) - 1 + self._skip, self._last)

    def excerpt(self, lines: Sequence[LogLine], position: int) -> str:
        """Return the line that has the character at a position, shortened to what begins there."""
        at = self.line_at(position)
        text = lines[at].text
        before = position - self._starts[at - self._skip]
        if self._tight:  # the white space of the line does not count
            before = next(
                islice((place for place, char in enumerate(text) if not char.isspace()), before, None), 0
            )
        if before > _EXCERPT // 2:
            text = f"...{text[before - _BEFORE :]}"
        text = text.strip()
        return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def find(text: str | Sequence[LogLine], begin: int = 0) -> list[FoundMessage]:
    """Return every message in a text or in lines of a log, in order of their lines.

    Lines with another tag in between do not matter: each source's lines are read by themselves. A line
    without a tag goes on with the line before it, unless a message begins on it.

    Args:
        text: the text, or its lines.
        begin: number of the first line on which messages are looked for; those before it are only read for
            tracebacks.
    """
    lines = read_lines(text.splitlines()) if isinstance(text, str) else text
    hits = [hit for stream in _streams(lines, begin) for hit in _find_in(stream, begin)]
    if any(hit.message.ran_out for hit in hits):
        hits = [hit for hit in hits if hit.message.family != "mention"]
    return sorted(hits, key=lambda hit: hit.line)


def _streams(lines: Sequence[LogLine], begin: int) -> list[list[LogLine]]:
    streams: dict[LineSource | None, list[LogLine]] = {}
    current: LineSource | None = None
    before = ""
    for line in lines:
        if line.source is not None:
            current = line.source
        elif current is not None and (
            not line.bare or (line.number >= begin and _begins_message(before, line.text))
        ):
            current = None
        streams.setdefault(current, []).append(line)
        before = line.text
    return list(streams.values())


def _begins_message(before: str, text: str) -> bool:
    """Whether a message begins on a line, and not on the line before it, there being no wrap inside of it."""
    boundary = len("".join(before.split()))
    joined = "".join(before.split()) + "".join(text.split())
    starts = [
        start
        for grammar in _TIGHT
        for start in grammar.start.finditer(joined)
        if start.end() > boundary and start[0] not in _WORDS_IN_MIDDLE
    ]
    if starts:
        return min(start.start() for start in starts) >= boundary
    # Words that any runtime uses may as well be the middle of a message that is wrapped.
    return any(grammar.start.search(text) for grammar in _LOOSE if grammar not in allocation.GRAMMARS)


def _find_in(lines: Sequence[LogLine], begin: int) -> list[FoundMessage]:
    """Yield the messages of one source."""
    skip = next((index for index, line in enumerate(lines) if line.number >= begin), len(lines))
    if skip == len(lines):
        return []
    tight = _Text(lines, skip, tight=True)
    spans = _read_all(tight.text, _TIGHT)
    if not any(message.family in ALLOCATORS for _, _, message in spans):
        spans += _read_all(tight.text, (accelerators.HEADLESS,))
    messages: list[FoundMessage] = []
    covered: set[int] = set()
    for start, end, message in spans:
        first, last = tight.line_at(start), tight.line_at(max(start, end - 1))
        covered.update(range(first, last + 1))
        messages.append(_found(message, lines, first, tight.excerpt(lines, start)))
    loose = _Text(lines, skip, tight=False)
    for start, message in _loose_at(loose, _LOOSE, covered):
        messages.append(_found(message, lines, loose.line_at(start), loose.excerpt(lines, start)))
        covered.add(loose.line_at(start))
    mentions = _loose_at(loose, (allocation.MENTION,), covered)
    return messages + [
        _found(message, lines, loose.line_at(start), loose.excerpt(lines, start))
        for start, message in mentions
    ]


def _loose_at(text: _Text, grammars: Sequence[Grammar], covered: set[int]) -> list[tuple[int, Message]]:
    """Messages of lines that are no part of another, and where each one begins."""
    # A match may begin with the line break before it.
    starts = [
        (start + (text.text[start] == "\n"), message) for start, _, message in _read_all(text.text, grammars)
    ]
    return [(start, message) for start, message in starts if text.line_at(start) not in covered]


def _found(message: Message, lines: Sequence[LogLine], at: int, excerpt: str) -> FoundMessage:
    line = lines[at]
    return FoundMessage(
        message,
        line.number,
        line.source,
        excerpt,
        _frames_above(lines, at) if message.ran_out else (),
    )


def _read_all(text: str, grammars: Sequence[Grammar]) -> list[tuple[int, int, Message]]:
    """Start, end and content of every message, none inside of another."""
    starts = [
        (match.start(), order, grammar, match)
        for order, grammar in enumerate(grammars)
        for match in grammar.start.finditer(text)
    ]
    starts.sort(key=lambda start: start[:2])
    positions = [at for at, *_ in starts]
    spans: list[tuple[int, int, Message]] = []
    for number, (at, _, grammar, match) in enumerate(starts):
        if spans and at < spans[-1][1]:
            continue
        later = bisect_left(positions, match.end(), number + 1)
        bound = positions[later] if later < len(positions) else len(text)
        message = grammar.read(match, text[at : min(bound, at + _LONGEST)])
        if message is None:
            continue
        message = replace(message, length=message.length or len(match[0]))
        end = at + max(message.length, len(match[0]))
        before = spans[-1] if spans else None
        if before is not None and at - before[1] <= _TOGETHER and (one := _as_one(before[2], message)):
            spans[-1] = (before[0], end, one)
        else:
            spans.append((at, end, message))
    return spans


def _as_one(first: Message, second: Message) -> Message | None:
    """Two messages as one; None where they contradict each other."""
    differ = (first.form and second.form and first.form != second.form) or (
        first.device and second.device and first.device != second.device
    )
    if differ or first.family != second.family:
        return None
    if first.family == "aftermath":
        return first if first.form == second.form else None
    if any(name in second.facts and second.facts[name] != value for name, value in first.facts.items()):
        return None
    if any(
        name in second.fields and _differ(second.fields[name], value) for name, value in first.fields.items()
    ):
        return None
    missing = tuple(name for name in first.missing if name not in second.fields)
    return replace(
        first,
        form=first.form or second.form,
        fields={**second.fields, **first.fields},
        facts={**first.facts, **second.facts},
        device=first.device or second.device,
        missing=missing,
        ran_out=first.ran_out or second.ran_out,
    )


def _differ(first: Field, second: Field) -> bool:
    """Whether two figures contradict each other: one layer prints MiB and the next the bytes."""
    if isinstance(first, int) and isinstance(second, int):
        return abs(first - second) > _SAME_SIZE
    return first != second


def _frames_above(lines: Sequence[LogLine], at: int) -> tuple[tuple[str, str, int], ...]:
    """Return the frames of the traceback that ends at a line, innermost first."""
    frames: list[tuple[str, str, int]] = []
    for line in reversed(lines[max(0, at - _TRACEBACK_LINES) : at]):
        if line.text.lstrip().startswith("Traceback (most recent call last)"):
            break
        if match := _FRAME.match(line.text):
            frames.append((match[1], match[3], int(match[2])))
    return tuple(frames)
