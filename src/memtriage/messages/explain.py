"""Explain an error text or a whole log: what failed first, what that proves, and what can be done."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from memtriage.messages.case import Case, phase_of
from memtriage.messages.evidence import evidence, settle, stale_advice
from memtriage.messages.fixes import fixes
from memtriage.messages.grammar.find import FoundMessage
from memtriage.messages.judge import judge
from memtriage.messages.log_file import LogReading, read_text, serves
from memtriage.messages.shapes import factor, with_shifted
from memtriage.model.explanation import Explanation, Label, LogEvent, Role, Settle
from memtriage.model.units import count, rank_list

_CONFIDENCE: Final = {1: 0.95, 2: 0.65, 3: 0.5}
_CUT: Final = 0.8
_MENTIONED: Final = 0.3
"""Confidence of a diagnosis that rests on a line about memory in no known form."""
_WHOLE_ANYWAY: Final[frozenset[Label]] = frozenset({"unknown", "absurd_request", "system_memory_fallback"})
"""Labels that do not depend on figures that may be missing."""
_SAME_FAILURE_LINES: Final = 200
_WHOSE: Final = ("pid", "local_rank", "rank", "job")
"""Facts that differ between messages of different processes."""
_QUOTED: Final = 200
_SHAPES: Final = frozenset({"params", "ranks", "layers"})
"""Sizes that are no dimension of a tensor; they serve to compute what a fix saves."""


def explain(text: str, shapes: Mapping[str, int] | None = None) -> Explanation:
    """Explain the first failure in an error text or a log, with fixes in order of cost. Sizes in bytes.

    Looks at the text alone. Any text is accepted; without a memory failure the diagnosis is `unknown`.

    Args:
        text: an error message, a traceback, or a whole log of several ranks.
        shapes: sizes by name (batch, seq, vocab, hidden, heads, ...), to factor the failing request;
            `params`, `ranks` and `layers` serve to compute savings.
    """
    return explain_reading(read_text(text), shapes)


def explain_reading(reading: LogReading, shapes: Mapping[str, int] | None = None) -> Explanation:
    """Explain what was found in a log; see `explain`."""
    judged = [replace(hit, labels=judge(hit.message)) for hit in reading.messages]
    known = [each for each in judged if each.message.family != "mention"]
    if any(each.label not in (None, "informational") for each in known):
        judged = known
    cause = _cause(judged)
    if cause is None:
        return _nothing(judged, reading)
    case = _case(cause, judged, reading, shapes or {})
    sure = _CONFIDENCE[len(case.labels)]
    cut = bool(case.message.missing) and case.label not in _WHOLE_ANYWAY
    told = evidence(case)
    if mentioned := (case.message.family, case.message.form) == ("mention", ""):
        quoted = _quoted(cause.excerpt)
        told.insert(0, f"line {cause.line:,} reports a lack of memory, in an unknown form: {quoted}")
    return Explanation(
        diagnosis=case.label,
        confidence=_MENTIONED if mentioned else round(sure * _CUT, 2) if cut else sure,
        also_possible=list(case.labels[1:]),
        fields=dict(case.message.fields),
        evidence=[*told, *_course(judged, cause, reading)],
        fixes=fixes(case),
        settle=settle(case),
        stale_advice=stale_advice(case),
        events=_events(judged, cause),
    )


def _case(
    cause: FoundMessage, judged: Sequence[FoundMessage], reading: LogReading, shapes: Mapping[str, int]
) -> Case:
    message = cause.message
    asked = message.number("requested")
    sizes = {name: count for name, count in shapes.items() if name not in _SHAPES}
    frames, phase = cause.frames, phase_of(cause.frames)
    engine = "engine" in reading.traits
    if frames:
        engine = any(serves(file.replace("\\", "/")) for file, _, _ in frames)
    weights = [each.message.number("weights") for each in judged if each.line < cause.line]
    return Case(
        message=message,
        labels=cause.labels,
        phase=phase,
        product=factor(asked, with_shifted(sizes)) if asked is not None else None,
        shapes=shapes,
        expandable=reading.expandable,
        weights=next((size for size in reversed(weights) if size is not None), None),
        traits=reading.traits,
        serving=engine and phase not in ("backward", "optimizer"),
    )


# What came first


def _cause(judged: Sequence[FoundMessage]) -> FoundMessage | None:
    """The first failure. If that is a kill without a reason, a later message that proves one comes first."""
    failures = [each for each in judged if each.label not in (None, "informational")]
    if not failures:
        return next((each for each in judged if each.label is not None), None)
    # SIGTERM was sent because something else failed, if anything did.
    sent = ("asked", "terminated")
    failures = [each for each in failures if each.message.form not in sent] or failures
    first = failures[0]
    if first.label == "killed_unproven":
        proof = next((failure for failure in failures if failure.label == "host_memory_limit"), None)
        if proof is not None:
            return proof
        # A signal's bare name may be no event at all.
        if not first.message.facts:
            return next((failure for failure in failures if failure.label != "killed_unproven"), first)
    if first.label == "unknown" and not first.message.fields:
        # A later message of the same failure, with figures.
        near = [each for each in failures if each.line - first.line <= _SAME_FAILURE_LINES]
        same = [each for each in near if each.source == first.source and each.message.fields]
        return next((each for each in same if each.message.device not in ("host", "cpu")), first)
    return first


def _role(each: FoundMessage, cause: FoundMessage) -> Role:
    if each is cause:
        return "cause"
    if each.label == "informational":
        return "context"
    killed = each.label == "killed_unproven" and cause.label == "host_memory_limit"
    same = killed or each.line < cause.line or _says_again(each, cause)
    return "same" if same else "followed"


def _says_again(each: FoundMessage, cause: FoundMessage) -> bool:
    """Whether a message of the host repeats the cause: several layers report one kill."""
    ours, theirs = cause.message, each.message
    whose = [(ours.facts.get(name), theirs.facts.get(name)) for name in _WHOSE]
    return (
        each.label == cause.label
        and ours.device == theirs.device == "host"
        and each.source == cause.source
        and each.line - cause.line <= _SAME_FAILURE_LINES
        and all(None in pair or pair[0] == pair[1] for pair in whose)
    )


def _events(judged: Sequence[FoundMessage], cause: FoundMessage | None) -> list[LogEvent]:
    """Return the events in order, like ones joined; the first failure is always alone."""
    groups: dict[tuple[object, ...], LogEvent] = {}
    for each in judged:
        role: Role = "followed" if cause is None else _role(each, cause)
        key = (role, each.message.family, each.message.form, each.label)
        event = groups.setdefault(
            key,
            LogEvent(
                family=each.message.family,
                diagnosis=each.label,
                role=role,
                line=each.line,
                source=each.source,
                device=each.message.device,
                count=0,
                text=each.excerpt,
            ),
        )
        event.count += 1
        if each.rank is not None and each.rank not in event.ranks:
            event.ranks = sorted([*event.ranks, each.rank])
    return sorted(groups.values(), key=lambda event: event.line)


def _course(judged: Sequence[FoundMessage], cause: FoundMessage, reading: LogReading) -> Iterator[str]:
    """What a log says about the order of events; nothing for a text with a single event."""
    others = [
        each
        for each in judged
        if each is not cause and each.label != "informational" and not _says_again(each, cause)
    ]
    if not others and reading.lines <= _SAME_FAILURE_LINES:
        return
    who = f", {cause.source}" if cause.source is not None else ""
    where = f"line {cause.line:,}{who}"
    yield f"the first of {count(1 + len(others), 'event')} in {count(reading.lines, 'line')}: {where}"
    after = [other for other in others if _role(other, cause) == "followed"]
    yield from _followers(after)
    if reading.unread:
        yield f"{reading.unread:,} more messages were counted, not read"


def _followers(after: Sequence[FoundMessage]) -> Iterator[str]:
    kinds: dict[str, list[FoundMessage]] = {}
    for judged in after:
        named = judged.label is None or judged.message.form == "terminated"
        kind = judged.message.form if named else str(judged.label).replace("_", " ")
        kinds.setdefault(kind, []).append(judged)
    for kind, hits in kinds.items():
        ranks = sorted({each.rank for each in hits if each.rank is not None})
        who = f" on {'rank' if len(ranks) == 1 else 'ranks'} {rank_list(ranks)}" if ranks else ""
        yield f"from line {hits[0].line:,}, as a consequence: {kind}{who}"


def _quoted(line: str) -> str:
    return textwrap.shorten(line, _QUOTED, placeholder=" ...")


def _nothing(judged: Sequence[FoundMessage], reading: LogReading) -> Explanation:
    """A text without any failure of memory."""
    evidence = [f"no message about memory in {count(reading.lines, 'line')}"]
    question = Settle(fact="what ended the program", command="memtriage run train.py")
    if judged:
        evidence = ["only consequences of a failure elsewhere", *_followers(judged)]
        question = Settle(
            fact="the first failure, in the log of the rank that died first",
            command="grep -ilE 'out of memory|oom|killed' LOGS/*",
        )
    elif reading.speaks is not None:
        number, line = reading.speaks
        evidence = [f"line {number:,} mentions memory, in an unknown form: {_quoted(line)}"]
        question = Settle(
            fact="the message of the failure itself: the first error, with the lines before it",
            command="grep -inE 'error|fail|kill|memory' train.log",
        )
    return Explanation(
        diagnosis="unknown",
        confidence=_MENTIONED if reading.speaks is not None else _CONFIDENCE[1],
        evidence=evidence,
        settle=question,
        events=_events(judged, None),
    )
