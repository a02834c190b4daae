"""Read a log of any length and find every message about memory in it.

A log has mostly other lines. Every message has at least one of a few short words, which are searched with
`bytes.find` (a gigabyte per second); the grammar only reads the lines around a hit.

Known limits, by `LogPolicy`: in a log longer than `whole`, a message is not found if line breaks split all of
these words in it; only the first `of_a_kind` messages of one kind are read, the others are counted.
"""

from __future__ import annotations

import codecs
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Final, Protocol

from memtriage.messages.grammar.allocation import first_that_speaks
from memtriage.messages.grammar.find import FoundMessage, find
from memtriage.messages.grammar.lines import LogLine, read_line, read_pieces
from memtriage.model.units import MIB


@dataclass(frozen=True, slots=True)
class LogPolicy:
    """How a log is read.

    Attributes:
        whole: the grammar reads every line of a text of up to this many bytes.
        chunk: bytes of a longer text that are searched at once.
        margin: bytes of the previous chunk that are kept: the longest line, and the text before a hit.
        before: bytes read before a hit: its traceback.
        after: bytes read after a hit: the rest of a wrapped message.
        wrapped_lines: a message may begin up to this many lines before its hit.
        of_a_kind: messages of one kind that are read; the others are counted.
        reports: the same for reports, which are long, such as an allocator's table.
        sample: bytes at the beginning from which the encoding is inferred.
        least_sample: a shorter sample says nothing.
        zeros: a sample is UTF-16 if this part of it is zeros: half of it, less for text that is not Latin.
    """

    whole: int = 256 * 1024
    chunk: int = 4 * MIB
    margin: int = 64 * 1024
    before: int = 16 * 1024
    after: int = 4 * 1024
    wrapped_lines: int = 12
    of_a_kind: int = 256
    reports: int = 16
    sample: int = 512
    least_sample: int = 8
    zeros: float = 0.3


POLICY: Final = LogPolicy()

_MEMORY: Final = b"memory"
_DENSE: Final = 20_000
"""Hits in one chunk from which on it is faster to search for each of a stem's rarer words (3 ms each) than to
look at the lines with the stem (2 us each)."""


@dataclass(frozen=True, slots=True)
class _Stem:
    """A short word that many messages have, in lower case.

    Attributes:
        word: the stem.
        kinds: the rarer words, or parts of words, with it that messages have; each message has one of them.
        confirm: what else the line must have; None for nothing.
    """

    word: bytes
    kinds: tuple[bytes, ...]
    confirm: re.Pattern[bytes] | None


def _stem(word: bytes, *kinds: bytes, confirm: bytes = b"") -> _Stem:
    return _Stem(word, kinds or (word,), re.compile(confirm) if confirm else None)


_CODE: Final = rb"(?:code|status)s?\W{0,4}(?:was )?(?:-9|137|-15|143)(?!\d)"

_FAILURES: Final = (
    _stem(
        b"memory",
        b"out of memory",
        b"to allocate",
        b"by pytorch",
        b"outofmemory",
        b"out_of_me",
        b"t allocate memory",
        b"memoryerror",
        b"memoryallocation",
        b"multicast memory",
        b"illegal memory",
        b"memory limit",
        b"shared memory",
        b"low on ",
        b"memory pressure",
        b"memory on the node",
        b"not enough memory",
        b"memory for the cache",
        b"startup is less",
        b"in kv cache",
        b"see_memory_usage",
        b"model weights take",
        b"loading took",
        b"cache flushes",
        b"enough memory",
        b"nsufficient memory",
        b"more system memory",
    ),
    _stem(b"oom when"),
    _stem(b"allocat", b"failed to alloc", b"attempting to alloc", b"error allocating", b"allocation of size"),
    _stem(b"paging file"),
    _stem(b"error 1455"),
    _stem(b"curesult error"),
    _stem(b"nv_err_no_memory"),
    _stem(b"cache flushes"),
    _stem(b"regular vae"),
    _stem(b"oomd"),
    _stem(b"badness"),
    _stem(b"available ram"),
    _stem(b"no space left"),
    _stem(b"failed writing file"),
    _stem(b"resource_tracker"),
    _stem(b"preempted by"),
    _stem(b"retract requests"),
    _stem(b"out of resource"),
    _stem(b"cuda error"),
    _stem(b"triton error"),
    _stem(b"larger than buffer"),
    _stem(b"/dev/shm/"),
    _stem(b"kill", b"killed", b"sigkill", b"oom-kill", b"oom_kill"),
    _stem(b"exit", b"exited unexp", b"exitcode", b"exit code", b"exit status", confirm=b"unexp|" + _CODE),
    _stem(b"return code", confirm=_CODE),
    _stem(b"_failed", b"alloc_failed", b"allocation_failed"),
    _stem(b"out_of_", b"out_of_resources", b"out_of_device", b"out_of_host"),
    _stem(b"to cuda ", b"to cuda calloc", b"to cuda malloc"),
    _stem(b"_not_init"),
    _stem(b"bad_alloc"),
    _stem(b"internal assert"),
    _stem(b"driver error"),
    _stem(b"invalid buffer"),
    _stem(b"bus error"),
    _stem(b"</torch_"),
)
_AFTERMATH: Final = (
    _stem(b"watchdog"),
    _stem(b"timed out"),
    _stem(b"remote process"),
    _stem(b"connection closed"),
    _stem(b"by peer"),
    _stem(b"sigterm"),
    _stem(b"childfailed"),
)
"""Looked for from the first failure on, and near the end of a log without one."""

