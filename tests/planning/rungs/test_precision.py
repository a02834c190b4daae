"""16-bit activations: when they are offered, what is written, and that outputs stay nearly the same."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import nn

from memtriage.planning.facts import Facts
from memtriage.planning.rungs.precision import AUTOCAST, WHOLE
from memtriage.prediction.build import Built
from support.training_jobs import Job, last

SINGLE = Facts(parameter_types=frozenset({torch.float32, torch.bfloat16}))


def test_a_program_under_autocast_can_still_have_narrow_weights() -> None:
    facts = replace(SINGLE, autocast=True)
    assert AUTOCAST.offer(facts) == "the model runs under autocast already"
    assert last(WHOLE, facts).displaces == {"bf16 autocast"}


def test_a_narrow_model_has_nearly_the_same_outputs(model: nn.Module) -> None:
    job = Job(model)
    expected = job.model(job.rows)
    built = job.built()
    assert last(WHOLE, job.facts()).edit(built) is built
    assert {parameter.dtype for parameter in job.model.parameters()} == {torch.bfloat16}
    assert job.model(job.rows).dtype is torch.bfloat16
    torch.testing.assert_close(job.model(job.rows).float(), expected, atol=0.05, rtol=0.05)
    assert "already" in AUTOCAST.offer(job.facts())


def test_inputs_of_single_precision_alone_are_narrowed() -> None:
    seen: list[torch.dtype] = []

    class Model(nn.Module):
        def forward(self, *args: torch.Tensor, **words: torch.Tensor) -> None:
            seen.extend(each.dtype for each in (*args, *words.values()))

    model = Model()
    last(WHOLE, SINGLE).edit(Built(model, (), lambda: None))
    model(
        torch.ones(1),
        torch.ones(1, dtype=torch.int64),
        scale=torch.ones(1),
        mask=torch.ones(1, dtype=torch.bool),
    )
    model(torch.ones(1, dtype=torch.float64))
    assert seen == [torch.bfloat16, torch.int64, torch.bfloat16, torch.bool, torch.float64]


def test_autocast_is_put_around_the_model_s_forward() -> None:
    seen: list[torch.dtype] = []

    class Model(nn.Module):
        def forward(self) -> None:
            seen.append(torch.get_autocast_dtype("cuda"))

    built = Built(Model(), (), lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a device torch says that it stays off
        assert last(AUTOCAST, SINGLE).edit(built) is built
    built.model()
    assert (seen, torch.get_autocast_dtype("cuda")) == ([torch.bfloat16], torch.float16)
