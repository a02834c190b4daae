import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.report.text import count, duration, rank_list, rate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.9999, "1.0 s"),
        (9.87, "9.9 s"),
        (9.96, "10 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 00 min"),
        (7500, "2 h 05 min"),
        (360_000, "100 h 00 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_rate_and_count():
    assert rate(164 * 1024**2, "step") == "164.0 MiB per step"
    assert rate(None, "step") == "n/a"
    assert (count(0, "step"), count(1, "step"), count(1200, "step")) == ("0 steps", "1 step", "1,200 steps")


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([4], "4"), ([1, 0], "0, 1"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7, 8")]
)
def test_rank_list(ranks, text):
    assert rank_list(ranks) == text


@given(st.sets(st.integers(min_value=0, max_value=200)))
def test_a_rank_list_names_each_rank_once(ranks):
    named = []
    for part in filter(None, rank_list(ranks).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)
