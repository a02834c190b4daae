"""Allocator settings: what torch accepts, what it makes of it, and the sizes that follow."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memtriage.allocator.settings import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    NEWEST,
    AllocatorSettings,
    ConfError,
    Version,
    parse_conf,
    parse_version,
)

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def torch_accepts() -> Iterator[Callable[[str], bool]]:
    """Asks torch's own parser, which is there without CUDA as well; restores the defaults."""
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        pytest.skip("this torch has no parser without CUDA")

    def accepts(conf: str) -> bool:
        try:
            set_settings(conf)
        except (ValueError, RuntimeError):
            return False
        return True

    yield accepts
    set_settings("large_segment_size_mb:20,expandable_segments:False")


@pytest.mark.parametrize(
    "conf",
    [
        "max_split_size_mb:20",
        "max_split_size_mb:19",
        "max_split_size_mb:abc",
        "max_split_size_mb:",
        "max_split_size_mb",
        "max_non_split_rounding_mb:19",
        "max_non_split_rounding_mb:64",
        "expandable_segments:True",
        "expandable_segments:true",
        "expandable_segments:True,max_split_size_mb:512",
        " max_split_size_mb : 64 , garbage_collection_threshold : 0.8 ",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:x",
        "roundup_power2_divisions:4",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "roundup_power2_divisions:[256:1,512:3]",
        "roundup_power2_divisions:[100:1]",
        "roundup_power2_divisions:[256:0]",
        "roundup_power2_divisions:[64:8",
        "large_segment_size_mb:10",
        "large_segment_size_mb:64",
        "large_segment_size_mb:64,max_split_size_mb:32",
    ],
)
def test_settings_are_valid_exactly_where_torch_accepts_them(
    conf: str, torch_accepts: Callable[[str], bool]
) -> None:
    torch_accepts("large_segment_size_mb:20")
    try:
        parse_conf(conf, "2.11" if conf.startswith("large") else None)
        accepted = True
    except ConfError:
        accepted = False
    assert accepted == torch_accepts(conf)


def test_the_defaults_are_those_of_the_headers() -> None:
    assert parse_conf("", "2.11.0+cu130") == AllocatorSettings(torch_version=(2, 11))


def test_every_setting_is_read() -> None:
    settings = parse_conf(
        "large_segment_size_mb:32, max_split_size_mb:256, garbage_collection_threshold:0.7,"
        "per_process_memory_fraction:0.5, throw_on_cudamalloc_oom:True, expandable_segments:True,"
        "roundup_power2_divisions:8, pinned_use_background_threads:True, backend:native",
        "2.12.1",
    )
    assert settings == AllocatorSettings(
        large_segment_size=32 * MIB,
        max_split_size=256 * MIB,
        max_non_split_rounding=32 * MIB,
        garbage_collection_threshold=0.7,
        memory_fraction=0.5,
        throw_on_cudamalloc_oom=True,
        expandable_segments=True,
        roundup_power2_divisions=(8,) * 16,
        torch_version=(2, 12),
    )


@pytest.mark.parametrize(
    ("conf", "version", "words"),
    [
        ("max_spilt_size_mb:64", "2.11", "unknown allocator setting 'max_spilt_size_mb'; torch 2.11 knows:"),
        ("large_segment_size_mb:64", "2.10.0", "large_segment_size_mb needs torch 2.11 or newer"),
        ("max_split_size_mb:20", "2.8", "max_split_size_mb is 20, but must be at least 21"),
        ("expandable_segments:yes", "2.11", "should be True or False (spelt like this), not 'yes'"),
        ("backend:cudaMallocAsync", "2.11", "only the native allocator can"),
        ("max_split_size_mb:256MB", "2.11", "should be a whole number, not '256MB'"),
        ("per_process_memory_fraction:1.5", "2.11", "must lie between 0 and 1"),
        ("roundup_power2_divisions:[8]", "2.11", "expected boundary:divisions, got '8'"),
        ("", "two", "torch_version should look like 2.11.0, not 'two'"),
    ],
)
def test_an_error_says_what_was_given_and_what_was_expected(conf: str, version: str, words: str) -> None:
    with pytest.raises(ConfError) as error:
        parse_conf(conf, version)
    assert words in str(error.value)


