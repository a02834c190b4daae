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

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<quoted>'[^']*')|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|(?P<word>[A-Za-z_][\w.-]*)|(?P<sign>[-+*]))"
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

    Args:
        text: as in a target's `at_most`.
        metric: what is limited.
        variants: their names.
        dimensions: all metrics, with what they are measured in.

    Raises:
        TrialsError: the text is no limit, names what there is not, or adds seconds to bytes.
    """
    reader = _LimitReader(text, metric, variants, dimensions)
    return Limit(text, reader.terms())


class _LimitReader:
    def __init__(
        self, text: str, metric: str, variants: Collection[str], dimensions: Mapping[str, Dimension]
    ) -> None:
        self._text = text
        self._metric = metric
        self._variants = variants
        self._dimensions = dimensions
        self._tokens = _tokens(text)

    def terms(self) -> tuple[Term, ...]:
        terms = [self._term(1.0)]
        while self._tokens:
            kind, sign = self._tokens.pop(0)
            if kind != "sign" or sign not in "+-":
                raise self._error(f"{sign!r} found where '+' or '-' is expected")
            terms.append(self._term(-1.0 if sign == "-" else 1.0))
        return tuple(terms)

    def _term(self, sign: float) -> Term:
        kind, value = self._next("a name or an amount")
        if kind != "number":
            return self._quantity(sign, kind, value)
        kind, word = self._tokens[0] if self._tokens else ("end", "")
        if (kind, word) in (("word", "x"), ("sign", "*")):
            self._tokens.pop(0)
            return self._quantity(sign * float(value), *self._next("a name"))
        if kind == "word":
            self._tokens.pop(0)
        return Term(sign * self._amount(value, word if kind == "word" else ""))

    def _quantity(self, factor: float, kind: str, name: str) -> Term:
        if kind not in ("word", "quoted"):
            raise self._error(f"{name!r} found where a name is expected")
        if self._tokens[:1] == [("word", "of")]:
            self._tokens.pop(0)
            _, variant = self._next("a variant")
            return self._checked(Term(factor, name, variant))
        if name in self._variants:
            return Term(factor, self._metric, name)
        return self._checked(Term(factor, name))

    def _checked(self, term: Term) -> Term:
        if term.variant is not None and term.variant not in self._variants:
            raise self._error(f"there is no variant {term.variant!r}, only {_names(self._variants)}")
        dimension = self._dimensions.get(term.metric or "")
        if dimension is None:
            raise self._error(
                f"{term.metric!r} is neither a variant ({_names(self._variants)}) nor a metric "
                f"({_names(self._dimensions)})"
            )
        wanted = self._dimensions[self._metric]
        if dimension != wanted:
            raise self._error(f"{term.metric!r} is in {dimension}, {self._metric!r} in {wanted}")
        return term

    def _amount(self, number: str, unit: str) -> float:
        dimension = self._dimensions[self._metric]
        if dimension == "number":
            if unit:
                raise self._error(f"{self._metric!r} is a plain number, without the unit {unit!r}")
            return float(number)
        if dimension == "seconds":
            seconds = parse_seconds(f"{number} {unit}")
            if seconds is None:
                raise self._error(f"'{number} {unit}' is not a time; use '1.5 s', '20 ms' or '2 min'")
            return seconds
        if float(number) == 0:
            return 0.0
        if not unit.lower().endswith("b"):
            raise self._error(f"'{number}{unit and ' ' + unit}' is not a size; use '100 MB' or '1.5 GiB'")
        try:
            return float(parse_size(f"{number} {unit}", "amount"))
        except ValueError:
            raise self._error(f"'{number} {unit}' is not a size; use '100 MB' or '1.5 GiB'") from None

    def _next(self, expected: str) -> tuple[str, str]:
        if not self._tokens:
            raise self._error(f"it ends where {expected} is expected")
        return self._tokens.pop(0)

    def _error(self, what: str) -> TrialsError:
        return TrialsError(f"limit {self._text!r}: {what}; expected a sum, {_EXAMPLES}")


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    stripped = text.rstrip()
    while position < len(stripped):
        match = _TOKEN.match(stripped, position)
        if match is None:
            raise TrialsError(
                f"limit {text!r}: {stripped[position:].strip()!r} is not understood; "
                f"expected a sum, {_EXAMPLES}"
            )
        kind = match.lastgroup or ""
        value = match[kind]
        tokens.append((kind, value[1:-1] if kind == "quoted" else value))
        position = match.end()
    return tokens


def _names(names: Collection[str]) -> str:
    return ", ".join(map(repr, names))
