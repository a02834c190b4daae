"""JSON of any text: what is not UTF-8 is written as an escape, all else as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memtriage.process.json_text import encode


@pytest.mark.parametrize("value", [{"a": [1, None, "grün"]}, [True, 2.5], "text"])
def test_plain_values(value: Any) -> None:
    assert json.loads(encode(value)) == value


def test_lone_surrogates_at_any_depth() -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert json.loads(encode({name: [{"argv": (name, 7)}]})) == {"caf\\udce9": [{"argv": ["caf\\udce9", 7]}]}


def test_what_json_cannot_hold() -> None:
    with pytest.raises(TypeError):
        encode({"a": object()})
