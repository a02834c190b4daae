"""Modules of the watch and of the program that have one name: each sees its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from memtriage.session.signals.own_modules import OwnModules


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have loaded a module of the program's name in this process."""
    monkeypatch.delitem(sys.modules, "train", raising=False)


def test_each_has_its_own_module_of_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("WHOSE = 'program'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    modules = OwnModules(str(tmp_path))
    modules.begin_program()
    import colorsys

    assert colorsys.WHOSE == "program"  # type: ignore[attr-defined]
    modules.begin_work()
    assert "colorsys" not in sys.modules and str(tmp_path) not in sys.path
    import colorsys as library

    assert hasattr(library, "rgb_to_hls")
    modules.end_work()
    assert sys.modules["colorsys"] is colorsys and sys.path[0] == str(tmp_path)
    modules.begin_work()
    assert sys.modules["colorsys"] is library
    modules.end_work()
    del sys.modules["colorsys"]


def names(folder: Path, *files: str) -> set[str]:
    for file in files:
        (folder / file).write_text("")
    return OwnModules(str(folder))._names


def test_only_names_that_the_watch_may_import_are_kept_apart(tmp_path: Path) -> None:
    assert names(tmp_path, "rich.py", "msgspec.py", "train.py", "os.py", "sys.py", "__main__.py") == {
        "rich", "msgspec",
    }  # fmt: skip


def test_nothing_is_swapped_where_no_name_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before, path = dict(sys.modules), list(sys.path)
    modules = OwnModules(str(tmp_path))
    modules.begin_program()
    modules.begin_work()
    assert (sys.modules, sys.path) == (before, path)
    modules.end_work()


def test_submodules_go_with_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colorsys.py").write_text("")
    for name in ("colorsys", "colorsys.inner", "colorsys_other"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    modules = OwnModules(str(tmp_path))
    modules.begin_program()
    assert not {"colorsys", "colorsys.inner"} & set(sys.modules) and "colorsys_other" in sys.modules
    modules.begin_work()
    assert {"colorsys", "colorsys.inner"} <= set(sys.modules)
    modules.end_work()
