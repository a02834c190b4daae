"""The small language of limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.prove.limits import METRICS, Limit, Term, parse_limit
from memtriage.prove.table import TrialsError

NAMES = ["bf16", "fp8", "fp8 + clear", "x"]
DIMENSIONS = {**METRICS, "loss": "number"}


def limit(text: str, metric: str = "reserved") -> Limit:
    return parse_limit(text, metric, NAMES, DIMENSIONS)


@pytest.mark.parametrize(
    ("text", "metric", "terms"),
    [
        ("bf16", "allocated", [Term(1.0, "allocated", "bf16")]),
        ("1.01 x fp8", "time_per_step", [Term(1.01, "time_per_step", "fp8")]),
        ("1.01*fp8", "time_per_step", [Term(1.01, "time_per_step", "fp8")]),
        ("1.1 x allocated + 100 MB", "reserved", [Term(1.1, "allocated"), Term(100e6)]),
        ("1.1 x allocated + 100MiB", "reserved", [Term(1.1, "allocated"), Term(100.0 * 1024**2)]),
        ("'fp8 + clear' - 0.5 GiB", "reserved", [Term(1.0, "reserved", "fp8 + clear"), Term(-(2.0**29))]),
        ("allocated of 'fp8 + clear'", "reserved", [Term(1.0, "allocated", "fp8 + clear")]),
        ("2 x allocated of bf16", "reserved", [Term(2.0, "allocated", "bf16")]),
        ("2 x 'x'", "reserved", [Term(2.0, "reserved", "x")]),
        ("0", "outside", [Term(0.0)]),
        ("1.5 s + 20 ms", "time_per_step", [Term(1.5), Term(0.02)]),
        ("2.5", "loss", [Term(2.5)]),
        ("1.001 x fp8 + 1e-3", "loss", [Term(1.001, "loss", "fp8"), Term(0.001)]),
    ],
)
def test_what_limits_say(text: str, metric: str, terms: list[Term]) -> None:
    assert limit(text, metric).terms == tuple(terms)


@pytest.mark.parametrize(
    ("text", "metric", "said"),
    [
        ("", "reserved", "'' is not understood"),
        ("1.1 x", "reserved", "'1.1 x' is not a size"),
        ("1.1 x allocated +", "reserved", r"'\+' is not understood"),
        ("fp9", "reserved", "'fp9' is neither a variant .*'fp8'.* nor a metric"),
        ("allocated of fp9", "reserved", "no variant 'fp9'"),
        ("speed of fp8", "reserved", "'speed' is neither"),
        ("100", "reserved", "'100' is not a size"),
        ("100 miles", "reserved", "'100 miles' is not a size"),
        ("3 XB", "reserved", "'3 XB' is not a size"),
        ("100 MB", "time_per_step", "'100 MB' is not a time"),
        ("5 s", "loss", "plain number"),
        ("1.1 x allocated", "time_per_step", "'allocated' is in bytes, 'time_per_step' in seconds"),
        ("fp8 fp8", "reserved", "limit 'fp8 fp8': 'fp8' is not understood"),
        ("+ fp8", "reserved", r"'\+ fp8' is not understood"),
        ("fp8 # bf16", "reserved", "'# bf16' is not understood"),
    ],
)
def test_what_is_no_limit(text: str, metric: str, said: str) -> None:
    with pytest.raises(TrialsError, match=said):
        limit(text, metric)


def test_the_variants_that_a_limit_speaks_of() -> None:
    assert limit("fp8 + 0.5 x allocated + reserved of bf16 + 2 x fp8").variants == ["fp8", "bf16"]


@given(st.text(max_size=40), st.sampled_from(sorted(DIMENSIONS)))
def test_any_text_is_a_limit_or_an_error_in_one_line(text: str, metric: str) -> None:
    try:
        parsed = limit(text, metric)
    except TrialsError as error:
        assert "expected" in str(error)
    else:
        assert parsed.terms


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1.0, -1.0]),
            st.decimals(min_value=0, max_value=1000, places=3),
            st.sampled_from(sorted(METRICS)),
            st.sampled_from([None, *NAMES]),
        ),
        min_size=1,
    )
)
def test_a_limit_that_is_written_out_reads_back(parts: list[tuple[float, object, str, str | None]]) -> None:
    terms = [
        Term(sign * float(str(factor)), metric, variant)
        for sign, factor, metric, variant in parts
        if METRICS[metric] == "bytes"
    ]
    terms = [Term(abs(term.factor), term.metric, term.variant) for term in terms[:1]] + terms[1:]
    if not terms:
        return
    text = ""
    for term in terms:
        of = "" if term.variant is None else f" of '{term.variant}'"
        sign = "" if not text else " - " if str(term.factor).startswith("-") else " + "
        text += f"{sign}{abs(term.factor):.3f} x {term.metric}{of}"
    assert limit(text).terms == tuple(terms)
