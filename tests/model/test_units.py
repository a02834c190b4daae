import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.units import size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (164 * 1024**2, "164.0 MiB"),
        (-2048, "-2.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1024**7, "1024.0 EiB"),
        (1.5 * 1024**3, "1.5 GiB"),
    ],
)
def test_size(count, text):
    assert size(count) == text


@given(st.integers(min_value=-(2**62), max_value=2**62))
def test_size_is_short_and_right_to_a_tenth_of_its_unit(count):
    number, unit = size(count).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert abs(float(number)) < 1024
    assert abs(float(number) * scale - count) <= 0.0501 * scale
