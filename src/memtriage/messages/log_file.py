"""Read a log of any length and find every message about memory in it.

A log has mostly other lines. Every message has at least one of a few short words, which are searched with
`bytes.find` (a gigabyte per second). Of a long log, the grammar only reads the lines around these words.

Known limits: in a log longer than `_WHOLE`, a message is not found if line breaks split all of these words in
it; only the first `_OF_A_KIND` messages of one kind are read, the others are counted.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import BinaryIO, Final

from memtriage.messages.grammar.allocation import first_that_speaks
from memtriage.messages.grammar.find import FoundMessage, find
from memtriage.messages.grammar.lines import LogLine, read_lines
from memtriage.model.units import MIB

_WHOLE = 256 * 1024
"""Bytes of a text up to which the grammar reads every line."""
_CHUNK = 4 * MIB
_MARGIN = 64 * 1024
"""Bytes of the previous chunk that are kept: the longest line, and the text before a hit."""
_BEFORE, _AFTER = 16 * 1024, 4 * 1024
"""Bytes read before a hit, its traceback, and after it, the rest of a wrapped message."""
_OF_A_KIND, _REPORTS_OF_A_KIND = 256, 16
_SAMPLE, _LEAST_SAMPLE, _ZEROS = 512, 8, 0.3
"""Bytes at the beginning that tell the encoding; with this share of zeros, less than the half that other text
than Latin has, they are UTF-16."""

_MEMORY: Final = b"memory"
_CODE: Final = rb"(?:code|status)s?\W{0,4}(?:was )?(?:-9|137|-15|143)(?!\d)"
_WORDS: Final = (
    b"oom when|failed to alloc|attempting to alloc|error allocating|allocation of size|paging file|"
    b"error 1455|curesult error|nv_err_no_memory|cache flushes|regular vae|oomd|badness|available ram|"
    b"no space left|failed writing file|resource_tracker|preempted by|retract requests|out of resource|"
    b"cuda error|triton error|larger than buffer|/dev/shm/|_not_init|bad_alloc|internal assert|"
    b"driver error|invalid buffer|bus error|</torch_|alloc_failed|allocation_failed|out_of_resources|"
    b"out_of_device|out_of_host|to cuda calloc|to cuda malloc|startup is less|model weights take|"
    b"loading took|low on "
)
_FAILURES: Final[Mapping[bytes, re.Pattern[bytes] | None]] = {
    **dict.fromkeys(_WORDS.split(b"|")),
    _MEMORY: re.compile(
        rb"out of memory|by pytorch|outofmemory|out_of_me|t allocate memory|memoryerror|memoryallocation|"
        rb"(?:multicast|illegal|shared|enough|nsufficient|more system) memory|"
        rb"memory (?:limit|pressure|on the node|for the cache)|see_memory_usage|to allocate|in kv cache"
    ),
    b"kill": re.compile(rb"killed|sigkill|oom[-_]kill"),
    b"exit": re.compile(rb"exited unexp|" + _CODE),
    b"return code": re.compile(_CODE),
}
"""Short words that messages have, in lower case, and what else a line with one has; messages of one kind have
it in common."""
_AFTERMATH: Final = dict.fromkeys(
    b"watchdog|timed out|remote process|connection closed|by peer|sigterm|childfailed".split(b"|")
)
"""Looked for from the first failure on, and near the end of a log without one."""
_REPORTS: Final = {b"see_memory_usage", b"loading took", b"cache flushes", b"model weights take", *_AFTERMATH}
"""Long texts and what is said again and again: few are read."""

_EXPANDABLE_ON: Final = re.compile(
    rb"PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF['\"]?[\])]?\s{0,3}[=:]\s{0,3}['\"]?[\w:.,\[\]-]{0,200}?expandable_segments:True"
)
_ENGINE: Final = re.compile(
    r"\b(?:sglang/srt|vllm/(?:v1|engine|worker|executor|model_executor|entrypoints|distributed)|"
    r"tensorrt_llm|text_generation_server|lmdeploy)/|--mem-fraction-static\b|--cuda-graph-max-bs\b"
)
_TRAITS: Final = {
    name: re.compile(pattern)
    for name, pattern in {
        "no expandable segments": rb"expandable_segments not supported",
        "batch of one": rb"(?i)(?<![\w-])(?:--)?"
        rb"(?:(?:(?:train_)?micro|per[_-]device(?:[_-]train)?|train)[_-])?batch[_-]?size"
        rb"(?:[_-]per[_-]gpu)?[\"']?\s{0,3}[=: ]\s{0,3}[\"']?1(?![\d.])",
        "generates": rb"(?i)comfyui|stable-diffusion-webui|diffusers[\\/]pipelines|vae[ _]decod|"
        rb"transformers[\\/]generation[\\/]|\bollama\b|llama[._]cpp",
        "trains": rb"(?i)\.backward\(|optimizer\.step|grad_norm|gradient|"
        rb"[ '\"]loss[ '\"]{0,2}[:=]|trainer\.py|finetun",
        "other runtime": rb"\bjax(?:lib)?[./\\_]|\bXLA_|/xla[/_]|tensorflow[/.]|\bjax\.errors",
        "unified memory": rb"\bGB10\b|DGX Spark|\bJetson\b|\bOrin\b|(?i:unified memory)",
        "engine": _ENGINE.pattern.encode()
        + rb"|EngineCore|(?i:sglang)|KV [Cc]ache (?:is )?allocated|Captur\w{1,4} .{0,40}CUDA graph",
        "builds": rb"nvcc|cc1plus|ninja: build stopped|failed to solve: process|rustc |"
        rb"Building wheel for|CMakeFiles/",
    }.items()
}
"""What a log shows besides its messages, by words that stand for it."""


@dataclass(slots=True)
class LogReading:
    """What a log has.

    Attributes:
        messages: its messages, in order.
        lines: how many lines it has.
        expandable: it shows, other than in the advice of an error, that expandable segments were on.
        unread: words of messages on lines that were not read, there being so many of their kind.
        traits: names of `_TRAITS` that it shows. Of a long log only lines around its messages are looked at.
        speaks: the first line that speaks of memory, and its number; None where none does. Of a long log, the
            first with the word itself.
    """

    messages: list[FoundMessage] = field(default_factory=list)
    lines: int = 0
    expandable: bool = False
    unread: int = 0
    traits: set[str] = field(default_factory=set)
    speaks: tuple[int, str] | None = None


def read_text(text: str) -> LogReading:
    """Read a text. Lone surrogates, as an undecodable file gives, are taken as they are."""
    return read_log(io.BytesIO(text.encode("utf-8", "surrogatepass")))


def read_log(stream: BinaryIO) -> LogReading:
    """Read a log from a binary stream: UTF-8 with any bytes in it, or UTF-16.

    Raises:
        OSError: the stream cannot be read.
    """
    chunks, text = _chunks(stream), b""
    for chunk in chunks:
        text += chunk
        if len(text) > _WHOLE:
            return _Search().run(chain([text], chunks))
    lines = list(read_lines(text.decode("utf-8", "replace")))
    return LogReading(
        messages=find(lines),
        lines=lines[-1].number if text else 0,
        expandable=expandable_segments_on(text),
        traits=_traits(text),
        speaks=first_that_speaks(lines),
    )


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the pieces of a stream; of UTF-16, as PowerShell writes logs, as UTF-8."""
    first = stream.read(_CHUNK)
    encoding = _wide_encoding(first)
    decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
    for raw in chain([first], iter(lambda: stream.read(_CHUNK), b"")):
        yield decoder.decode(raw).encode("utf-8", "replace") if decoder else raw


