"""What is said of host memory: the advice that depends on figures and versions."""

from __future__ import annotations

import pytest

from memtriage.playbook.host import pinned_remedy, trim


@pytest.mark.parametrize("version", ["2.8.0", "2.11.0+cu130", "2.12.1", "2.12.0a0+git123"])
def test_versions_without_the_settings_are_not_told_of_them(version: str) -> None:
    assert "pinned_m" not in pinned_remedy(version)


@pytest.mark.parametrize(
    "version", ["2.13.0", "2.13.0+cu130", "2.13.1", "2.14.0", "2.14.1rc1", "2.13.0a0+git1"]
)
def test_combination_that_overflows_the_heap_is_not_proposed(version: str) -> None:
    advice = pinned_remedy(version)
    assert "pinned_max_cached_size_mb:" in advice
    assert "round_threshold" not in advice


@pytest.mark.parametrize("version", ["2.14.1", "2.15.0", "3.0"])
def test_mended_versions_get_the_setting_that_keeps_the_cache(version: str) -> None:
    assert "pinned_max_round_threshold_mb:" in pinned_remedy(version)


@pytest.mark.parametrize("version", ["3.0.0", "3", "2.14.1.1", "2.20"])
def test_versions_are_compared_by_number(version: str) -> None:
    assert pinned_remedy(version) == pinned_remedy("2.14.1")
    assert pinned_remedy("2.9") == pinned_remedy("") == pinned_remedy("1.99.99") == pinned_remedy("2.12.0")


def test_any_version_can_do_without_rounding() -> None:
    for version in ("2.12.0", "2.13.0", "2.15.0"):
        assert "pin buffers whose size is a power of two" in pinned_remedy(version)


def test_a_trim_says_what_it_returns() -> None:
    assert trim(780 << 20) == (
        "call memtriage.malloc_trim() where a phase ends (after loading, after evaluation): it returns "
        "780.0 MiB that no step takes again; or start with `memtriage run --host-tuning`"
    )
