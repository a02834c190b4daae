"""The modules of another process, and which of them are the user's."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from memtriage.outside.loaded_modules import RemoteModules
from support.outside_parts import Part, heap_now, known_python

pytestmark = known_python


class Lazy(ModuleType):
    """Some libraries have modules of a kind of their own."""


def module(name: str, file: str | None = None, kind: type[ModuleType] = ModuleType) -> ModuleType:
    made = kind(name)
    if file is not None:
        made.__file__ = file
    return made


def test_roots_are_all_modules_the_program_first_without_those_of_memtriage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = module("__main__", "/home/user/train.py")
    loaded = {
        "lazy": module("lazy", kind=Lazy),
        "__main__": main,
        "__mp_main__": main,
        "memtriage_like": module("memtriage_like"),
        "memtriage.part": module("memtriage.part"),
        "of_no_kind": object(),
    }
    for name, value in loaded.items():
        monkeypatch.setitem(sys.modules, name, value)
    heap = heap_now()
    modules = RemoteModules(heap)
    fenced: list[int] = []
    roots = modules.roots(Part(heap, set(loaded)), fenced.append)
    assert [name for name, _ in roots] == ["train", "lazy", "memtriage_like"]
    assert dict(roots) == {
        "train": id(main), "lazy": id(loaded["lazy"]), "memtriage_like": id(loaded["memtriage_like"])
    }  # fmt: skip
    held = [value for value in loaded.values() if isinstance(value, ModuleType)]
    assert {id(each) for each in held} | {id(vars(each)) for each in held} <= set(fenced)
    assert id(loaded["of_no_kind"]) not in fenced
    assert modules.by_name["__mp_main__"] == id(main) and "of_no_kind" not in modules.by_name
    assert modules.namespace(id(main)) == id(vars(main))


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (None, "__main__"),
        ("", "__main__"),
        ("/home/user/train.py", "train"),
        ("train.py", "train"),
        ("/home/user/package/__main__.py", "package"),
        ("__main__.py", "__main__"),
    ],
)
def test_the_program_goes_by_its_file(file: str | None, name: str) -> None:
    made = module("__main__", file)
    assert RemoteModules(heap_now()).main_name(id(made)) == name


def test_modules_of_the_user_have_files_that_are_not_installed() -> None:
    installed = "/opt/venv/lib/python3.11/site-packages/library"
    made = {
        "__main__": module("__main__"),
        "train": module("train", "/home/user/train.py"),
        "helper.part": module("helper.part", "/home/user/helper/part.py"),
        "library": module("library", f"{installed}/__init__.py"),
        "library.part": module("library.part", "/home/user/generated.py"),
        "without_file": module("without_file"),
        "json": json,
    }
    heap = heap_now()
    modules = RemoteModules(heap)
    modules.by_name.update((name, id(each)) for name, each in made.items())
    users = [name for name, each in made.items() if modules.is_user(id(each))]
    assert users == ["__main__", "train", "helper.part"]
    made["train"].__file__ = installed
    assert modules.is_user(id(made["train"]))  # as it was
    assert [modules.is_user_file(file) for file in (None, "/home/user/a.py", f"{installed}/a.py")] == [
        False, True, False,
    ]  # fmt: skip


def test_a_class_goes_by_its_module_and_name() -> None:
    class Local:
        pass

    of_main = type("Model", (), {"__module__": "__main__"})
    main = module("__main__", "/home/user/train.py")
    heap = heap_now()
    modules = RemoteModules(heap)
    local, model = heap.class_at(id(Local)), heap.class_at(id(of_main))
    assert local is not None and model is not None
    assert modules.of_class(local) is None
    assert modules.name_of_class(model) == "__main__.Model"
    modules.by_name.update({"__main__": id(main), __name__: 4096})
    assert modules.of_class(local) == 4096
    assert modules.name_of_class(model) == "train.Model"
    assert modules.name_of_class(local) == f"{__name__}.{Local.__qualname__}"
