"""Read the events of a snapshot straight from the bytes of its pickle, without an object for each.

A recording is a million dictionaries of one shape: the same keys in the same order, numbers, references to
a few action names, and a list of references to frames. Here such events are taken out of the byte stream,
all at once, as columns. What is left is a small pickle in which `None` takes the places of their objects in
the memo, so that every other reference still means the same; the restricted unpickler reads it as any other.

Known limitations: protocols 4 and 5 as `pickle.dump` writes them, and the first device that has events. What
does not fit is left where it is, and at worst nothing is taken out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtriage.allocator.trace_columns import PackedColumns
from memtriage.model.recording import EVENT_KINDS

Longs = NDArray[np.int64]
Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]

_PAD: Final = 16
"""Zero bytes behind the stream, so that eight bytes can be read anywhere."""
_WORTH: Final = 20_000
"""Bytes of a stream below which taking events out saves nothing."""
_FEWEST: Final = 64
_ROUNDS: Final = 4
"""Times that events go back into the stream because something left there refers to what they made."""

_FRAME: Final = 0x95
_MEMOIZE: Final = 0x94
_STRING: Final = 0x8C
_LONG: Final = 0x8A
_REF: Final = 0x68
_LONG_REF: Final = 0x6A
_LIST: Final = 0x5D
_DICT: Final = 0x7D
_MARK: Final = 0x28
_APPENDS: Final = 0x65
_APPEND: Final = 0x61
_SETITEMS: Final = 0x75
_STOP: Final = 0x2E

_FIXED: Final = {
    **dict.fromkeys(b"]}()ueastN0\x94\x85\x86\x87\x88\x89.", 1),
    **dict.fromkeys(b"Kh\x80", 2),
    **dict.fromkeys(b"M", 3),
    **dict.fromkeys(b"Jj", 5),
    **dict.fromkeys(b"G", 9),
}
"""Length of the opcodes that have a fixed one."""
_NUMBERS: Final = (ord("K"), ord("M"), ord("J"))
_CODES: Final = {name: code for code, name in enumerate(EVENT_KINDS)}
_COLUMNS: Final = ("addr", "size", "stream", "time_us")
_NEEDED: Final = ("action", *_COLUMNS, "frames")
_TRACES: Final = re.compile(rb"\x8c\x0ddevice_traces\x94\]\x94\(?((?:\]\x94)+)\(", re.DOTALL)


class _UnlikeAnyError(Exception):
    """The stream has an opcode or a form that snapshots do not have."""


@dataclass(slots=True)
class _OpcodeWalker:
    """Steps through opcodes one by one, counting what is put into the memo.

    Attributes:
        body: the stream.
        memo: objects in the memo so far.
        names: the strings among them, by index.
        refs: indices that were referred to.
    """

    body: bytes
    memo: int = 0
    names: dict[int, str] = field(default_factory=dict)
    refs: list[int] = field(default_factory=list)

    def tokens(self, position: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Opcode, first byte and first byte behind of each token in a range."""
        body = self.body
        text: str | None = None
        while position < end:
            code = body[position]
            length = _FIXED.get(code)
            string: str | None = None
            if length is None:
                if code == _STRING:
                    length = 2 + body[position + 1]
                    string = body[position + 2 : position + length].decode(errors="replace")
                elif code == _LONG:
                    length = 2 + body[position + 1]
                elif code == ord("X"):
                    length = 5 + int.from_bytes(body[position + 1 : position + 5], "little")
                else:
                    raise _UnlikeAnyError
            elif code == _MEMOIZE:
                if text is not None:
                    self.names[self.memo] = text
                self.memo += 1
            elif code == _REF:
                self.refs.append(body[position + 1])
            elif code == _LONG_REF:
                self.refs.append(int.from_bytes(body[position + 1 : position + 5], "little"))
            text = string
            yield code, position, position + length
            position += length
        if position != end:
            raise _UnlikeAnyError

    def events(self, position: int, end: int) -> tuple[int, bool]:
        """Step through a stretch of a trace's list; returns its events, and if the list goes on after it."""
        depth = events = 0
        for code, _, _ in self.tokens(position, end):
            if depth < 0 and code != _MARK:
                depth = -2
                break
            if code == _MARK:
                depth += 1
            elif code in (_SETITEMS, _APPENDS):
                depth -= 1
            elif code == _DICT and depth == 0:
                events += 1
        return events, depth == 0