@pytest.mark.parametrize(("least", "version"), [(21, (2, 8)), (20, (2, 9)), (20, (2, 15))])
def test_the_least_size_that_may_stay_whole_depends_on_the_version(least: int, version: Version) -> None:
    for key in ("max_split_size_mb", "max_non_split_rounding_mb"):
        assert parse_conf(f"{key}:{least}", version)
        with pytest.raises(ConfError, match=f"must be at least {least}"):
            parse_conf(f"{key}:{least - 1}", version)


@pytest.mark.parametrize(("given", "fraction"), [("1.0", None), ("0.99", 0.99), ("0", 0.0)])
def test_a_fraction_of_everything_is_no_limit(given: str, fraction: float | None) -> None:
    assert parse_conf(f"per_process_memory_fraction:{given}", "2.11").memory_fraction == fraction


def test_without_a_version_the_installed_one_is_meant() -> None:
    major, minor = torch.__version__.split(".")[:2]
    assert parse_version(None) == (int(major), int(minor))
    assert parse_version((2, 9)) == (2, 9)
    assert AllocatorSettings().torch_version == NEWEST


def test_without_torch_the_newest_version_known_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert parse_version(None) == NEWEST
    assert parse_conf("expandable_segments_reserve:4").torch_version == NEWEST  # a setting of the newest


BY_SIZE = "[256:2,512:4,1024:8,>:1]"


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        *((None, *sizes) for sizes in [(1, 512), (511, 512), (512, 512), (513, 1024), (1536, 1536)]),
        (None, MIB + 1, MIB + 512),
        (2, 1200, 1536),  # The example beside `roundup_power2_next_division`, with two divisions.
        (4, 1200, 1536),  # At most 512 x divisions bytes: plain rounding.
        (4, 5 * MIB, 5 * MIB),
        (4, 5 * MIB + 1, 6 * MIB),
        (4, 7 * MIB + 1, 8 * MIB),
        (4, 8 * MIB, 8 * MIB),
        (2, 9 * MIB, 12 * MIB),
        (BY_SIZE, 300 * MIB, 384 * MIB),
        (BY_SIZE, 600 * MIB, 640 * MIB),
        (BY_SIZE, GIB + 1, GIB + 128 * MIB),
        (BY_SIZE, 3 * GIB + 1, 3 * GIB + 512),
        (BY_SIZE, 3 * MIB + 1, 4 * MIB),
        ("[32768:2]", 200 * GIB, 256 * GIB),  # The last interval serves everything above.
    ],
)
def test_requests_are_rounded(divisions: object, size: int, rounded: int) -> None:
    settings = parse_conf("" if divisions is None else f"roundup_power2_divisions:{divisions}", "2.11")
    assert settings.round_size(size) == rounded


def test_divisions_have_an_interval_each() -> None:
    settings = parse_conf(f"roundup_power2_divisions:{BY_SIZE}", "2.11")
    assert settings.roundup_power2_divisions == (2,) * 9 + (4, 8) + (1,) * 5


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, LARGE_SEGMENT),
        (10 * MIB - 512, LARGE_SEGMENT),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_segment_sizes(rounded: int, segment: int) -> None:
    assert AllocatorSettings().segment_size(rounded) == segment


@given(st.integers(1, 1 << 42), st.sampled_from([0, 1, 2, 4, 8, 16, 64]))
def test_rounding_only_adds_and_keeps_the_grain(size: int, divisions: int) -> None:
    settings = AllocatorSettings(roundup_power2_divisions=(divisions,) * 16)
    rounded = settings.round_size(size)
    assert size <= rounded
    assert rounded % MIN_BLOCK == 0
    assert settings.round_size(rounded) == rounded
    slack = MIN_BLOCK if divisions < 2 else max(MIN_BLOCK, (1 << size.bit_length()) // divisions)
    assert rounded - size < slack


@given(st.integers(1, 1 << 42))
def test_a_segment_holds_its_block(size: int) -> None:
    settings = AllocatorSettings()
    rounded = settings.round_size(size)
    assert settings.segment_size(rounded) >= rounded
    assert settings.segment_size(rounded) % (2 * MIB) == 0
