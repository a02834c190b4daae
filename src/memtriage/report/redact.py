"""Take paths, host names and arguments out of a recorded run before its report is shown to strangers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from memtriage.model.evidence import CensusSeen
from memtriage.store.reader import RankRecord, RunRecord

S = TypeVar("S", bound=msgspec.Struct)

ARGUMENT: Final = "[argument]"
"""Stands for an argument of the script, and for its value where another text repeats it."""

_CODES: Final = frozenset(
    {"kind", "verdict", "certainty", "device", "owner", "collected", "cut", "event", "where"}
)
"""Fields whose values are memtriage's own words."""
_SHORTEST: Final = 3
"""Characters of an argument that is looked for in other texts: shorter ones occur by chance."""
_URL: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\")>\]]+", re.IGNORECASE)
_FOLDERS: Final = re.compile(
    r"(?<![\w.…/])(?:~|[A-Za-z]:)?[/\\](?!(?:dev|proc|sys)/)(?:[^\s/\\'\":,;()\[\]]+[/\\])+"
)


def redacted(run: RunRecord) -> RunRecord:
    """Return a run without what names its owner's files, machines and settings.

    Host names become `host0`, `host1`, ...; of absolute paths the last part stays; of the command line the
    script's name. An argument's value is replaced wherever it occurs as a word. Names of functions,
    variables, files of code and marks stay: without them a report says nothing.
    """
    text = _texts(run.ranks)
    return RunRecord([_rank(rank, text) for rank in run.ranks], [text(note) for note in run.notes])


def _texts(ranks: Iterable[RankRecord]) -> Callable[[str], str]:
    """Return the function that redacts a text."""
    hosts = dict.fromkeys(rank.start.host for rank in ranks if rank.start.host)
    arguments = {
        value
        for rank in ranks
        for word in rank.start.argv[1:]
        for value in (word, word.partition("=")[2])
        if len(value) >= _SHORTEST and not value.startswith("-") and not _is_number(value)
    }
    words = dict.fromkeys(arguments, ARGUMENT)
    words |= {str(host): f"host{number}" for number, host in enumerate(hosts)}
    known = re.compile(
        "|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in sorted(words, key=len, reverse=True))
        or r"(?!)"
    )

    @lru_cache(maxsize=4096)
    def text(given: str) -> str:
        shown = known.sub(lambda match: words[match[0]], given)
        return _FOLDERS.sub("…/", _URL.sub("[address]", shown))

    return text


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _rank(rank: RankRecord, text: Callable[[str], str]) -> RankRecord:
    start = rank.start
    script = [Path(word).name for word in start.argv[:1]]
    return replace(
        rank,
        path=Path(rank.path.name),
        start=msgspec.structs.replace(
            start,
            run_id="",
            host=None if start.host is None else text(start.host),
            argv=script + [ARGUMENT] * len(start.argv[1:]),
        ),
        marks=[
            mark if text(mark.name) == mark.name else msgspec.structs.replace(mark, name=text(mark.name))
            for mark in rank.marks
        ],
        ledgers={device: _struct(ledger, text) for device, ledger in rank.ledgers.items()},
        notes=[text(note) for note in rank.notes],
        evidence=[
            msgspec.structs.replace(
                line,
                holders=[_struct(seen, text) for seen in line.holders],
                data=[_struct(seen, text) for seen in line.data],
            )
            if isinstance(line, CensusSeen)
            else line
            for line in rank.evidence
        ],
        end=None if rank.end is None else _struct(rank.end, text),
        final_findings=[_struct(finding, text) for finding in rank.final_findings],
        interim_findings=[_struct(finding, text) for finding in rank.interim_findings],
    )


def _struct(given: S, text: Callable[[str], str]) -> S:
    return msgspec.convert(_plain(msgspec.to_builtins(given), text), type(given))


def _plain(value: Any, text: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {key: item if key in _CODES else _plain(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, text) for item in value]
    return value