@dataclass(frozen=True, slots=True)
class Packed:
    """A stream without the events that were taken out.

    Attributes:
        rest: a pickle of a pair: the snapshot without those events, and the lists of frames that they name.
        trace: index of the trace that they are from.
        columns: the events.
    """

    rest: bytes
    trace: int
    columns: PackedColumns


def pack(data: bytes) -> Packed | None:
    """Take the events out of a pickled snapshot; None where there are few, or none of the expected form.

    Args:
        data: the whole pickle.
    """
    if len(data) < _WORTH:
        return None
    try:
        body = _unframed(data)
        traces = _TRACES.search(body)
        return None if traces is None else _packed(body, traces.end(), traces[1].count(b"]") - 1)
    except (_UnlikeAnyError, IndexError):
        return None


def _unframed(data: bytes) -> bytes:
    """Return the stream without its frames, which may lie between any two opcodes, and padded."""
    if data[0] != 0x80 or data[1] not in (4, 5):
        raise _UnlikeAnyError
    view = memoryview(data)
    parts, position = [view[:2]], 2
    while position < len(data):
        if data[position] != _FRAME:
            raise _UnlikeAnyError
        end = position + 9 + int.from_bytes(data[position + 1 : position + 9], "little")
        parts.append(view[position + 9 : end])
        position = end
    if position != len(data) or data[-1] != _STOP:
        raise _UnlikeAnyError
    return b"".join([*parts, bytes(_PAD)])


def _packed(body: bytes, first: int, trace: int) -> Packed | None:
    walker = _OpcodeWalker(body)
    for _ in walker.tokens(0, first):
        pass
    memo = walker.memo
    keys = _keys(walker, first)
    if any(name not in dict(keys) for name in _NEEDED):
        return None
    kinds = {index: _CODES[name] for index, name in walker.names.items() if name in _CODES}
    events = _UsualEvents(body, keys, first)
    if int(events.fits.sum()) < _FEWEST:
        return None
    # actions that are named later than in the first events
    for _ in range(_ROUNDS):
        left = _left(body, events, first, memo)
        kinds |= {index: _CODES[name] for index, name in left.names.items() if name in _CODES}
        known = np.isin(events.action, list(kinds))
        again = events.fits & ~known
        again[events.owners_of(left)] = True
        again &= events.fits
        if not again.any():
            return _result(body, events, left, trace, kinds)
        events.fits &= ~again
    return None


def _keys(walker: _OpcodeWalker, first: int) -> list[tuple[str, bytes]]:
    """The keys of an event in their order, with the bytes that refer to each.

    The first event spells the keys out, the second refers to them.
    """
    keys: list[tuple[str, bytes]] = []
    depth, count, is_key, simple = 0, 0, True, False
    for code, start, end in walker.tokens(first, len(walker.body) - _PAD):
        if code == _MARK:
            depth += 1
            is_key = depth == 1 or is_key
            continue
        if code == _SETITEMS and depth == 1:
            count += 1
            depth = 0
            if count == 2:
                break
            continue
        if code in (_SETITEMS, _APPENDS):
            depth -= 1
            continue
        if depth != 1 or code in (_MEMOIZE, _APPEND):
            continue
        if code == 0x86:  # a pair of numbers was one value
            is_key = True
            continue
        if is_key:
            if count == 1:
                if code not in (_REF, _LONG_REF):
                    raise _UnlikeAnyError
                keys.append((walker.names.get(walker.refs[-1], ""), walker.body[start:end]))
            is_key = False
            simple = True
        elif simple:
            simple = False
            # the pool's id is a pair: its second number is no key
            is_key = not _is_pair(walker.body, start, end)
    if count < 2:
        raise _UnlikeAnyError
    return keys


