"""Modules of the watch and of the program that have one name: each sees its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memtriage.session.signals.own_modules import OwnModules


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
