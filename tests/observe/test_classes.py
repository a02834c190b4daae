"""Classes are read without asking their metaclasses."""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

from memtriage.observe import classes
from memtriage.observe.classes import (
    attributes_of,
    bases_of,
    declares,
    instance_dict,
    module_of,
    name_of,
    qualified_name_of,
    read_member,
    variables_of,
)


class Meta(type):
    __module__ = property(lambda cls: 1 / 0)  # type: ignore[assignment]
    __name__ = property(lambda cls: 1 / 0)  # type: ignore[assignment]
    __mro__ = property(lambda cls: 1 / 0)  # type: ignore[assignment]
    __dict__ = property(lambda cls: 1 / 0)  # type: ignore[assignment]

    def __getattr__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Odd(metaclass=Meta):
    def step(self) -> None: ...


class Numbered:
    __module__ = 17  # type: ignore[assignment]


class Proxy:
    __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]


class Slotted:
    __slots__ = ("empty", "full")

    def __init__(self) -> None:
        self.full = "yes"


def test_metaclasses_are_not_asked() -> None:
    assert name_of(Odd) == qualified_name_of(Odd) == "Odd"
    assert bases_of(Odd) == (Odd, object)
    assert "step" in attributes_of(Odd)
    assert declares(Odd, "step")
    assert not declares(Odd, "zero_grad")


def test_module_of_a_class() -> None:
    assert module_of(OrderedDict) == "collections"
    assert module_of(Odd) == __name__
    assert module_of(Numbered) == ""


def test_declares_looks_at_bases_but_not_at_instances() -> None:
    class Below(Odd):
        pass

    assert declares(Below, "step")
    assert not declares(types.SimpleNamespace, "extra")


def test_instance_dict_is_the_real_one() -> None:
    class Plain:
        pass

    plain = Plain()
    plain.__dict__["a"] = 1
    assert instance_dict(plain) is plain.__dict__
    assert instance_dict(functools.partial(print)) == {}
    assert instance_dict(Slotted()) is None
    assert instance_dict([]) is None


def test_a_dict_that_a_class_makes_up_is_not_taken() -> None:
    class Plain:
        pass

    class Hiding(Plain):
        __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    hiding = Hiding()
    hiding.real = 1  # type: ignore[attr-defined]
    assert instance_dict(hiding) == {"real": 1}
    assert instance_dict(Proxy()) is None


def test_read_member_gives_none_for_an_empty_slot() -> None:
    members = attributes_of(Slotted)
    assert read_member(members["full"], Slotted()) == "yes"
    assert read_member(members["empty"], Slotted()) is None
    assert read_member(members["full"], 17) is None


def test_variables_of_a_lazy_module_run_no_code_of_its_class() -> None:
    class Lazy(types.ModuleType):
        __dict__ = property(lambda module: 1 / 0)  # type: ignore[assignment]

        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    assert variables_of(Lazy("lazy"))["__name__"] == "lazy"


FOLDERS = ("observe", "account", "catalogue", "diagnose", "session", "process")
OF_BUILT_IN_CLASSES = {
    "objects.py": "usual: dict[type, bool]",  # of those whose metaclass is `type`
    "kinds.py": "_ATOMS: frozenset[type]",
}


def _hashes_or_compares(node: ast.AST) -> bool:
    """Whether an expression looks a class up, or declares what is made for that."""
    match node:
        case ast.Compare(
            left=ast.Call(func=ast.Name("type")), ops=[ast.In() | ast.NotIn() | ast.Eq() | ast.NotEq()]
        ):
            return True
        case ast.AnnAssign(annotation=ast.Subscript(value=ast.Name("dict" | "set" | "frozenset"), slice=of)):
            key = of.elts[0] if isinstance(of, ast.Tuple) else of
            return ast.unparse(key).startswith("type")
    return False


def test_no_class_is_hashed_or_compared_by_its_metaclass() -> None:
    """`type(obj) in (A, B)` and `{type(obj): ...}` run code of the program; addresses and `is` do not."""
    package = Path(classes.__file__).parents[1]
    found = [
        (path.name, ast.unparse(node))
        for folder in FOLDERS
        for path in sorted((package / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if _hashes_or_compares(node)
    ]
    assert [each for each in found if not each[1].startswith(OF_BUILT_IN_CLASSES.get(each[0], "none"))] == []


def test_an_attribute_is_read_as_it_is_stored() -> None:
    class Config:
        hidden = 3
        size = property(lambda self: 1 / 0)

    config = Config()
    config.own = 4  # type: ignore[attr-defined]
    assert [classes.stored(config, name) for name in ("own", "hidden", "none")] == [4, 3, None]
    assert classes.stored(config, "size") is vars(Config)["size"]


def test_the_size_of_an_object_that_counts_it_itself() -> None:
    class Counting(list[int]):
        def __sizeof__(self) -> int:
            raise SystemExit

    assert classes.size_of([1, 2]) == sys.getsizeof([1, 2])
    assert 0 < classes.size_of(Counting([1, 2])) < sys.getsizeof([1, 2])
