"""Which blocks are checkpointed, by which code, and that the result stays."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from memtriage.planning.facts import Facts, HuggingFace, RepeatedBlocks, huggingface_in, levels_of
from memtriage.planning.rungs.checkpointing import CHECKPOINTING, CHOICES, in_python
from support.training_jobs import Job, facts_of, language_job, last, weights

LETTERS = tuple("abcdefghijkl")
SWITCH = HuggingFace("sdpa", True, True, "gradient_checkpointing", False)


def level(count: int, container: str = "layers", *, own_switch: bool = False) -> RepeatedBlocks:
    return RepeatedBlocks((container,), tuple(f"{container}.{number}" for number in range(count)), own_switch)


def facts(*levels: RepeatedBlocks, **changes: Any) -> Facts:
    called = frozenset(name for each in levels for name in each.blocks)
    return Facts(**{"levels": levels, "called": called, **changes})


def test_more_blocks_are_chosen_from_one_choice_to_the_next() -> None:
    chosen = {choice.words: "".join(choice.among(LETTERS)) for choice in CHOICES}
    assert chosen == {
        "every fourth block": "aei",
        "every third block": "adgj",
        "every second block": "acegik",
        "all but every third block": "bcefhikl",
        "all but every fourth block": "bcdfghjkl",
        "every block": "abcdefghijkl",
    }


def test_the_condition_in_python_chooses_the_same_blocks() -> None:
    for choice in CHOICES[:-1]:
        by_code = [name for number, name in enumerate(LETTERS) if eval(choice.condition)]
        assert by_code == choice.among(LETTERS)


@pytest.mark.parametrize(
    ("count", "chosen"),
    [
        (1, [1]),
        (3, [3]),
        (4, [2, 4]),
        (5, [3, 5]),
        (6, [2, 3, 4, 6]),
        (7, [3, 4, 4, 7]),
        (8, [2, 3, 4, 5, 6, 8]),
    ],
)
def test_a_choice_is_offered_where_it_leaves_two_of_a_kind(count: int, chosen: list[int]) -> None:
    (track,) = CHECKPOINTING.offer(facts(level(count)))
    assert [change.action.rpartition(" (")[2] for change in track] == [
        f"{each} of {count})" for each in chosen
    ]


def test_each_level_whose_blocks_are_called_is_a_track() -> None:
    called = frozenset({"stages.0", "stages.1", "stages.0.layers.0"})
    offer = CHECKPOINTING.offer(facts(level(2, "stages"), level(2, "stages.0.layers"), called=called))
    assert [[change.action for change in track] for track in offer] == [
        ["checkpoint every block of stages (2 of 2)"]
    ]


@pytest.mark.parametrize(
    ("own_switch", "huggingface"),
    [(False, SWITCH), (True, replace(SWITCH, supports_checkpointing=False)), (True, None)],
)
def test_blocks_are_wrapped_where_model_and_layers_do_not_both_have_a_switch(
    own_switch: bool, huggingface: HuggingFace | None
) -> None:
    given = facts(level(4, own_switch=own_switch), huggingface=huggingface)
    assert "partial(checkpoint" in last(CHECKPOINTING, given).code["torch"]


@pytest.mark.parametrize(
    ("containers", "python", "words"),
    [
        (("",), "model", "the model"),
        (("stages.0.layers",), "model.stages[0].layers", "stages.0.layers"),
        (("a", "b", ""), "[*model.a, *model.b, *model]", "a, b, the model"),
        (("a", "b", "c", "d"), "[*model.a, *model.b, *model.c, *model.d]", "a, ... d"),
    ],
)
def test_the_places_of_blocks_in_python_and_in_words(
    containers: tuple[str, ...], python: str, words: str
) -> None:
    blocks = RepeatedBlocks(containers, ("x.0", "x.1"), False)
    assert in_python(blocks) == python
    (change,) = CHECKPOINTING.offer(facts(blocks))[0]
    assert change.action == f"checkpoint every block of {words} (2 of 2)"


def test_the_code_for_blocks_in_several_places_is_python() -> None:
    stages = nn.ModuleList(
        [
            nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(1, 1)) for _ in "ab"])})
            for _ in "ab"
        ]
    )
    levels = levels_of(nn.ModuleDict({"stages": stages}))
    code = CHECKPOINTING.offer(facts(*levels))[1][-1].code["torch"]
    assert "for block in [*model.stages[0].layers, *model.stages[1].layers]:" in code
    compile(code, "code", "exec")


def test_the_chosen_blocks_alone_are_wrapped_and_the_result_stays(model: nn.Module) -> None:
    plain, job = Job(model), Job(model)
    (half, whole) = CHECKPOINTING.offer(job.facts())[0]
    made = half.edit(built := job.built())
    assert made is built
    assert ["forward" in vars(block) for block in job.model.children()] == [True, False, True, False]
    for _ in range(2):
        plain.built().step()
        made.step()
    torch.testing.assert_close(weights(job.model), weights(plain.model))
    assert job.facts().recomputed == {"0", "2"}
    assert "already" in CHECKPOINTING.offer(job.facts())
    whole.edit(other := Job(model).built())
    assert all("forward" in vars(block) for block in other.model.children())


def test_chosen_layers_of_a_language_model_are_switched_and_the_loss_stays(language_model: Any) -> None:
    plain, changed = (language_job(copy.deepcopy(language_model)) for _ in range(2))
    half, whole = CHECKPOINTING.offer(facts_of(language_job(copy.deepcopy(language_model))))[0]
    assert half.edit(changed) is changed
    layers = huggingface_in(changed.model).model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False]
    assert changed.step() == pytest.approx(plain.step(), rel=1e-5)
    torch.testing.assert_close(weights(changed.model), weights(plain.model), atol=1e-5, rtol=1e-4)
    seen = facts_of(changed)
    assert seen.recomputed == {"model.layers.0", "model.layers.2"}
    assert "already" in CHECKPOINTING.offer(seen)
    whole.edit(changed)
    assert all(layer.gradient_checkpointing for layer in layers)
