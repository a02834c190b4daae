"""The process of the tests, and a user's program for them to look at: a module with a file of its own."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from memtriage.account.census import CensusView, Look
from memtriage.model.census import Census, StorageRecord
from memtriage.observe import walker
from support import slow_table, torch_state

if TYPE_CHECKING:
    from support.holder_standins import Stage

# How long an example takes depends on the machine, not on the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", help="add a line per test to this file: how long it took")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = slow_table.listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process for the tests.

    Tests send SIGINT, which a shell's `&` makes this process ignore. And a process that has run thousands of
    tests has more objects than a program has, so its censuses get a larger budget.
    """
    if config.option.times is not None:
        config.pluginmanager.register(slow_table.Times(Path(config.option.times)))
    walker.BUDGET = walker.CensusBudget(objects=50_000_000, seconds=300.0)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):  # reports have their usual width, and no colors
        os.environ.pop(name, None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def torch_settings() -> Iterator[None]:
    """Restore the settings of torch for its process that a test, or a library in it, has left changed."""
    before = torch_state.read()
    yield
    torch_state.restore(before)


@pytest.fixture(scope="module")
def only_new_objects() -> Iterator[None]:
    """Leave what was there before these tests out of every look at the objects of the process."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def imported_stays_out() -> Iterator[None]:
    """Leave what was imported and made before these tests out of looks and collections.

    Each takes as long as the process has objects, which are millions once a few libraries are loaded: so does
    a collection before, which `only_new_objects` makes.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, only_new_objects: None) -> Stage:
    """Where stand-ins for the holders of libraries are put up."""
    from support.holder_standins import Stage

    gc.collect()
    return Stage(monkeypatch)


class Program:
    """Runs source text as a module, and finds in a census the storages that the text has made.

    In the source, `made(tensor)` notes a tensor's storage (its address, so that nothing is kept alive) under
    the name of the current case, or under its second argument; `look()` takes a census, kept as `census`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.file = folder / f"{name}.py"
        self.case = ""
        self.census: Census | None = None
        self._noted: dict[tuple[int, str], None] = {}
        self.module = ModuleType(name)
        self.module.__file__ = str(self.file)
        self.module.__dict__.update(made=self.made, look=self.look)
        sys.modules[name] = self.module

    def __getitem__(self, name: str) -> Any:
        """A variable of the program."""
        return self.module.__dict__[name]

    def run(self, source: str, case: str = "") -> None:
        self.case = case
        text = textwrap.dedent(source)
        with self.file.open("a", encoding="utf-8") as stream:
            start = stream.tell() and len(self.file.read_text().splitlines())
            stream.write(f"{text}\n")
        exec(compile("\n" * start + text, str(self.file), "exec"), self.module.__dict__)

    def made(self, tensor: Any, case: str | None = None) -> Any:
        self._noted[tensor.untyped_storage().data_ptr(), case or self.case] = None
        return tensor

    def look(self, ask: Callable[[CensusView], None] | None = None) -> None:
        with Look() as view:
            self.census = view.census()
            if ask is not None:
                ask(view)

    def records(self, case: str = "") -> list[StorageRecord]:
        """The census's records of the storages noted in a case."""
        assert self.census is not None
        wanted = {address for address, name in self._noted if name == case}
        return [record for record in self.census.storages if record.address in wanted]

    def holders(self, case: str = "") -> set[str | None]:
        return {record.holder for record in self.records(case)}

    def owners(self, case: str = "") -> set[str]:
        return {record.owner for record in self.records(case)}

    def end(self) -> None:
        """Release everything that the program has made."""
        self.module.__dict__.clear()
        if sys.modules.get(self.name) is self.module:
            del sys.modules[self.name]
        gc.collect()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The module `ray`, connected to a small cluster that all tests of a process share."""
    from support.ray_cluster import started

    with started() as ray:
        yield ray


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """A program named `train`."""
    made = Program(tmp_path, "train")
    yield made
    made.end()


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, str], str], Program]]:
    """Runs many cases in one program named `train` and takes one census of all of them."""
    programs: list[Program] = []

    def show(cases: dict[str, str], prelude: str) -> Program:
        made = Program(tmp_path_factory.mktemp("gallery"), "train")
        programs.append(made)
        made.run(prelude)
        for case, source in cases.items():
            made.run(source, case)
        made.look()
        return made

    yield show
    for made in programs:
        made.end()