def _is_pair(body: bytes, start: int, end: int) -> bool:
    """Whether a number is followed by another, and both are made a pair."""
    if body[start] not in _NUMBERS or body[end] not in _NUMBERS:
        return False
    return body[end + _FIXED[body[end]]] == 0x86


class _UsualEvents:
    """Every event of the usual form, as columns.

    Attributes:
        start, end: its bytes.
        fits: it is to be taken out.
        memo: objects that it puts into the memo.
        action: index of its action's name in the memo.
        numbers: its columns, by key.
        pool: ids of its pool, where recorded.
        list_start, list_end: bytes of its list of frames; 0 where the list is empty, or an older one.
        list_memo: place of its own list among the objects that it puts into the memo; -1 without one.
        list_ref: index of the older list that it refers to; -1 without.
    """

    def __init__(self, body: bytes, keys: list[tuple[str, bytes]], first: int) -> None:
        self._bytes: NDArray[np.uint8] = np.frombuffer(body, np.uint8)
        self._words: Words = np.ndarray((len(body) - 7,), "<u8", body, 0, (1,))
        self._last = len(body) - _PAD
        opening = bytes([_DICT, _MEMOIZE, _MARK]) + keys[0][1]
        self.start = np.flatnonzero(self._bytes[first : self._last] == _DICT) + first
        self.start = self.start[self._has(self.start, opening)]
        count = len(self.start)
        self.fits = np.ones(count, np.bool_)
        self.memo = np.ones(count, np.int64)
        self.action = np.full(count, -1, np.int64)
        self.numbers: dict[str, Longs] = {}
        self.pool: tuple[Longs, Longs] | None = None
        self.list_start, self.list_end = np.zeros((2, count), np.int64)
        self.list_memo, self.list_ref = np.full((2, count), -1, np.int64)
        self._at = self.start + 3
        for name, key in keys:
            self.fits &= self._has(self._at, key)
            self._move(len(key))
            if name == "frames":
                self._frames()
            elif name == "pool_id":
                first_id, second_id = self._number(), self._number()
                self.fits &= self._has(self._at, bytes([0x86, _MEMOIZE]))
                self.pool = first_id, second_id
                self.memo += 1
                self._move(2)
            elif name in _COLUMNS:
                self.numbers[name] = self._number()
            elif name == "action":
                self.action = self._any(refs=True)
            else:
                self._any(refs=False)
        self.fits &= self._bytes[self._at] == _SETITEMS
        self._move(1)
        self.end = self._at
        # bytes of a number may look like an event: what begins inside another is none
        inside = np.zeros(count, np.bool_)
        reach = np.maximum.accumulate(np.where(self.fits, self.end, 0))
        inside[1:] = self.start[1:] < reach[:-1]
        self.fits &= ~inside

    def owners_of(self, left: _Remainder) -> Longs:
        """The events that made what is referred to in what is left of the stream."""
        taken = np.flatnonzero(self.fits)
        base = left.base
        refs = np.unique(np.array(left.refs, np.int64))
        at = np.searchsorted(base, refs, "right") - 1
        held = at >= 0
        refs, at = refs[held], at[held]
        return taken[at[refs < base[at] + self.memo[taken[at]]]]

    def _has(self, at: Longs, what: bytes) -> Mask:
        wanted = int.from_bytes(what, "little")
        mask = np.uint64((1 << (8 * len(what))) - 1)
        same: Mask = (self._words[at] & mask) == np.uint64(wanted)
        return same

    def _move(self, by: Longs | int) -> None:
        self._at = np.minimum(self._at + by, self._last)

    def _number(self) -> Longs:
        """Read a number of each event: 0 to 2**55."""
        word = self._words[self._at]
        code = (word & np.uint64(0xFF)).astype(np.uint8)
        value = ((word >> np.uint64(8)) & _VALUE[code]).astype(np.int64)
        length = _NUMBER_LENGTH[code]
        long = np.flatnonzero(code == _LONG)
        if len(long):
            size = self._bytes[self._at[long] + 1]
            digits = self._words[np.minimum(self._at[long] + 2, self._last)] & _DIGITS[np.minimum(size, 8)]
            # the highest bit is the sign
            small = (size > 0) & (size < 8) & ((digits & _SIGN[np.minimum(size, 8)]) == 0)
            value[long], length[long] = digits.astype(np.int64), np.where(small, 2 + size.astype(np.int64), 0)
        self.fits &= (length > 0) & ~((code == ord("J")) & (value >= 1 << 31))
        self._move(length)
        return value

    def _any(self, *, refs: bool) -> Longs:
        """Step over a value of each event: a reference, which is returned, or else a number or new string."""
        word = self._words[self._at]
        code = (word & np.uint64(0xFF)).astype(np.uint8)
        value = np.where((code == _REF) | (code == _LONG_REF), (word >> np.uint64(8)) & _VALUE[code], 0)
        if refs:
            self.fits &= (code == _REF) | (code == _LONG_REF)
        length = _VALUE_LENGTH[code]
        string = np.flatnonzero(code == _STRING)
        if len(string):
            size = self._bytes[self._at[string] + 1].astype(np.int64)
            made = self._bytes[np.minimum(self._at[string] + 2 + size, self._last)] == _MEMOIZE
            length[string] = np.where(made, 3 + size, 0)
            self.memo[string] += 1
        self.fits &= length > 0
        self._move(length)
        return value.astype(np.int64)

    def _frames(self) -> None:
        """Step over the list of each event."""
        word = self._words[self._at]
        code = (word & np.uint64(0xFF)).astype(np.uint8)
        ref = (code == _REF) | (code == _LONG_REF)
        self.list_ref[ref] = ((word >> np.uint64(8)) & _VALUE[code])[ref].astype(np.int64)
        new = self._has(self._at, bytes([_LIST, _MEMOIZE]))
        self.fits &= ref | new
        third = self._bytes[self._at + 2]
        self.list_memo[new] = self.memo[new]
        self.memo[new] += 1
        length = np.where(new, 2, _VALUE_LENGTH[code])
        several = np.flatnonzero(new & (third == _MARK))
        single = np.flatnonzero(new & ((third == _REF) | (third == _LONG_REF)))
        at = np.minimum(self._at[single] + 2 + _VALUE_LENGTH[third[single]], self._last)
        self._end_of_list(single, at, self._bytes[at] == _APPEND, length)
        at, waiting = self._at[several] + 3, several
        while len(waiting):
            step = _VALUE_LENGTH[self._bytes[at]] * _IS_REF[self._bytes[at]]
            done = step == 0
            self._end_of_list(waiting[done], at[done], self._bytes[at[done]] == _APPENDS, length)
            waiting, at = waiting[~done], np.minimum(at[~done] + step[~done], self._last)
        self._move(length)

    def _end_of_list(self, events: Longs, at: Longs, ends: Mask, length: Longs) -> None:
        self.fits[events] &= ends
        self.list_start[events], self.list_end[events] = self._at[events], at + 1
        length[events] = at + 1 - self._at[events]


