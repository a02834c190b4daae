"""What is seen of a program while it runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtriage.planning.facts import (
    Facts,
    HuggingFace,
    Knob,
    Observer,
    huggingface_in,
    inner_optimizer,
    knobs,
    with_zero_grad,
)
from memtriage.prediction.build import Built
from support.training_jobs import facts_of, language_job


class Blocks(nn.Module):
    """Two blocks that are alike; the second one may be called, and may be recomputed."""

    def __init__(self, *, second: bool = True, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.second, self.recomputes = second, recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if self.second and self.recomputes:
            return checkpoint(self.layers[1].forward, x, use_reentrant=False)
        return self.layers[1](x) if self.second else x


def observed(
    model: nn.Module,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    build: Callable[..., Any] = lambda device: None,
    before: Callable[[Any], None] = lambda optimizer: None,
) -> Facts:
    made = optimizer(model.parameters())

    def step() -> None:
        before(made)
        model(torch.ones(2, 4)).sum().backward()
        made.step()

    observer = Observer()
    observer.observe(build, Built(model, (made,), step)).step()
    return observer.facts()


def test_keywords_that_are_whole_numbers_are_knobs() -> None:
    def build(
        device: str, batch: int = 8, lr: float = 0.1, fast: bool = True, *, seq_len: int = 64
    ) -> None: ...

    assert knobs(build, "build") == [Knob("batch", 8, "build"), Knob("seq_len", 64, "build")]
    assert knobs(dict, "step") == []


def test_the_knobs_of_a_program_are_known_by_their_names() -> None:
    def build(
        device: str, batch: int = 1, micro_batch: int = 8, accum: int = 2, max_length: int = 64
    ) -> None: ...

    facts = observed(Blocks(), build=build)
    assert facts.batch == Knob("micro_batch", 8, "build"), "the one that says most"
    assert facts.accumulation == Knob("accum", 2, "build")
    assert facts.length == Knob("max_length", 64, "build")
    none = observed(Blocks())
    assert (none.batch, none.accumulation, none.length) == (None, None, None)


@pytest.mark.parametrize(
    ("given", "keeps"),
    [({}, False), ({"set_to_none": True}, False), ({"set_to_none": False}, True)],
)
def test_whether_gradients_are_kept_as_zeros(given: dict[str, bool], keeps: bool) -> None:
    assert observed(Blocks(), before=lambda made: made.zero_grad(**given)).keeps_gradients is keeps
    placed = observed(Blocks(), before=lambda made: made.zero_grad(*given.values()))
    assert placed.keeps_gradients is keeps


def test_which_blocks_were_called_and_which_again_in_backward() -> None:
    facts = observed(Blocks(recomputes=True))
    assert facts.called == {"layers.0"} and facts.recomputed == {"layers.1"}
    assert observed(Blocks()).called == {"layers.0", "layers.1"}
    assert observed(Blocks()).recomputed == frozenset()
    assert observed(Blocks(second=False)).called == {"layers.0"}
    assert [level.blocks for level in facts.levels] == [("layers.0", "layers.1")]


def test_what_is_trained() -> None:
    model = Blocks()
    model.layers[0].requires_grad_(False)
    model.layers[0].to(torch.float64)
    model.layers[1].to(torch.float64)
    model.layers[1][0].bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))  # type: ignore[union-attr]
    observer = Observer()
    made = torch.optim.SGD(model.layers[1].parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()

    observer.observe(lambda: None, Built(model, (made,), step)).step()
    facts = observer.facts()
    assert (facts.trained, facts.frozen) == (20, True)
    assert facts.parameter_types == {torch.float64}
    assert (facts.huggingface, facts.parallel, facts.autocast) == (None, "", False)
    assert not observed(Blocks()).frozen and observed(Blocks()).trained == 40


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), ("AdamW", True, True, True, False)),
        (lambda p: torch.optim.Adam(p, fused=True), ("Adam", True, True, False, False)),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ("AdamW", True, True, True, True)),
        (lambda p: torch.optim.SGD(p, lr=0.1), ("SGD", False, True, True, False)),
        (lambda p: torch.optim.RMSprop(p), ("RMSprop", False, False, True, False)),
    ],
)
def test_an_optimizer_is_told_by_its_class_and_groups(
    make: Callable[[Any], Any], expected: tuple[Any, ...]
) -> None:
    (facts,) = observed(Blocks(), make).optimizers
    assert (facts.name, facts.adam, facts.fusable, facts.foreach, facts.amsgrad) == expected


@pytest.mark.parametrize(("foreach", "seen"), [(None, True), (True, True), (False, False)])
def test_kernels_for_all_are_used_unless_they_are_switched_off(foreach: bool | None, seen: bool) -> None:
    (facts,) = observed(
        Blocks(), lambda parameters: torch.optim.AdamW(parameters, foreach=foreach)
    ).optimizers
    assert facts.foreach is seen
    (fused,) = observed(Blocks(), lambda parameters: torch.optim.AdamW(parameters, fused=True)).optimizers
    assert not fused.foreach


def test_optimizers_in_wrappers_and_what_can_drop_gradients() -> None:
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert inner_optimizer(inner) is inner
    assert inner_optimizer(SimpleNamespace(optimizer=inner)) is inner
    bare = SimpleNamespace()
    assert inner_optimizer(bare) is bare
    model = nn.Linear(1, 1)
    assert with_zero_grad(Built(model, (inner, bare), lambda: None)) == [model, inner]  # type: ignore[arg-type]


# Transformers, autocast, several ranks


def test_a_transformers_model_and_its_own_loss_are_told(language_model: Any) -> None:
    word = "activation" if hasattr(language_model, "activation_checkpointing_enable") else "gradient"
    expected = HuggingFace("eager", True, True, f"{word}_checkpointing", True)
    built = language_job(language_model)
    observer = Observer()
    watched = observer.observe(lambda device: None, built)
    assert isinstance(watched.step(), float), "the loss is passed on"
    assert observer.facts().huggingface == expected
    inside = nn.ModuleDict({"head": nn.Linear(1, 1), "model": language_model})
    assert huggingface_in(inside) is language_model
    assert huggingface_in(nn.Linear(1, 1)) is None


def test_a_model_s_own_loss_is_one_that_was_called_and_has_an_output_layer(language_model: Any) -> None:
    ids = torch.arange(24)[None]

    def without_labels() -> None:
        language_model(input_ids=ids, use_cache=False)

    facts = facts_of(Built(language_model, (), without_labels))
    assert facts.huggingface is not None and not facts.huggingface.own_loss
    language_model.get_output_embeddings = lambda: None
    facts = facts_of(language_job(language_model))
    assert facts.huggingface is not None and not facts.huggingface.own_loss


def test_the_word_for_checkpointing_that_transformers_5_has(language_model: Any) -> None:
    language_model.activation_checkpointing_enable = lambda: None
    language_model.supports_gradient_checkpointing = language_model._supports_sdpa = False
    facts = facts_of(language_job(language_model))
    assert facts.huggingface == HuggingFace("eager", False, False, "activation_checkpointing", True)


def test_a_model_that_once_ran_under_autocast_does() -> None:
    model = Blocks()
    made = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for enabled in (True, False):
            torch.set_autocast_enabled("cuda", enabled)
            model(torch.ones(2, 4))

    assert facts_of(Built(model, (made,), step)).autocast
    assert not torch.is_autocast_enabled("cuda")


def test_sharded_parameters_and_ddp_make_it_one_of_several_ranks(tmp_path: Path) -> None:
    sharded = Blocks()
    next(sharded.parameters()).placements = ()  # type: ignore[attr-defined]
    assert observed(sharded).parallel == "FSDP2"
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(Blocks())
        assert observed(wrapped).parallel == "DistributedDataParallel"
    finally:
        dist.destroy_process_group()


def test_facts_are_those_of_a_step() -> None:
    with pytest.raises(AssertionError, match="was not traced"):
        Observer().facts()
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    inner.accelerator_state = None  # type: ignore[attr-defined]
    assert inner_optimizer(inner) is inner
    inner.optimizer = other = SimpleNamespace()  # type: ignore[attr-defined]
    assert inner_optimizer(inner) is other, "Accelerate's wrapper is an optimizer of torch's, too"
