import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.model.units import (
    MIB,
    count,
    devices_in_words,
    duration,
    four_digits,
    measured_time,
    parse_duration,
    parse_size,
    rank_list,
    ranks_in_words,
    rate,
    size,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
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
        (1023.94 * 1024, "1023.9 KiB"),
        (1023.96 * 1024, "1.0 MiB"),
        (-1024, "-1.0 KiB"),
        (-1023.4, "-1023 B"),
        (1.5 * 1024**3, "1.5 GiB"),
    ],
)
def test_size(nbytes, text):
    assert size(nbytes) == text


@given(st.integers(min_value=-(2**62), max_value=2**62))
def test_size_is_short_and_right_to_a_tenth_of_its_unit(nbytes):
    number, unit = size(nbytes).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert abs(float(number)) < 1024
    assert abs(float(number) * scale - nbytes) <= 0.0501 * scale


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
        ("3kb", 3000),
        ("3 KiB", 3072),
        (" 0.5MiB ", 1 << 19),
        ("1B", 1),
        (1, 1),
    ],
)
def test_sizes_as_people_write_them(text, nbytes):
    assert parse_size(text, "budget") == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("0.5s", 0.5)]
)
def test_times_as_people_write_them(text, seconds):
    assert parse_duration(text, "--for") == seconds


@pytest.mark.parametrize("given", ["soon", "", "0", "0s", "-1s", "5d", "s", "1.s", "5 minutes"])
def test_what_is_no_time_is_refused_by_name(given):
    with pytest.raises(ValueError, match="--for"):
        parse_duration(given, "--for")


@pytest.mark.parametrize("given", ["much", "8 GiB free", "", 0, "0", -1])
def test_what_is_no_size_is_refused_by_name(given):
    with pytest.raises(ValueError, match="max_peak"):
        parse_size(given, "max_peak")


def test_a_number_of_gibibytes_without_their_name_is_asked_back():
    with pytest.raises(ValueError, match=r"budget 24 is 24 bytes; did you mean 24GiB\?"):
        parse_size("24", "budget")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"),
        (0.0, "0 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
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


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([1, 0], "0, 1"),
        ([2, 0, 1], "0-2"),
        ([0, 2, 4], "0, 2, 4"),
        ([5, 5, 6, 7, 9, 11, 12], "5-7, 9, 11, 12"),
    ],
)
def test_runs_of_three_ranks_are_drawn_together(ranks, text):
    assert rank_list(ranks) == text


@given(st.sets(st.integers(min_value=0, max_value=200)))
def test_a_rank_list_names_each_rank_once(ranks):
    named = []
    for part in filter(None, rank_list(ranks).split(", ")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ranks)


def test_nouns_follow_their_numbers():
    assert [count(number, "step") for number in (0, 1, 2, 1000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]
    assert [ranks_in_words(ranks) for ranks in ([0], [0, 1])] == ["rank 0", "ranks 0, 1"]
    assert (rate(None, "step"), rate(1024, "second")) == ("n/a", "1.0 KiB per second")


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        (["cuda:3"], "cuda:3"),
        (["cuda:1", "cuda:0"], "cuda:0, 1"),
        (["host", "cuda:0", "cpu"], "cpu, cuda:0, host"),
    ],
)
def test_devices_in_words(devices, text):
    assert devices_in_words(devices) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (9.9994, "9.999"),
        (99.994, "99.99"),
        (-127.34, "-127.3"),
        (9999.4, "9999"),
        (10000, "10000"),
    ],
)
def test_four_digits(value, text):
    assert four_digits(value) == text


def test_a_mebibyte() -> None:
    assert MIB == 1_048_576
