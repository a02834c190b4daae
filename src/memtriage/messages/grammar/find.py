"""Finds every message about memory in some lines of a log, whoever wrote it and however it was wrapped."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Final

from memtriage.messages.grammar import accelerators, allocation, devices, host
from memtriage.messages.grammar.lines import LogLine, read_lines
from memtriage.messages.grammar.message import ALLOCATORS, Grammar, Message
from memtriage.model.explanation import Label

_GRAMMARS: Final = (
    *accelerators.GRAMMARS,
    *devices.GRAMMARS,
    *host.GRAMMARS,
    *devices.ENGINES,
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


@dataclass(frozen=True, slots=True)
class FoundMessage:
    """A message and where it stood.

    Attributes:
        message: what it says.
        line: number of the line on which it begins.
        source: who wrote it; None without a tag.
        excerpt: that line, shortened.
        frames: (file, function, line) of the traceback above it, innermost first.
        labels: what it proves, then what it cannot rule out; empty until it is judged.
    """

    message: Message
    line: int
    source: str | None
    excerpt: str
    frames: tuple[tuple[str, str, int], ...] = ()
    labels: tuple[Label, ...] = ()

    @property
    def label(self) -> Label | None:
        return self.labels[0] if self.labels else None

    @property
    def rank(self) -> int | None:
        """The rank that wrote it, by the line's tag or by the message itself."""
        if self.source is not None and self.source.startswith("rank "):
            return int(self.source.removeprefix("rank "))
        return self.message.number("rank" if "rank" in self.message.facts else "local_rank")


class _Text:
    """The lines of one source as one text, and the line of each of its characters."""

    def __init__(self, lines: Sequence[LogLine], *, tight: bool) -> None:
        pieces = ["".join(line.text.split()) if tight else f"{line.text}\n" for line in lines]
        self.text = "".join(pieces)
        self._lines = lines
        self._starts = [0, *accumulate(len(piece) for piece in pieces)]
        self._tight = tight

    def line_at(self, position: int) -> int:
        """Index of the line that has the character at a position."""
        return min(bisect_right(self._starts, position), len(self._lines)) - 1

    def found(self, position: int, message: Message) -> FoundMessage:
        """Add to a message where it begins, and the line there, shortened."""
        at = self.line_at(position)
        line = self._lines[at]
        text, before = line.text, position - self._starts[at]
        if self._tight:  # the white space of the line does not count
            before = next(
                islice((place for place, char in enumerate(text) if not char.isspace()), before, None), 0
            )
        if before > _EXCERPT // 2:
            text = f"...{text[before - _BEFORE :]}"
        text = text.strip()
        excerpt = text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
        frames = _frames_above(self._lines, at) if message.ran_out else ()
        return FoundMessage(message, line.number, line.source, excerpt, frames)


def find(text: str | Sequence[LogLine]) -> list[FoundMessage]:
    """Return every message in a text or in lines of a log, in order of their lines.

    Lines with another tag in between do not matter: each source's lines are read by themselves. A line
    without a tag goes on with the line before it, unless a message begins on it.
    """
    lines = list(read_lines(text)) if isinstance(text, str) else text
    hits = [hit for stream in _streams(lines) for hit in _find_in(stream)]
    if any(hit.message.ran_out for hit in hits):
        hits = [hit for hit in hits if hit.message.family != "mention"]
    return sorted(hits, key=lambda hit: hit.line)


def _streams(lines: Sequence[LogLine]) -> list[list[LogLine]]:
    streams: dict[str | None, list[LogLine]] = {}
    current: str | None = None
    before = ""
    for line in lines:
        if line.source is not None:
            current = line.source
        elif current is not None and (not line.bare or _begins_message(before, line.text)):
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
        if start.end() > boundary and start[0] != "Triedtoallocate"
    ]
    if starts:
        return min(start.start() for start in starts) >= boundary
    # Words that any runtime uses may as well be the middle of a message that is wrapped.
    return any(grammar.start.search(text) for grammar in _LOOSE if grammar not in allocation.GRAMMARS)


def _find_in(lines: Sequence[LogLine]) -> list[FoundMessage]:
    tight, loose = _Text(lines, tight=True), _Text(lines, tight=False)
    spans = _read_all(tight.text, _TIGHT)
    if not any(message.family in ALLOCATORS for _, _, message in spans):
        spans += _read_all(tight.text, (accelerators.HEADLESS,))
    found = [tight.found(start, message) for start, _, message in spans]
    covered: set[int] = set()
    for start, end, _ in spans:
        covered.update(range(tight.line_at(start), tight.line_at(max(start, end - 1)) + 1))
    for grammars in (_LOOSE, (allocation.MENTION,)):
        # A match may begin with the line break before it.
        begins = [
            (start + (loose.text[start] == "\n"), message)
            for start, _, message in _read_all(loose.text, grammars)
        ]
        begins = [(start, message) for start, message in begins if loose.line_at(start) not in covered]
        found += [loose.found(start, message) for start, message in begins]
        covered.update(loose.line_at(start) for start, _ in begins)
    return found


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
    if differ or first.family != second.family or first.ran_out != second.ran_out:
        return None
    if first.family == "aftermath":
        return first if first.form == second.form else None
    if any(name in second.facts and second.facts[name] != value for name, value in first.facts.items()):
        return None
    for name in first.fields.keys() & second.fields.keys():
        one, other = first.fields[name], second.fields[name]
        # One layer prints MiB and the next the bytes.
        alike = isinstance(one, int) and isinstance(other, int) and abs(one - other) <= _SAME_SIZE
        if one != other and not alike:
            return None
    missing = tuple(name for name in first.missing if name not in second.fields)
    return replace(
        first,
        form=first.form or second.form,
        fields={**second.fields, **first.fields},
        facts={**first.facts, **second.facts},
        device=first.device or second.device,
        missing=missing,
    )


def _frames_above(lines: Sequence[LogLine], at: int) -> tuple[tuple[str, str, int], ...]:
    """Return the frames of the traceback that ends at a line, innermost first."""
    frames: list[tuple[str, str, int]] = []
    for line in reversed(lines[max(0, at - _TRACEBACK_LINES) : at]):
        if line.text.lstrip().startswith("Traceback (most recent call last)"):
            break
        if match := _FRAME.match(line.text):
            frames.append((match[1], match[3], int(match[2])))
    return tuple(frames)