def _table(**entries: int) -> Longs:
    """Return a value for each opcode; 0 where none is given."""
    table = np.zeros(256, np.int64)
    for name, value in entries.items():
        table[ord(name)] = value
    return table


_VALUE: Final[Words] = _table(h=0xFF, j=0xFFFFFFFF, K=0xFF, M=0xFFFF, J=0xFFFFFFFF).astype(np.uint64)
_NUMBER_LENGTH: Final[Longs] = _table(K=2, M=3, J=5)
_VALUE_LENGTH: Final[Longs] = _table(h=2, j=5, K=2, M=3, J=5, N=1)
_IS_REF: Final[Longs] = _table(h=1, j=1)
_DIGITS: Final[Words] = np.array([(1 << (8 * size)) - 1 for size in range(9)], np.uint64)
_SIGN: Final[Words] = np.array([0, *(1 << (8 * size - 1) for size in range(1, 9))], np.uint64)


@dataclass(slots=True)
class _Remainder:
    """What is left of the stream when the fitting events are out.

    Attributes:
        parts: its bytes; a run of events is `None`, put into the memo as often as the events did.
        base: index in the memo of the first object of each event taken out.
        loose: for each event that stays in the trace's list, how many were taken out before it.
        refs: indices that it refers to.
        names: strings of the memo, by index.
    """

    parts: list[bytes]
    base: Longs
    loose: list[int]
    refs: list[int]
    names: dict[int, str]


