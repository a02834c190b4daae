import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.report.plot import area, is_flat


def test_a_rise():
    assert area([0, 1, 2, 3], width=4, height=2) == ["  ▃█", "▁▆██"]


def test_ascii():
    lines = area(list(range(20)), width=20, height=3, ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert lines[0].endswith("#") and lines[-1].startswith(".")


def test_flat_and_single_values_show():
    assert area([7], width=3, height=1) == ["▁▁▁"]
    assert area([5, 5], width=2, height=2) == ["", "▁▁"]


def test_a_spike_is_not_lost_when_columns_hold_many_values():
    values = [0] * 1000
    values[617] = 100
    assert area(values, width=10, height=1)[0].count("█") == 1


def test_flat_is_within_2_percent_of_the_highest():
    assert is_flat([99, 100]) and is_flat([7])
    assert not is_flat([98, 100]) and not is_flat([0, 1])


@pytest.mark.parametrize(("values", "width"), [([], 5), ([1], 0)])
def test_nothing_to_draw(values, width):
    with pytest.raises(ValueError, match="cannot draw"):
        area(values, width=width)


@given(
    st.lists(st.integers(min_value=0, max_value=2**50), min_size=1, max_size=300),
    st.integers(min_value=1, max_value=120),
    st.integers(min_value=1, max_value=6),
)
def test_it_fits_and_reaches_top_and_bottom(values, width, height):
    lines = area(values, width=width, height=height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert " " not in lines[-1]
    if len(set(values)) > 1:
        assert "█" in lines[0]
