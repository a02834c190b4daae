"""The table of slow tests: what makes a test slow, and that its files are there."""

from __future__ import annotations

from support import slow_table


def test_what_failed_or_was_skipped_stays_as_it_was() -> None:
    records = [
        "9.00 passed a[b c]",
        "9.00 failed new",
        "0.10 failed old",
        "0.00 skipped other",
        "2.99 passed quick",
    ]
    before = {"old", "other", "quick"}
    assert slow_table.slow_of(records, before) == {"a[b c]", "old", "other"}


def test_the_table_names_files_that_are_there() -> None:
    files = {test.partition("::")[0] for test in slow_table.listed()}
    assert files and all((slow_table.TESTS.parent / file).is_file() for file in files)