def _traits(raw: bytes) -> set[str]:
    return {name for name, pattern in _TRAITS.items() if pattern.search(raw)}


def serves(text: str) -> bool:
    """Whether a file or an option is that of an engine that serves a model, and trains none."""
    return _ENGINE.search(text) is not None


def expandable_segments_on(raw: bytes) -> bool:
    """Whether a piece of a log shows, other than in an error's advice, that expandable segments are on."""
    if b"expandable_segments:True" not in raw:
        return False
    for setting in _EXPANDABLE_ON.finditer(raw):
        before = b"".join(raw[max(0, setting.start() - 40) : setting.start()].split())
        after = b"".join(raw[setting.end() : setting.end() + 40].split())
        if not before.endswith(b"setting") and not after.startswith(b"toavoid"):
            return True
    return False


def _wide_encoding(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[:_SAMPLE]
    zeros = sample.count(0)
    if len(sample) < _LEAST_SAMPLE or zeros < len(sample) * _ZEROS:
        return None
    return "utf-16-le" if sample[1::2].count(0) > sample[::2].count(0) else "utf-16-be"


class _Search:
    """A search through a long log, of which the lines around the words of messages are kept."""

    def __init__(self) -> None:
        self._buffer = b""
        self._searched = 0  # offset in the buffer up to which it was searched
        self._kept = 0  # offset up to which lines were kept or passed over
        self._number = 1  # number of the line at that offset
        self._kinds: Counter[bytes] = Counter()
        self._lines: list[LogLine] = []
        self._reading = LogReading()

    def run(self, chunks: Iterable[bytes]) -> LogReading:
        for chunk in chunks:
            self._buffer += chunk
            self._reading.lines += chunk.count(b"\n")
            # A chunk behind, so that the last of them is known to be the last when it is searched.
            self._search(self._line_start(len(self._buffer) - _CHUNK - _MARGIN), at_end=False)
            self._drop(self._line_start(self._searched - _MARGIN))
        self._search(len(self._buffer), at_end=True)
        self._reading.lines += not self._buffer.endswith(b"\n")
        self._reading.messages = find(self._lines)
        self._reading.speaks = first_that_speaks(self._lines)
        return self._reading

    def _search(self, end: int, *, at_end: bool) -> None:
        if end <= self._searched:
            return
        piece = self._buffer[self._searched : end]
        self._reading.expandable = self._reading.expandable or expandable_segments_on(piece)
        text = piece.lower()
        hits = {at for word in _FAILURES for at in self._hits(text, word, _FAILURES[word])}
        if hits or self._lines or at_end:
            hits.update(at for word in _AFTERMATH for at in self._hits(text, word, None))
        if not self._kinds[_MEMORY] and (first := text.find(_MEMORY)) >= 0:
            self._kinds[_MEMORY] += 1
            hits.add(first)
        for at in sorted(hits):
            self._keep_around(self._searched + at)
        self._searched = end

    def _drop(self, end: int) -> None:
        if end > self._kept:
            self._number += self._buffer.count(b"\n", self._kept, end)
            self._kept = end
        self._buffer = self._buffer[end:]
        self._searched -= end
        self._kept -= end

    def _line_start(self, at: int) -> int:
        """Where the line of an offset begins; the offset itself inside of an overlong line."""
        if at <= 0:
            return 0
        earliest = max(0, at - _MARGIN)
        line = max(self._buffer.rfind(end, earliest, at) for end in (b"\n", b"\r")) + 1
        return line or (at if earliest else 0)

    def _hits(self, text: bytes, word: bytes, pattern: re.Pattern[bytes] | None) -> Iterator[int]:
        """Offsets of lines with a word, one a line, as long as there are few of its kind."""
        at = text.find(word)
        while at >= 0:
            begin = text.rfind(b"\n", max(0, at - _AFTER), at) + 1 or max(0, at - _AFTER)
            end = text.find(b"\n", at, at + _AFTER)
            end = min(at + _AFTER, len(text)) if end < 0 else end
            match = pattern.search(text, begin, end) if pattern is not None else None
            if match is not None or pattern is None:
                kind = match[0] if match is not None else word
                self._kinds[kind] += 1
                if self._kinds[kind] <= (_REPORTS_OF_A_KIND if kind in _REPORTS else _OF_A_KIND):
                    yield at
                else:
                    self._reading.unread += 1
            at = text.find(word, end)

    def _keep_around(self, hit: int) -> None:
        begin = max(self._line_start(hit - _BEFORE), self._kept)
        end = self._buffer.find(b"\n", hit + _AFTER, hit + _AFTER + _MARGIN) + 1
        end = end or min(len(self._buffer), hit + 2 * _AFTER)
        if begin >= end:
            return
        self._number += self._buffer.count(b"\n", self._kept, begin)
        piece = self._buffer[begin:end]
        self._lines += read_lines(piece.decode("utf-8", "replace"), self._number)
        self._reading.traits |= _traits(piece)
        self._number += piece.count(b"\n")
        self._kept = end
