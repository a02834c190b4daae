import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.units import duration, measured_time, parse_size, size


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


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 << 30),
        ("80 GB", 80 * 10**9),
        ("1.5g", 1_500_000_000),
        ("24000MB", 24 * 10**9),
        ("1024", 1024),
        (4096, 4096),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_as_people_write_them(text, nbytes):
    assert parse_size(text, "budget") == nbytes


@pytest.mark.parametrize("given", ["much", "8 GiB free", "", 0, "0", -1])
def test_what_is_no_size_is_refused_by_name(given):
    with pytest.raises(ValueError, match="max_peak"):
        parse_size(given, "max_peak")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0.0, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_time_spans(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (1.0, "1.000 s"),
        (0.9999, "999.9 ms"),
        (0.001, "1.000 ms"),
        (0.000999, "999.0 us"),
        (-2.0, "-2.000 s"),
    ],
)
def test_measured_times_have_four_digits(seconds, text):
    assert measured_time(seconds) == text
