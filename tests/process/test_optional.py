"""A missing optional library is an error that names the extra to install; all else passes as it is."""

from __future__ import annotations

import pytest

from memtriage.process.optional import needs


def test_a_missing_library_names_its_extra() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"The page needs no_such.*'memtriage\[html\]'") as error,
        needs("no_such", "html", "The page"),
    ):
        import no_such  # type: ignore[import-not-found]  # noqa: F401
    assert error.value.name == "no_such" and error.value.__suppress_context__


def test_another_missing_library_passes() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such'"), needs("rich", "html", "It"):
        import no_such  # noqa: F401
