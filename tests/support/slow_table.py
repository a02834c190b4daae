"""Measure which tests are slow: `python tests/support/slow_table.py [FOLDER or FILE]...` writes the table.

A test is slow if it needs 3 s or more of the processor, its subprocesses included. Time on the clock would
make a test slow because the machine was busy. Imports are left out, because whichever test comes first has
them, and a fixture that several tests share counts for each of them. Tests that failed or were skipped stay
as they were.

Any run can be measured: `PYTEST_ADDOPTS="--times FILE" make test`, then `slow_table.py --from FILE`.
"""

from __future__ import annotations

import importlib._bootstrap as importing
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent.parent
TABLE = TESTS / "slow.txt"
SLOW_S = 3.0


def listed() -> set[str]:
    """The node ids in the table."""
    return set(TABLE.read_text(encoding="utf-8").splitlines())


def _spent() -> float:
    """Seconds of the processor that this process and its ended subprocesses have used."""
    return sum(os.times()[:4])


class Times:
    """A plugin of pytest that writes a line per test: seconds of the processor, outcome, node id."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._imports = 0.0
        self._importing = False
        self._set_up = 0.0  # by fixtures that several tests share
        self._shared: dict[tuple[int, int], float] = {}
        self._outcomes: defaultdict[str, set[str]] = defaultdict(set)
        importing._find_and_load = self._timed(importing._find_and_load)  # type: ignore[attr-defined]

    def _timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(load)
        def timed(*args: Any) -> Any:
            if self._importing:
                return load(*args)
            self._importing, start = True, _spent()
            try:
                return load(*args)
            finally:
                self._importing = False
                self._imports += _spent() - start

        return timed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        start = _spent() - self._imports
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                spent = _spent() - self._imports - start
                self._shared[id(fixturedef), request.param_index] = spent
                self._set_up += spent

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, others = _spent(), self._imports + self._set_up
        try:
            return (yield)
        finally:
            spent = _spent() - start - (self._imports + self._set_up - others)
            indices = item.callspec.indices if hasattr(item, "callspec") else {}
            for name, definitions in item._fixtureinfo.name2fixturedefs.items():  # type: ignore[attr-defined]
                spent += self._shared.get((id(definitions[-1]), indices.get(name, 0)), 0.0)
            outcomes = self._outcomes.pop(item.nodeid, set())
            outcome = next((name for name in ("failed", "skipped") if name in outcomes), "passed")
            self._file.write(f"{spent:.2f} {outcome} {item.nodeid}\n")
            self._file.flush()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes[report.nodeid].add(report.outcome)


def slow_of(records: list[str], before: set[str]) -> set[str]:
    """Return the tests that are slow now, and those that were and have not passed."""
    slow = set()
    for record in records:
        spent, outcome, test = record.split(" ", 2)
        if float(spent) >= SLOW_S if outcome == "passed" else test in before:
            slow.add(test)
    return slow


def measure(target: Path, others: set[Path]) -> None:
    """Run the tests of a folder or file in one process, without those of `others`, and renew their lines."""
    before = listed()
    ignored = [other for other in others if target in other.parents]
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        options = ["-m", "not agree and not packaging and not long", "--times", str(times)]
        command = [sys.executable, "-m", "pytest", "-q", *options, str(target)]
        subprocess.run([*command, *(f"--ignore={other}" for other in ignored)], check=False, cwd=TESTS.parent)
        if times.exists():
            gone = {test for test in before if _within(test, target)}
            renew(times, gone - {test for test in gone if any(_within(test, other) for other in ignored)})


def renew(times: Path, gone: set[str]) -> None:
    """Write the table from what a run measured, without the lines of `gone` that it does not confirm."""
    before = listed()
    records = times.read_text(encoding="utf-8").splitlines()
    measured = {record.split(" ", 2)[2] for record in records}
    lines = sorted((before - measured - gone) | slow_of(records, before))
    TABLE.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _within(test: str, target: Path) -> bool:
    return (TESTS.parent / test.partition("::")[0]).is_relative_to(target)


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--from"]:
        renew(Path(arguments[1]), set())
        return
    paths = [Path(target).resolve() for target in arguments] or [TESTS]
    for path in paths:
        measure(path, {*paths} - {path})


if __name__ == "__main__":
    main(sys.argv[1:])
