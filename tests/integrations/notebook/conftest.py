"""A real IPython shell in this process, put away again with all that it changes."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from memtriage.integrations.notebook import watched_cell
from memtriage.process import active
from support.censuses import census, looks_at
from support.notebooks import run

_BUILTINS = ("get_ipython", "display")


@pytest.fixture(autouse=True, scope="module")
def quick_looks(imported_stays_out: None) -> None:
    """See `imported_stays_out`."""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """IPython with memtriage loaded, and torch imported."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    config = pytest.importorskip("traitlets.config").Config()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "MEMTRIAGE_DIR"):
        monkeypatch.delenv(name, raising=False)
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.ipython_dir = str(tmp_path)
    main, hook, excepthook = sys.modules["__main__"], sys.displayhook, sys.excepthook
    before = {name: getattr(builtins, name) for name in _BUILTINS if hasattr(builtins, name)}
    made = interactive.InteractiveShell.instance(config=config)
    try:
        run(made, "%load_ext memtriage")
        run(made, "import torch")
        yield made
    finally:
        made.user_ns.clear()
        interactive.InteractiveShell.clear_instance()
        sys.modules["__main__"], sys.displayhook, sys.excepthook = main, hook, excepthook
        for name in _BUILTINS:
            if name in before:
                setattr(builtins, name, before[name])
            elif hasattr(builtins, name):
                delattr(builtins, name)
        for name in ("last_exc", "last_value", "last_type", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        assert active.session is None


@pytest.fixture
def no_census(no_census: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one in a cell."""
    monkeypatch.setattr(watched_cell, "Look", looks_at(census()))