_REPORTS: Final = frozenset(
    {
        b"see_memory_usage",
        b"loading took",
        b"cache flushes",
        b"model weights take",
        *(stem.word for stem in _AFTERMATH),
    }
)

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
_HINT_BEFORE: Final = b"setting"
_HINT_AFTER: Final = b"toavoid"


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


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
    first = stream.read(POLICY.chunk)
    source: _Readable = stream
    if encoding := _wide_encoding(first):
        source, first = _Recoded(stream, encoding, first), b""
        first = source.read(POLICY.chunk)
    while len(first) <= POLICY.whole and (more := source.read(POLICY.chunk)):
        first += more
    if len(first) > POLICY.whole:
        return _Search(source).run(first)
    lines = list(_lines(first, 1))
    return LogReading(
        messages=find(lines),
        lines=lines[-1].number if first else 0,
        expandable=expandable_segments_on(first),
        traits=_traits(first),
        speaks=first_that_speaks(lines),
    )


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
        if not before.endswith(_HINT_BEFORE) and not after.startswith(_HINT_AFTER):
            return True
    return False


def _wide_encoding(head: bytes) -> str | None:
    """UTF-16, as PowerShell writes logs; None for all else."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    sample = head[: POLICY.sample]
    zeros = sample.count(0)
    if len(sample) < POLICY.least_sample or zeros < len(sample) * POLICY.zeros:
        return None
    return "utf-16-le" if sample[1::2].count(0) > sample[::2].count(0) else "utf-16-be"


class _Recoded:
    """A stream of UTF-16 as UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str, head: bytes) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._head = head

    def read(self, size: int, /) -> bytes:
        while True:
            raw, self._head = self._head or self._stream.read(size), b""
            text = self._decoder.decode(raw, final=not raw).encode("utf-8", "replace")
            if text or not raw:
                return text


