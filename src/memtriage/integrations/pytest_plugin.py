"""The pytest plugin: `@pytest.mark.memory(no_growth=True, max_peak="2GiB", no_residue=True)` and `memory`.

`@pytest.mark.memory(peak="2GiB")` marks a build function, which is predicted instead of being run.

Every pytest run of an environment with memtriage loads it, so nothing is imported before a test needs it.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from memtriage.integrations.memory_check import MemoryCheck, MemoryProbe

MARKER: Final = "memory"
_DEMANDS: Final = ("no_growth", "max_peak", "no_residue")
_PREDICTED: Final = ("peak", "tolerance")
_HELP: Final = (
    "memory(no_growth=False, max_peak=None, no_residue=False): fail the test if memory grows from step to "
    "step; if its peak rises by more than max_peak ('2GiB'; on CUDA devices that the test uses, else of the "
    "process); or if new tensors are alive after it. "
    "memory(peak='2GiB', tolerance=0.01): the test is a build function; fail if the predicted peak is above "
    "(memtriage)"
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
    demands = _demands_on(pyfuncitem)
    if "peak" in demands:
        pyfuncitem.obj = partial(_check_prediction, pyfuncitem, **demands)  # called in its place
        return (yield)
    check = _check_for(demands)
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The argument of a build function is no fixture: only the trace calls it."""
    if any("peak" in marker.kwargs for marker in metafunc.definition.iter_markers(MARKER)):
        for name in signature(metafunc.function).parameters:
            metafunc.parametrize(name, ["cuda"], ids=["predicted"])


def _demands_on(item: pytest.Function) -> dict[str, Any]:
    demands: dict[str, Any] = {}
    for marker in reversed(list(item.iter_markers(MARKER))):  # a class's first, so that a test's own prevail
        if marker.args:
            pytest.fail(f"mark.memory{marker.args}: keywords only: {', '.join(_DEMANDS)}", pytrace=False)
        demands |= marker.kwargs
    expected = _PREDICTED if "peak" in demands else _DEMANDS
    if (mistyped := next((name for name in demands if name not in expected), None)) is not None:
        from difflib import get_close_matches

        close = get_close_matches(mistyped, expected, n=1)
        wanted = f"did you mean {close[0]}?" if close else f"expected {', '.join(expected)}"
        pytest.fail(f"mark.memory: unknown {mistyped!r}: {wanted}", pytrace=False)
    return demands


def _check_for(demands: dict[str, Any]) -> MemoryCheck | None:
    if not demands:
        return None
    from memtriage.integrations.memory_check import MemoryCheck

    try:
        return MemoryCheck(**demands)
    except (TypeError, ValueError) as error:
        pytest.fail(f"mark.memory: {error}", pytrace=False)


def _check_prediction(
    item: pytest.Function, *, peak: int | str, tolerance: float = 0.01, **arguments: object
) -> None:
    """Predict a build function in the place of calling it."""
    from memtriage.difference.elsewhere import Environment, predicted
    from memtriage.model.units import parse_size, size

    try:
        limit = parse_size(peak, "peak")
        if item.cls is not None:
            raise ValueError("peak= is for a build function, not for a method")
        here = Environment(item.name, item.config.invocation_params.dir)
        found = predicted(here, [f"{item.path}:{item.originalname}"], lambda line: None)
    except ValueError as error:
        pytest.fail(f"mark.memory: {error}", pytrace=False)
    if found.total > limit * (1 + tolerance):
        rows = "".join(
            f"\n  {size(row.bytes):>10}  {row.owner} {row.module or ''} {row.site or ''}".rstrip()
            for row in found.rows[:5]
        )
        pytest.fail(
            f"memory: the predicted peak is {size(found.total)} ({found.total:,} bytes); the test demands at "
            f"most {size(limit)} ({limit:,} bytes) and {tolerance:.1%}. Most of it:{rows}",
            pytrace=False,
        )