def _left(body: bytes, events: _UsualEvents, first: int, memo: int) -> _Remainder:
    taken = np.flatnonzero(events.fits)
    starts, ends, counts = events.start[taken], events.end[taken], events.memo[taken]
    walker = _OpcodeWalker(body, memo)
    # runs of events that follow each other without a gap
    breaks = np.flatnonzero(starts[1:] != ends[:-1]) + 1
    bounds = [0, *breaks.tolist(), len(taken)]
    parts, base = [body[:first]], np.zeros(len(taken), np.int64)
    loose: list[int] = []
    position = first
    for begin, behind in pairwise(bounds):
        gap = int(starts[begin])
        if body[position:gap] != b"e(":
            skipped, goes_on = walker.events(position, gap)
            loose += [begin] * skipped
            if not goes_on:
                # the list ends here: what looks like its events is another device's
                events.fits[taken[begin:]] = False
                base = base[:begin]
                break
        parts.append(body[position:gap])
        run = counts[begin:behind]
        sums = np.cumsum(run)
        base[begin:behind] = walker.memo + sums - run
        walker.memo += int(sums[-1])
        parts.append(b"N" + bytes([_MEMOIZE]) * int(sums[-1]) + b"0")
        position = int(ends[behind - 1])
    rest = body[position : len(body) - _PAD]
    for _ in walker.tokens(position, len(body) - _PAD):
        pass
    parts.append(rest[:-1])
    return _Remainder(parts, base, loose, walker.refs, walker.names)


def _result(body: bytes, events: _UsualEvents, left: _Remainder, trace: int, kinds: dict[int, int]) -> Packed:
    taken = np.flatnonzero(events.fits)
    lists: dict[bytes, int] = {}
    stacks = np.zeros(len(taken), np.int64)
    starts, ends = events.list_start[taken], events.list_end[taken]
    own = np.flatnonzero(starts)
    stacks[own] = [
        lists.setdefault(body[start + 2 : end], len(lists) + 1)
        for start, end in zip(starts[own].tolist(), ends[own].tolist(), strict=True)
    ]
    items = [bytes([_LIST]) + content for content in lists]
    _refer(events, left, taken, stacks, items)
    table = np.zeros(max(kinds) + 1, np.uint8)
    table[list(kinds)] = list(kinds.values())
    tail = [bytes([_MARK]), *items, b"t\x86."]
    return Packed(
        rest=b"".join([*left.parts, *tail]),
        trace=trace,
        columns=PackedColumns(
            kind=table[events.action[taken]],
            time_us=events.numbers["time_us"][taken],
            address=events.numbers["addr"][taken],
            size=events.numbers["size"][taken],
            stream=events.numbers["stream"][taken],
            frames=stacks,
            pool=None if events.pool is None else (events.pool[0][taken], events.pool[1][taken]),
            loose=np.array(left.loose, np.int64),
        ),
    )


def _refer(events: _UsualEvents, left: _Remainder, taken: Longs, stacks: Longs, items: list[bytes]) -> None:
    """Number the lists that events refer to: those of other events, and those that stay in the stream."""
    refs = events.list_ref[taken]
    referring = np.flatnonzero(refs >= 0)
    makers = np.flatnonzero(events.list_memo[taken] >= 0)
    made = left.base[makers] + events.list_memo[taken[makers]]
    at = np.minimum(np.searchsorted(made, refs[referring]), max(len(made) - 1, 0))
    inside = made[at] == refs[referring] if len(made) else np.zeros(len(referring), np.bool_)
    stacks[referring[inside]] = stacks[makers[at[inside]]]
    outside = referring[~inside]
    for index in np.unique(refs[outside]).tolist():
        items.append(bytes([_LONG_REF]) + index.to_bytes(4, "little"))
        stacks[outside[refs[outside] == index]] = len(items)
