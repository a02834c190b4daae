"""What is loaded and which objects there are, looked through once."""

from __future__ import annotations

import sys
import types
from functools import lru_cache
from typing import Any

import pytest
import torch

from memtriage.catalogue.scene import Scene
from support.holder_standins import Scaled, Stage


class Thing:
    """A class of the program."""

    def work(self) -> None: ...


class Derived(Thing):
    """One derived from it."""


def test_objects_are_listed_by_their_types() -> None:
    one, two, other = Thing(), Derived(), types.SimpleNamespace()
    with Scene([one, {}, [], (), other, two, one.work]) as scene:
        assert list(scene.instances(lambda kind: issubclass(kind, Thing))) == [one, two]
        assert scene.of_type(Thing) == [one] and scene.of_type(dict) == []
        assert list(scene.subclasses(__name__, "Thing")) == [one, two]
        assert list(scene.subclasses(__name__, "Missing")) == []
        assert list(scene.subclasses("not.loaded", "Thing")) == []
        assert set(map(id, scene.instances(lambda kind: True))) == {id(one), id(two), id(other)}
    assert list(scene.instances(lambda kind: True)) == []


def test_without_a_list_it_is_every_object_of_the_process() -> None:
    thing = Thing()
    with Scene() as scene:
        assert any(each is thing for each in scene.of_type(Thing))


def test_caches_and_nodes_of_custom_functions_are_told_apart() -> None:
    cache = lru_cache(lambda key: key)
    out = Scaled.apply(torch.ones(1, requires_grad=True))
    with Scene([cache, out.grad_fn, lambda: None, out]) as scene:
        assert scene.lru_caches == [cache]
        assert list(scene.contexts()) == [out.grad_fn]


def test_modules_have_paths_below_the_outermost() -> None:
    inner = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.Sequential(inner, None), torch.nn.ReLU(), inner)  # type: ignore[arg-type]
    alone = torch.nn.Identity()
    with Scene([inner, alone, *model.modules()]) as scene:
        assert scene.modules == [
            ("Identity", alone),
            ("Sequential", model),
            ("Sequential.0", model[0]),
            ("Sequential.0.0", inner),
            ("Sequential.1", model[1]),
        ]
        assert scene.modules is scene.modules


def test_modules_that_contain_each_other_are_listed_too() -> None:
    first, second = torch.nn.Module(), torch.nn.Module()
    first.other, second.other = second, first
    with Scene([first, second]) as scene:
        assert scene.modules == [("Module", first), ("Module.other", second)]
    del first.other


def test_registered_storages_are_those_of_parameters_and_buffers() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.register_buffer("mask", torch.ones(4))
    layer.register_buffer("unset", None)
    layer.cache = torch.ones(9)
    expected: set[tuple[str, int]] = {
        ("cpu", layer.weight.untyped_storage().data_ptr()),
        ("cpu", layer.mask.untyped_storage().data_ptr()),
    }
    with Scene([layer, torch.nn.Identity()]) as scene:
        assert scene.registered_storages() == expected
        assert scene.registered_storages() is scene.registered_storages()


def test_a_scene_that_ended_knows_no_module() -> None:
    with Scene([torch.nn.Identity()]) as scene:
        assert len(scene.modules) == 1
    assert scene.modules == [] and scene.registered_storages() == set()


@pytest.mark.parametrize(
    ("package", "names"),
    [
        ("lib", ["lib", "lib.part", "lib.part.deep"]),
        ("lib.part", ["lib.part", "lib.part.deep"]),
        ("none", []),
    ],
)
def test_loaded_modules_are_those_of_the_package_alone(package: str, names: list[str], stage: Stage) -> None:
    stage.module("lib.part.deep")
    stage.module("library.part")
    placeholder: Any = types.SimpleNamespace()
    stage.patch.setitem(sys.modules, "lib.placeholder", placeholder)
    stage.patch.setitem(sys.modules, "lib.blocked", None)  # type: ignore[arg-type]
    assert [name for name, _ in Scene.loaded(package)] == names
