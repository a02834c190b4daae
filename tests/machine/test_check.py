"""All checks of a machine, in order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from memtriage.machine.check import check_machine


def sections(env: dict[str, str]) -> list[str]:
    return [section for section, _ in groupby(fact.section for fact in check_machine(env))]


def test_sections_come_in_order() -> None:
    assert sections({}) == ["versions", "devices", "limits", "settings", "capabilities"]
    names = [fact.name for fact in check_machine({})]
    assert len(names) == len(set(names))


def test_settings_are_those_of_the_environment() -> None:
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert any("expandable_segments:True" in fact.value for fact in check_machine(conf))
    assert not any("expandable_segments:True" in fact.value for fact in check_machine({}))


class Refusing:
    """Lets no torch be imported."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            raise self.error


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield sys.meta_path


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (ImportError("no torch here"), "no torch here"),
        (OSError("libcudart.so.12: cannot open"), "OSError: libcudart.so.12: cannot open"),
    ],
)
def test_without_torch_it_says_why_and_goes_on(without_torch: list[Any], error: Exception, why: str) -> None:
    without_torch.insert(0, Refusing(error))
    facts = {fact.name: fact for fact in check_machine({})}
    assert why in facts["torch"].value
    assert "capabilities" not in {fact.section for fact in facts.values()}
    assert "/dev/shm" in facts
