"""Metrics of a trial, and the limits that targets set to them: `1.1 x allocated + 100 MB`, `1.01 x fp8`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from memtriage.model.units import parse_size
from memtriage.prove.table import TrialsError, parse_seconds

Dimension = Literal["seconds", "bytes", "number"]

TIME: Final = "time_per_step"
AT_MARK: Final = ("allocated", "reserved", "requested", "outside", "host_rss", "host_pinned")
"""Counters of a mark."""
PEAKS: Final = ("peak_allocated", "peak_reserved", "peak_host_rss")
METRICS: Final[Mapping[str, Dimension]] = {
    TIME: "seconds",
    **dict.fromkeys((*AT_MARK, *PEAKS), "bytes"),
}
"""What can be compared, besides the figures that `[values]` reads from the output."""

_NUMBER: Final = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_NAME: Final = r"'[^']*'|[A-Za-z_][\w.-]*"
_TERM: Final = re.compile(
    rf"\s*(?P<sign>[-+]?)\s*(?:"
    rf"(?:(?P<factor>{_NUMBER})\s*(?:x(?![\w.-])|\*)\s*)?(?P<name>{_NAME})(?:\s+of\s+(?P<variant>{_NAME}))?"
    rf"|(?P<amount>{_NUMBER})\s*(?P<unit>[A-Za-z_][\w.-]*)?)\s*"
)
_EXAMPLES: Final = "e.g. 'fp8', '1.01 x fp8', '1.1 x allocated + 100 MB', \"allocated of 'fp8 + clear'\""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a limit: an amount, or so many times a metric of a variant.

    Attributes:
        factor: negative for what is subtracted. The amount itself where `metric` is None: in bytes, seconds
            or as the number stands.
        metric: None for an amount.
        variant: whose metric; None for that of the variant which is judged.
    """

    factor: float
    metric: str | None = None
    variant: str | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """A sum of terms.

    Attributes:
        text: as it was written.
        terms: at least one.
    """

    text: str
    terms: tuple[Term, ...]

    @property
    def variants(self) -> list[str]:
        """Other variants that the limit speaks of."""
        return list(dict.fromkeys(term.variant for term in self.terms if term.variant is not None))


def parse_limit(
    text: str, metric: str, variants: Collection[str], dimensions: Mapping[str, Dimension]
) -> Limit:
    """Return the limit that a text sets to a metric.

    A bare name is a variant, whose `metric` is meant, or a metric, of the variant that is judged. Names with
    other characters than letters, digits, `_`, `.` and `-` stand between single quotes.

    Raises:
        TrialsError: the text is no limit, names what there is not, or adds seconds to bytes.
    """
    terms: list[Term] = []
    position = 0
    try:
        while position < len(text) or not terms:
            match = _TERM.match(text, position)
            if match is None or bool(match["sign"]) != bool(terms):
                raise TrialsError(f"{text[position:].strip()!r} is not understood")
            terms.append(_term(match, metric, variants, dimensions))
            position = match.end()
    except TrialsError as error:
        raise TrialsError(f"limit {text!r}: {error}; expected a sum, {_EXAMPLES}") from None
    return Limit(text, tuple(terms))


def _term(
    match: re.Match[str], metric: str, variants: Collection[str], dimensions: Mapping[str, Dimension]
) -> Term:
    sign, wanted = -1.0 if match["sign"] == "-" else 1.0, dimensions[metric]
    if match["amount"] is not None:
        return Term(sign * _amount(match["amount"], match["unit"] or "", metric, wanted))
    factor, name = sign * float(match["factor"] or 1), match["name"].strip("'")
    variant = match["variant"] and match["variant"].strip("'")
    if variant is None and name in variants:
        return Term(factor, metric, name)
    if variant is not None and variant not in variants:
        raise TrialsError(f"there is no variant {variant!r}, only {_names(variants)}")
    dimension = dimensions.get(name)
    if dimension is None:
        raise TrialsError(
            f"{name!r} is neither a variant ({_names(variants)}) nor a metric ({_names(dimensions)})"
        )
    if dimension != wanted:
        raise TrialsError(f"{name!r} is in {dimension}, {metric!r} in {wanted}")
    return Term(factor, name, variant)


def _amount(number: str, unit: str, metric: str, dimension: Dimension) -> float:
    text = f"{number} {unit}".strip()
    if dimension == "number":
        if unit:
            raise TrialsError(f"{metric!r} is a plain number, without the unit {unit!r}")
        return float(number)
    if dimension == "seconds":
        seconds = parse_seconds(text)
        if seconds is None:
            raise TrialsError(f"{text!r} is not a time; use '1.5 s', '20 ms' or '2 min'")
        return seconds
    if float(number) == 0:
        return 0.0
    try:
        if unit.lower().endswith("b"):
            return float(parse_size(text, "amount"))
    except ValueError:
        pass
    raise TrialsError(f"{text!r} is not a size; use '100 MB' or '1.5 GiB'")


def _names(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
