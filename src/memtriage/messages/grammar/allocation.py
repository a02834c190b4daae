"""Failed allocations of any other runtime: ggml, XLA, ONNX Runtime, TensorFlow, Paddle, CuPy, Metal, Vulkan.

Their messages have no common form, but say the same things: that memory ran out, how much was requested, and
perhaps what was used, free, or the limit. A line that says the first and has the size of the request is read
as such a message, whoever wrote it. Figures of other lines do not count: they may be from another message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Final

from memtriage.messages.grammar.lines import LogLine
from memtriage.messages.grammar.message import Grammar, Message, to_bytes
from memtriage.model.explanation import Field

_NUMBER: Final = r"(?<![\d.])(\d[\d,]{0,30}(?:\.\d{1,9})?)"
_UNIT: Final = r"[ -]?(bytes?|[KMGTPE]i?B?|B)\b"
_SIZE: Final = _NUMBER + _UNIT
_BARE: Final = rf"{_NUMBER}(?:{_UNIT})?"

_RAN_OUT: Final = re.compile(
    r"(?i)out[ -]of[ -]memory|outofmemory|OOM when|ran out of [\w ]{0,24}memory|"
    r"(?:not enough|insufficient) (?:\w+ ){0,2}memory|"
    r"(?:fail\w{0,5}|unable|could ?n[o']t|can(?:not|'t)|error|trying|tried|attempt\w{0,4})(?: \w{1,20}){0,2} "
    r"(?:allocat|reserv)\w*|"
    r"exceed\w{1,3} (?:the )?max\w{0,4} [\w ]{0,40}allocation|"
    r"allocat\w{1,4}[^.\n]{0,80}?(?:fail\w{0,5}|not be|not possible|refused|exceeds?)|could not be allocated|"
    r"requires? more [\w ]{0,20}memory|request too large|"
    r"(?:larger|greater) than (?:the )?(?:\w+ ){0,3}(?:maximum|limit|memory|size)"
)
"""Words by which a line says that memory did not suffice."""

_SURVIVED: Final = re.compile(
    r"(?i)not a failure|retrying|will retry|ignoring this|skipping (?:this )?\w+ \d* ?due|falling back|"
    r"trying again|exceeds \d+(?:\.\d+)?% of"
)
"""Words by which a line says that the program goes on without that memory."""

_LINES_AFTER, _SOON = 3, 1000
"""How many lines, or characters, after a failure the program may say so."""

_SINGLE: Final = re.compile(
    r"(?i)exceed\w{1,3} (?:the )?(?:device|max)[\w ]{0,30}(?:limit|size|allocation)|maximum allowed buffer|"
    r"buffer maximum"
)
"""Words by which one buffer is over the limit for a single one."""
_LIMIT: Final = re.compile(
    rf"(?i)\b(?:limit(?: set)?(?: to| of)?|max(?:imum)?(?: \w{{1,12}}){{0,6}}?(?: of| is)?)"
    rf"[:= ]{{1,2}}{_BARE}"
)
_USED: Final = re.compile(rf"(?i)\bused {_SIZE} of {_SIZE}")
_REQUESTED: Final = tuple(
    re.compile(f"(?i){text}")
    for text in (
        rf"(?:allocat(?:e|ing)|reserve)(?: [a-z]+){{0,3}}? \(?{_SIZE}",
        rf"(?:\bbuffer|\btensor|\brequest\w*|\ballocation|\bmemory|'),?(?: of)? size(?: of| was| =)?:? "
        rf"{_BARE}",
        rf"requires? (?:more )?(?:\w+ ){{0,2}}memory \({_SIZE}",
        rf"requested(?: amount of [\w ]{{0,20}}memory \(|=\"?|:? ){_SIZE}",
        rf"\ballocation of {_BARE}",
    )
)
_FREE: Final = re.compile(
    rf"(?i)(?:there (?:are|is)(?: only)?|available memory is(?: only)?|than is available|\bfree=) ?[(\"]?"
    rf"{_SIZE}|"
    rf"{_SIZE} (?:is |are )?(?:free|available)\b"
)
_ALLOCATED: Final = re.compile(
    rf"(?i)allocated so far: {_SIZE}|{_SIZE} (?:\w+ )?memory has been allocated|\(total {_SIZE}"
)
_TOTAL: Final = re.compile(rf"\btotal=\"?{_SIZE}")
_SHAPE: Final = re.compile(r"shape ?\[(\d{1,12}(?:, ?\d{1,12}){0,9})\] and type (\w{1,20})")
_ITEMSIZES: Final = {
    "float": 4, "float32": 4, "int32": 4, "uint32": 4, "half": 2, "float16": 2, "bfloat16": 2, "int16": 2,
    "double": 8, "float64": 8, "int64": 8, "complex64": 8, "complex128": 16, "bool": 1, "int8": 1, "uint8": 1,
}  # fmt: skip

_ON_CHIP: Final = re.compile(r"memory space (?!hbm)[a-z]{0,2}(?:mem|flag)\b")
"""XLA's memory spaces on the chip; `hbm` is the device's memory."""
_HOST: Final = (
    r"(?i)^(?!.*(?:\bGPU\b|\bVRAM\b|cudaMalloc)).*?"
    r"(?:\bcpu\d?(?:_\w+)?\b|system memory|host memory|\bRAM\b|cuda_host|large for system)"
)
_DEVICES: Final = (
    ("host", re.compile(_HOST)),
    ("tpu", re.compile(r"(?i)\btpu\b|\bhbm\b|_HBM\d|\breservable\b")),
    ("mps", re.compile(r"(?i)metal")),
)
"""Whose memory a line means, by its words; the first that fits."""


def _read(start: re.Match[str], text: str) -> Message | None:
    whole = start.string
    begin = whole.rfind("\n", 0, start.start()) + 1
    end = whole.index("\n", start.end())
    line = whole[begin:end]
    after = whole[end : end + _SOON].split("\n", _LINES_AFTER + 1)[1 : _LINES_AFTER + 1]
    length = end - start.start()
    if _ON_CHIP.search(line):
        return Message("not-memory", form="on-chip shared memory", length=length)
    fields, facts = _figures(line)
    if not fields and not facts and after and (asked := _wrapped(line, after[0])):
        fields, length = {"requested": asked}, length + len(after[0])
    if not fields and not facts:
        return None
    above = whole[whole.rfind("\n", 0, max(0, begin - 1)) + 1 : begin]
    survived = any(_SURVIVED.search(each) for each in (line, *after))
    return Message(
        "allocation",
        form="survived" if survived else "single" if _SINGLE.search(above + line) else "failed",
        fields=fields,
        facts=facts,
        device=next((name for name, words in _DEVICES if words.search(line)), None),
        length=length,
    )


def _wrapped(line: str, following: str) -> int | None:
    """Return the request of a sentence that a line does not end, and that has its size on the next."""
    if not line.rstrip()[-1:].isalpha():
        return None
    joined = f"{line.rstrip()} {following.strip()}"
    for pattern in _REQUESTED:
        match = pattern.search(joined)
        if match is not None and match.start() <= len(line) + 1 < match.end():
            return _size(match, 1)
    return None


def _figures(line: str) -> tuple[dict[str, Field], dict[str, str | int]]:
    """Return the sizes that a line has, and what its shape comes to."""
    fields: dict[str, Field] = {}
    if used := _USED.search(line):
        fields |= {"used": to_bytes(used[1], used[2]), "total": to_bytes(used[3], used[4])}
    limit = _LIMIT.search(line)
    rest = line
    if limit is not None:
        fields["max_buffer" if _SINGLE.search(line) else "allowed"] = _size(limit, 1)
        rest = line[: limit.start()] + line[limit.end() :]  # its number is no request
    requested = next((match for pattern in _REQUESTED if (match := pattern.search(rest))), None)
    if requested is not None:
        fields["requested"] = _size(requested, 1)
    for name, pattern in (("allocated", _ALLOCATED), ("free", _FREE), ("total", _TOTAL)):
        if match := pattern.search(rest):
            number, unit = (group for group in match.groups() if group is not None)
            fields[name] = to_bytes(number, unit)
    facts: dict[str, str | int] = {}
    if (shape := _SHAPE.search(line)) and (itemsize := _ITEMSIZES.get(shape[2])):
        facts["shape_bytes"] = prod(int(part) for part in shape[1].split(",")) * itemsize
    known = {name: size for name, size in fields.items() if size is not None}
    if not {"requested", "used"} & known.keys():
        return {}, facts
    return dict(known), facts


def _size(match: re.Match[str], group: int) -> int | None:
    number, unit = match[group], match[group + 1]
    return to_bytes(number, unit or ("B" if "." in number else ""))


GRAMMARS: Final = (Grammar(_RAN_OUT, _read, tight=False),)

_WORDS: Final = re.compile(
    rf"(?i){_RAN_OUT.pattern.removeprefix('(?i)')}|\bOOM\b|memory (?:is )?(?:exhausted|full)|"
    r"exceed\w{0,3} [\w ]{0,40}memory|low on memory|memory pressure|OutOf(?:Device|Host)Memory|"
    r"内存不足|显存不足"
)
_SPEAKS: Final = (
    re.compile(
        r"(?i)(?<![\w.])memory\b|\b(?:VRAM|RAM|HBM|OOM)\b|\ballocat\w{1,6}\b|\bswap\b|内存|显存|メモリ"
    ),
    re.compile(r"(?i)memory|alloc|/dev/shm|page file|paging file|oom_|vmrss|\brss\b"),
)
"""Words of a sentence about memory; then parts of names, as in `pin_memory()`."""


def _read_mention(start: re.Match[str], text: str) -> Message:
    end = start.string.index("\n", start.end())
    line = start.string[start.string.rfind("\n", 0, start.start()) + 1 : end]
    form = "survived" if _SURVIVED.search(line) else ""
    return Message("mention", form=form, length=end - start.start())


MENTION: Final = Grammar(_WORDS, _read_mention, tight=False)
"""For lines that say that memory ran out in no form that is known; asked where nothing else is found."""


def first_that_speaks(lines: Sequence[LogLine]) -> tuple[int, str] | None:
    """The first line that speaks of memory at all, and its number; None where none does."""
    for words in _SPEAKS:
        for line in lines:
            if words.search(line.text):
                return line.number, line.text.strip()
    return None
