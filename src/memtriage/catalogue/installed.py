"""Which entries of the catalogue the libraries of this machine have, by their installed versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import metadata

from memtriage.catalogue.entry import Holder, Span
from memtriage.model.holders import HolderHere

VersionOf = Callable[[Holder], str | None]
"""Tells the installed version of an entry's library; None where it is not installed."""


def installed_version(holder: Holder) -> str | None:
    """The version of the first of its distributions that is installed. Imports nothing."""
    for name in holder.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def release(version: str) -> tuple[int, ...]:
    """The numbers of a release.

    >>> release("2.14.1+cu130"), release("2.9.0.dev0"), release("unknown")
    ((2, 14, 1), (2, 9, 0), ())
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def holders_here(holders: Iterable[Holder], version_of: VersionOf = installed_version) -> list[HolderHere]:
    """The entries, each with whether it applies to what is installed."""
    listed = []
    for holder in holders:
        version = version_of(holder)
        applies, reason = _applies(holder, version)
        listed.append(
            HolderHere(
                name=holder.name,
                library=holder.library,
                kind=holder.kind,
                symbol=holder.symbol,
                holds=holder.holds,
                clears=holder.clears,
                refills=holder.refills,
                policy=holder.policy,
                why=holder.why,
                forbidden=list(holder.forbidden),
                version=version,
                applies=applies,
                versions=versions_in_words(holder.spans),
                reason=reason,
            )
        )
    return listed


def _applies(holder: Holder, version: str | None) -> tuple[bool, str]:
    if not holder.distributions:
        return True, "looked for in every process"
    if version is None:
        return False, f"{holder.library} is not installed"
    if not holder.spans:
        return True, f"{holder.library} {version} is installed"
    spans = [span for span in holder.spans if span.covers(release(version))]
    if spans:
        return True, f"{holder.library} {version} has it: {versions_in_words(spans)}"
    return False, f"{holder.library} {version} does not have it"


def versions_in_words(spans: Iterable[Span]) -> str:
    """The versions that have an entry: `2.0 up to 2.15 (not in it): FusedAttnFunc`; `all` without spans."""
    return "; ".join(map(_span, spans)) or "all"


def _span(span: Span) -> str:
    since = f"from {_dotted(span.since)} on" if span.since else ""
    before = f"fixed in {_dotted(span.before)}" if span.before else ""
    words = ", ".join(part for part in (since, before) if part)
    return f"{span.site} ({words})" if span.site else words


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
