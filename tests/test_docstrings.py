"""The examples in docstrings are true."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from support import layers

WITH_EXAMPLES = [name for name, path in layers.modules().items() if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(f"memtriage.{name}"))
    assert result.attempted > 0 and result.failed == 0
