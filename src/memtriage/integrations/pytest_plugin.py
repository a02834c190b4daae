"""The pytest plugin: `@pytest.mark.memory(no_growth=True, max_peak="2GiB", no_residue=True)` and `memory`.

Every pytest run of an environment with memtriage loads it, so nothing is imported before a test needs it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from memtriage.integrations.memory_check import MemoryCheck, MemoryProbe

MARKER: Final = "memory"
_DEMANDS: Final = ("no_growth", "max_peak", "no_residue")
_HELP: Final = (
    "memory(no_growth=False, max_peak=None, no_residue=False): fail the test if memory grows from step to "
    "step; if its peak rises by more than max_peak ('2GiB'; on CUDA devices that the test uses, else of the "
    "process); or if new tensors are alive after it (memtriage)"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _HELP)


@pytest.fixture
def memory() -> MemoryProbe:
    """Demands on memory for a part of a test: `with memory.check(no_growth=True): ...`."""
    from memtriage.integrations.memory_check import MemoryProbe

    return MemoryProbe()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Hold the demands of a marked test against its call alone: fixtures have been set up, and stay."""
    check = _check_for(pyfuncitem)
    if check is None:
        return (yield)
    # Not `with`: the error that a test ends in must not pass through frames that keep its tensors.
    check.begin()
    passed = False
    try:
        result = yield
        passed = True
    finally:
        failures = check.end(judge=passed)
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    return result


def _check_for(item: pytest.Function) -> MemoryCheck | None:
    demands: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers(MARKER))):  # a class's first, so that a test's own prevail
        if marker.args:
            pytest.fail(
                f"mark.memory{marker.args}: keywords only: no_growth, max_peak, no_residue", pytrace=False
            )
        demands |= marker.kwargs
    if not demands:
        return None
    if (mistyped := next((name for name in demands if name not in _DEMANDS), None)) is not None:
        from difflib import get_close_matches

        close = get_close_matches(mistyped, _DEMANDS, n=1)
        expected = f"did you mean {close[0]}?" if close else f"expected {', '.join(_DEMANDS)}"
        pytest.fail(f"mark.memory: unknown {mistyped!r}: {expected}", pytrace=False)
    from memtriage.integrations.memory_check import MemoryCheck

    try:
        return MemoryCheck(**demands)
    except (TypeError, ValueError) as error:
        pytest.fail(f"mark.memory: {error}", pytrace=False)
