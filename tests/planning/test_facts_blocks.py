from torch import nn

from memtriage.planning.facts import levels_of


def block():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def test_the_blocks_of_a_list_are_found():
    model = nn.ModuleDict({"layers": nn.ModuleList([block(), block(), block()]), "head": nn.Linear(2, 2)})
    (level,) = levels_of(model)
    assert level.containers == ("layers",)
    assert level.blocks == ("layers.0", "layers.1", "layers.2")
    assert not level.own_switch


def test_a_model_that_is_a_sequence_itself():
    (level,) = levels_of(nn.Sequential(block(), nn.ReLU(), block()))
    assert level.containers == ("",)
    assert level.blocks == ("0", "2")


def test_blocks_within_blocks_are_another_level():
    stages = nn.ModuleList([nn.ModuleDict({"layers": nn.ModuleList([block(), block()])}) for _ in range(2)])
    outer, inner = levels_of(nn.ModuleDict({"stages": stages}))
    assert outer.blocks == ("stages.0", "stages.1")
    assert inner.containers == ("stages.0.layers", "stages.1.layers")
    assert len(inner.blocks) == 4


def test_lists_beside_each_other_are_one_level():
    model = nn.ModuleDict({"a": nn.ModuleList([block(), block()]), "b": nn.ModuleList([block(), block()])})
    (level,) = levels_of(model)
    assert level.containers == ("a", "b")


def test_single_operations_and_lone_modules_are_no_blocks():
    assert levels_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ()
    assert levels_of(nn.ModuleList([block()])) == ()
