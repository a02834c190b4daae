"""The hook in an environment: it arms once torch is imported, and leaves nothing behind."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")  # before the hook, which would arm this process

from memtriage.session.remote import armed, listener_hook

TORCH = "at_import = True\n"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bool]]:
    """Whether torch was there each time that the listener was armed; torch is a small file."""
    (tmp_path / "torch.py").write_text(TORCH)
    made: list[bool] = []
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not added_by_tests(finder)])
    monkeypatch.setattr(armed, "arm", lambda: made.append(getattr(sys.modules["torch"], "at_import", False)))
    importlib.invalidate_caches()
    yield made
    sys.modules.pop("torch", None)  # before the real one is back


def added_by_tests(finder: object) -> bool:
    return type(finder).__module__.startswith(("_pytest", "memtriage"))


def hooked() -> list[Any]:
    """The finders that the hook has added."""
    return [finder for finder in sys.meta_path if type(finder).__module__ == listener_hook.__name__]


def start() -> None:
    """Import the hook again, as Python does when it starts."""
    importlib.reload(listener_hook)


def test_it_arms_after_torch_is_imported_and_goes(calls: list[bool]) -> None:
    start()
    assert len(hooked()) == 1 and sys.meta_path[0] is hooked()[0]
    importlib.import_module("colorsys")
    assert calls == [] and len(hooked()) == 1
    torch = importlib.import_module("torch")
    assert calls == [True]
    assert hooked() == []
    assert torch.__spec__ is not None and "exec_module" not in vars(torch.__spec__.loader)
    importlib.reload(torch)
    assert calls == [True]


def test_where_torch_is_there_already_it_does_nothing(calls: list[bool]) -> None:
    sys.modules["torch"] = ModuleType("torch")
    start()
    assert hooked() == []


def test_a_program_goes_on_where_it_cannot_be_armed(
    calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> None:
        raise RuntimeError("no thread")

    monkeypatch.setattr(armed, "arm", failing)
    start()
    assert importlib.import_module("torch").at_import


def test_without_torch_the_import_fails_as_ever(calls: list[bool], tmp_path: Path) -> None:
    (tmp_path / "torch.py").unlink()
    sys.path[:] = [str(tmp_path)]
    start()
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch'"):
        importlib.import_module("torch")
    assert (calls, hooked()) == ([], [])


class Silent:
    """A finder of another library that finds nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        return None


class OldFinder:
    """A finder of long ago, without `find_spec`."""


def test_other_finders_are_asked_in_their_order(calls: list[bool]) -> None:
    start()
    sys.meta_path[1:1] = [OldFinder(), Silent()]  # type: ignore[list-item]
    assert importlib.import_module("torch").at_import
    assert calls == [True]


class FixedLoader(SourceFileLoader):
    """A loader whose attributes cannot be set."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "exec_module":
            raise AttributeError(name)
        super().__setattr__(name, value)


def test_a_loader_that_cannot_be_changed_loads_all_the_same(calls: list[bool], tmp_path: Path) -> None:
    class Finder(PathFinder):
        @classmethod
        def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name != "torch":
                return None
            return ModuleSpec(name, FixedLoader(name, str(tmp_path / "torch.py")))

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    start()
    assert importlib.import_module("torch").at_import
    assert calls == []
