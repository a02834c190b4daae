"""The compiled kernel: its bits are torch's, whatever it is given."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.native.choice import available, difference
from memtriage.treat.offload.native.library import RUN, Crew, CrewJob, Library, takes

compiled = pytest.mark.skipif(available() is None, reason="there is no compiled kernel here")
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, maximize=False)


def library(**options: Any) -> Library:
    found = available()
    assert found is not None
    return Library(found.path, **options)


@compiled
@pytest.mark.parametrize(("threads", "run"), [(3, 64), (1, RUN)])
def test_every_bit_is_that_of_torch(threads: int, run: int) -> None:
    crew = Crew(library(run=run), threads)
    assert library().run == RUN == 32_768
    assert difference(crew.job) is None
    crew.close()
    crew.close()


def operands(steps: tuple[int, ...], *, rounded: bool) -> Operands:
    generator = torch.Generator().manual_seed(5)
    lengths = (128, 64, 192)

    def random() -> list[torch.Tensor]:
        return [torch.rand(length, generator=generator) - 0.25 for length in lengths]

    weights = [torch.zeros(length, dtype=torch.bfloat16) for length in lengths]
    return Operands(
        random(), random(), random(), [each.square() for each in random()],
        [torch.tensor(float(step)) for step in steps], weights if rounded else (),
    )  # fmt: skip


@compiled
@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("scaling", [Scaling(), Scaling(ranks=2), Scaling(grad_scale=3.0), Scaling(clip=0.5)])
def test_parameters_of_several_ages_are_stepped_together(rounded: bool, scaling: Scaling) -> None:
    ours, theirs = (operands((1, 7, 1), rounded=rounded) for _ in range(2))
    crew = Crew(library(), 2)
    job = crew.job(ours, HYPER, scaling)
    job.wait()  # not started: nothing to wait for
    job.start()
    job.wait()
    job.wait()
    crew.close()
    adamw(theirs, HYPER, scaling, FloatRoom(384, moments=False))
    for own, other in (
        (ours.masters, theirs.masters),
        (ours.exp_avgs, theirs.exp_avgs),
        (ours.exp_avg_sqs, theirs.exp_avg_sqs),
        (ours.rounded, theirs.rounded),
    ):
        assert all(torch.equal(left, right) for left, right in zip(own, other, strict=True))


@pytest.mark.parametrize(
    ("gradient", "moment", "weight", "known"),
    [
        (torch.float32, torch.float32, None, True),
        (torch.bfloat16, torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, None, False),
        (torch.float32, torch.float16, None, False),
        (torch.float32, torch.float32, torch.float16, False),
    ],
)
def test_types_that_the_kernel_does_not_know_are_left_to_torch(
    gradient: torch.dtype, moment: torch.dtype, weight: torch.dtype | None, known: bool
) -> None:
    def one(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.ones(64, dtype=dtype)]

    given = Operands(
        one(torch.float32), one(gradient), one(moment), one(moment), one(torch.float32),
        one(weight) if weight else (),
    )  # fmt: skip
    assert takes(given) is known


def test_nothing_begins_where_memory_is_refused() -> None:
    waited: list[int] = []
    job = CrewJob(operands((1, 1, 1), rounded=False), lambda: None, waited.append)
    with pytest.raises(MemoryError, match=r"^no host memory for a tile's list of parts$"):
        job.start()
    job.wait()
    assert waited == []


def test_threads_that_are_refused_are_an_error() -> None:
    refusing: Any = SimpleNamespace(crew=lambda threads: None)
    with pytest.raises(RuntimeError, match=r"^the system refused 5 threads$"):
        Crew(refusing, 5)


@pytest.mark.parametrize("forked", [False, True])
def test_threads_are_sent_home_once_and_by_their_own_process(
    forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    standing: Any = SimpleNamespace(crew=lambda threads: 77, leave=left.append)
    crew = Crew(standing, 5)
    if forked:
        monkeypatch.setattr(os, "getpid", lambda: -1)
    crew.close()
    crew.close()
    assert left == ([] if forked else [77])
