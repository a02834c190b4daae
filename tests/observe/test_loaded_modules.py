"""The modules that this process has loaded are read without running code of theirs."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType
from typing import Any

import pytest

from memtriage.observe.loaded_modules import (
    is_user_module,
    main_name,
    module_name_of,
    modules,
    own_modules,
)
from memtriage.observe.origin import CodeOrigin


class Lazy(ModuleType):
    """A module of its own kind, as `torch.ops` and lazy ones are."""

    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


def module(name: str, file: object = None, kind: type[ModuleType] = ModuleType) -> ModuleType:
    made = kind(name)
    if file is not None:
        ModuleType.__getattribute__(made, "__dict__")["__file__"] = file
    return made


def test_what_is_no_module_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, own = module("lazy", kind=Lazy), module("memtriage.extra")
    for name, value in {"lazy": lazy, "of_no_kind": object(), "memtriage.extra": own}.items():
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, "memtriage_like", module("memtriage_like"))
    found = modules()
    assert any(each is lazy for each in found)
    assert all(issubclass(type(each), ModuleType) for each in found)
    names = dict(own_modules())
    assert names["memtriage.extra"] is own and "memtriage" in names
    assert all(name.split(".")[0] == "memtriage" for name in names)


def test_modules_of_the_user_and_their_packages_have_files_that_are_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    origin, library = CodeOrigin(), "/opt/lib/python3.11/site-packages/library/__init__.py"
    monkeypatch.setitem(sys.modules, "library", module("library", library))
    monkeypatch.setitem(sys.modules, "helper", module("helper", "/home/user/helper/__init__.py"))
    users = [
        module("__main__"),
        module("train", "/home/user/train.py"),
        module("helper.part", "/home/user/helper/part.py"),
    ]
    others = [
        json,
        module("without_file"),
        module("helper.part", library),
        module("library.part", "/home/user/generated.py"),
    ]
    nameless = module("nameless", "/home/user/nameless.py")
    vars(nameless)["__name__"] = None
    assert [is_user_module(each, origin) for each in [*users, nameless]] == [True] * 4
    assert [is_user_module(each, origin) for each in others] == [False] * 4


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (None, "__main__"),
        ("", "__main__"),
        ("/home/user/train.py", "train"),
        ("train.py", "train"),
        ("/home/user/package/__main__.py", "package"),
        ("__main__.py", os.path.basename(os.getcwd())),
    ],
)
def test_the_program_goes_by_its_file(monkeypatch: pytest.MonkeyPatch, file: str | None, name: str) -> None:
    main = module("__main__", file)
    assert main_name(main) == name
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert module_name_of(type("Model", (), {"__module__": "__main__"})) == name
    assert module_name_of(json.JSONDecoder) == "json.decoder"
