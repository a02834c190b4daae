"""Cross-entropy in chunks of rows: for which programs, what is written, and that loss and weights stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

from memtriage.planning.facts import Facts, HuggingFace, huggingface_in
from memtriage.planning.rungs.loss import CHUNKED_LOSS
from memtriage.prediction.build import Built
from support.training_jobs import facts_of, language_job, last, weights

OWN_LOSS = HuggingFace("sdpa", True, True, "gradient_checkpointing", True)
FACTS = Facts(huggingface=OWN_LOSS)


def test_the_loss_and_the_weights_of_a_language_model_stay(language_model: Any) -> None:
    plain, changed = (language_job(copy.deepcopy(language_model)) for _ in range(2))
    change = last(CHUNKED_LOSS, facts_of(language_job(copy.deepcopy(language_model))))
    assert change.edit(changed) is changed
    seen: list[tuple[int, ...]] = []
    inner = huggingface_in(changed.model)
    loss_function = inner.loss_function

    def watched(logits: torch.Tensor, labels: torch.Tensor, **words: Any) -> Any:
        seen.append(tuple(logits.shape))
        return loss_function(logits, labels, **words)

    inner.loss_function = watched
    assert changed.step() == pytest.approx(plain.step(), rel=1e-5)
    torch.testing.assert_close(weights(changed.model), weights(plain.model), atol=1e-5, rtol=1e-4)
    assert seen == [(2, 24, 32)], "hidden states, and not the logits of the whole batch"


def test_positions_that_do_not_count_are_left_out(language_model: Any) -> None:
    ids = torch.arange(48).view(2, 24)
    labels = ids.clone()
    labels[:, 5:9] = -100

    def loss(model: Any) -> float:
        return float(model(input_ids=ids, labels=labels, use_cache=False).loss.item())

    expected = loss(language_model)
    last(CHUNKED_LOSS, FACTS).edit(language_job(language_model))
    assert loss(language_model) == pytest.approx(expected, rel=1e-5)


def test_the_rows_are_taken_in_eight_chunks(language_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    last(CHUNKED_LOSS, FACTS).edit(language_job(language_model))
    rows: list[int] = []
    cross_entropy = functional.cross_entropy

    def counted(logits: torch.Tensor, wanted: torch.Tensor, **words: Any) -> torch.Tensor:
        rows.append(len(logits))
        return cross_entropy(logits, wanted, **words)

    monkeypatch.setattr(functional, "cross_entropy", counted)
    with torch.no_grad():
        language_model(input_ids=torch.arange(48).view(2, 24), labels=torch.arange(48).view(2, 24))
    assert rows == [6] * 8


def test_what_is_written_does_the_same(language_model: Any) -> None:
    change = last(CHUNKED_LOSS, FACTS)
    assert (change.rung, change.maths, change.counts_work) == ("chunked loss", "rounding", True)
    assert change.action == "output layer and cross-entropy in 8 chunks of rows"
    assert change.code["trainer"].startswith("TrainingArguments(use_liger_kernel=True)")
    plain = language_job(copy.deepcopy(language_model))
    exec(change.code["torch"], {"model": language_model})
    assert language_job(language_model).step() == pytest.approx(plain.step(), rel=1e-5)


def test_a_loss_from_outside_the_model_is_not_replaced(language_model: Any) -> None:
    built = language_job(language_model)

    def step() -> None:
        logits = built.model(input_ids=torch.arange(24)[None], use_cache=False).logits
        functional.cross_entropy(logits.flatten(0, 1), torch.arange(24)).backward()

    outside = facts_of(Built(built.model, built.optimizers, step))
    assert outside.huggingface is not None
    for facts in (outside, Facts()):
        offer = CHUNKED_LOSS.offer(facts)
        assert "for 8 chunks of rows of x, each within torch.utils.checkpoint" in offer