class _Search:
    """A search through a long log.

    Attributes:
        reading: what was found so far.
    """

    def __init__(self, stream: _Readable) -> None:
        self._stream = stream
        self._buffer = b""
        self._first_line = 1  # number of the line on which the buffer begins
        self._searched = 0  # offset in the buffer up to which it was searched
        self._read_to = 0  # number of the last line that the grammar has read
        self._read_end = 0  # offset in the buffer at which that reading ended
        self._kinds: Counter[bytes] = Counter()
        self.reading = LogReading()

    def run(self, chunk: bytes) -> LogReading:
        while True:
            self._buffer += chunk
            self._search(at_end=not chunk)
            if not chunk:
                self.reading.lines = self._first_line - 1 + self._buffer.count(b"\n")
                self.reading.lines += not self._buffer.endswith(b"\n")
                return self.reading
            chunk = self._stream.read(POLICY.chunk)

    def _search(self, *, at_end: bool) -> None:
        # A chunk behind, so that the last of them is known to be the last when it is searched.
        before = len(self._buffer) - POLICY.chunk - POLICY.margin
        limit = len(self._buffer) if at_end else self._line_start(before)
        if limit <= self._searched and not at_end:
            return
        if not self.reading.expandable:
            self.reading.expandable = expandable_segments_on(self._buffer[self._searched : limit])
        cluster: list[int] = []
        for hit in self._hits(self._searched, limit, at_end=at_end):
            if cluster and hit - cluster[-1] > 2 * POLICY.after:
                self._read_around(cluster)
                cluster = []
            cluster.append(hit)
        if cluster:
            self._read_around(cluster)
        if not at_end:
            keep = self._line_start(max(0, limit - POLICY.margin))
            self._first_line += self._buffer.count(b"\n", 0, keep)
            self._buffer = self._buffer[keep:]
            self._searched = limit - keep
            self._read_end -= keep

    def _line_start(self, at: int) -> int:
        """Where the line of an offset begins; the offset itself inside of an overlong line."""
        if at <= 0:
            return 0
        line = max(
            self._buffer.rfind(b"\n", max(0, at - POLICY.margin), at),
            self._buffer.rfind(b"\r", max(0, at - POLICY.margin), at),
        )
        if line < 0:
            return at if at > POLICY.margin else 0
        return line + 1

    def _hits(self, start: int, end: int, *, at_end: bool) -> list[int]:
        """Offsets of lines that may belong to messages, one a line and in order."""
        text = self._buffer[start:end].lower()
        if self.reading.speaks is None and (at := text.find(_MEMORY)) >= 0:
            self.reading.speaks = first_that_speaks([self._line_of(start + at)])
        hits = {at for stem in _FAILURES for at in self._confirmed(text, stem)}
        if hits or self.reading.messages or at_end:
            hits.update(at for stem in _AFTERMATH for at in self._confirmed(text, stem))
        return sorted(start + at for at in hits)

    def _line_of(self, at: int) -> LogLine:
        """The line of an offset in the buffer."""
        begin = max(self._line_start(at), at - POLICY.after)
        end = self._buffer.find(b"\n", at, at + POLICY.after)
        raw = self._buffer[begin : end if end >= 0 else at + POLICY.after]
        return read_line(
            self._first_line + self._buffer.count(b"\n", 0, begin), raw.decode("utf-8", "replace")
        )

    def _confirmed(self, text: bytes, stem: _Stem) -> Iterator[int]:
        """Offsets of lines with one of a stem's words, one a line, as long as there are few of its kind."""
        if (first := text.find(stem.word)) < 0:
            return
        dense = len(stem.kinds) > 1 and text.count(stem.word, first) >= _DENSE
        counted = False
        for word in stem.kinds if dense else (stem.word,):
            at = text.find(word)
            while at >= 0:
                if self._is_enough(word):
                    if not counted:  # a line has several of these words
                        self.reading.unread += text.count(word, at)
                        counted = True
                    break
                begin = text.rfind(b"\n", max(0, at - POLICY.after), at) + 1 or max(0, at - POLICY.after)
                end = text.find(b"\n", at, at + POLICY.after)
                end = min(at + POLICY.after, len(text)) if end < 0 else end
                kind = word if dense else self._kind(stem, text[begin:end])
                if kind is not None and (stem.confirm is None or stem.confirm.search(text, begin, end)):
                    if self._is_enough(kind):
                        self.reading.unread += 1
                    else:
                        self._kinds[kind] += 1
                        yield at
                at = text.find(word, end)

    @staticmethod
    def _kind(stem: _Stem, line: bytes) -> bytes | None:
        for kind in stem.kinds:
            if kind in line:
                return kind
        return None

    def _is_enough(self, kind: bytes) -> bool:
        return self._kinds[kind] >= (POLICY.reports if kind in _REPORTS else POLICY.of_a_kind)

    def _read_around(self, hits: list[int]) -> None:
        """Read the lines around some hits that are close together."""
        begin = self._line_start(hits[0] - POLICY.before)
        last = self._buffer.find(b"\n", hits[-1] + POLICY.after, hits[-1] + POLICY.after + POLICY.margin)
        end = min(len(self._buffer), hits[-1] + 2 * POLICY.after) if last < 0 else last
        number = self._first_line + self._buffer.count(b"\n", 0, begin)
        hit_line = number + self._buffer.count(b"\n", begin, hits[0])
        first = max(hit_line - POLICY.wrapped_lines, self._read_to + 1)
        if hit_line <= self._read_to and hits[0] >= self._read_end:  # further on in an overlong line
            begin, number, first = max(begin, self._read_end), hit_line, hit_line
        lines = list(_lines(self._buffer[begin:end], number))
        self.reading.messages += find(lines, first)
        self.reading.traits |= _traits(self._buffer[begin:end])
        self.reading.speaks = self.reading.speaks or first_that_speaks(lines)
        self._read_to, self._read_end = lines[-1].number, end


def _lines(raw: bytes, first: int) -> Iterator[LogLine]:
    """Lines of a piece of a log. A carriage return, as of progress bars, begins a line of the same number."""
    text = raw.decode("utf-8", "replace")
    if text.endswith("\n"):
        text = text[:-1]
    for number, line in enumerate(text.split("\n"), first):
        for part in line.rstrip("\r").split("\r") if "\r" in line else (line,):
            yield from read_pieces(number, part)
