"""What is said of host memory: the advice that depends on figures and versions."""

from __future__ import annotations

import pytest

from memtriage.playbook.host import pinned_remedy, trim


@pytest.mark.parametrize(
    ("setting", "versions"),
    [
        ("", ["", "1.99.99", "2.8.0", "2.9", "2.11.0+cu130", "2.12.1", "2.12.0a0+git123"]),
        # Its combination with the other overflows the heap in these.
        (
            "pinned_max_cached_size_mb:",
            ["2.13.0", "2.13.0+cu130", "2.13.1", "2.14.0", "2.14.1rc1"],
        ),
        ("pinned_max_round_threshold_mb:", ["2.14.1", "2.14.1.1", "2.15.0", "2.20", "3", "3.0.0"]),
    ],
)
def test_a_version_is_told_of_the_setting_that_it_can_bear(setting: str, versions: list[str]) -> None:
    settings = {"pinned_max_cached_size_mb:", "pinned_max_round_threshold_mb:"}
    for version in versions:
        assert {each for each in settings if each in pinned_remedy(version)} == {setting} - {""}, version


def test_any_version_can_do_without_rounding() -> None:
    for version in ("2.12.0", "2.13.0", "2.15.0"):
        assert "pin buffers whose size is a power of two" in pinned_remedy(version)


def test_a_trim_says_what_it_returns() -> None:
    assert trim(780 << 20) == (
        "call memtriage.malloc_trim() where a phase ends (after loading, after evaluation): it returns "
        "780.0 MiB that no step takes again; or start with `memtriage run --host-tuning`"
    )
