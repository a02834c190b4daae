"""Which kernel is used, and that one with other bits than torch's is not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from memtriage import OffloadedAdamW
from memtriage.treat.offload.kernel import FloatRoom, Hyper, Operands, Scaling, adamw
from memtriage.treat.offload.native import choice, library
from memtriage.treat.offload.native.build import NotBuilt
from support.offload import parameters


@pytest.fixture
def asked_anew() -> Iterator[None]:
    choice.available.cache_clear()
    yield
    choice.available.cache_clear()


class TorchJob:
    """What the crew's job does, by torch's own kernels."""

    def __init__(self, operands: Operands, hyper: Hyper, scaling: Scaling) -> None:
        self.arguments = operands, hyper, scaling

    def start(self) -> None:
        operands, hyper, scaling = self.arguments
        count = sum(master.numel() for master in operands.masters)
        moments = operands.exp_avgs[0].dtype != torch.float32
        adamw(operands, hyper, scaling, FloatRoom(count, moments=moments))

    def wait(self) -> None:
        pass


def test_the_proof_accepts_torch_itself() -> None:
    assert choice.difference(TorchJob) is None


@pytest.mark.parametrize(
    "change",
    [
        {"beta1": 1e-7},
        {"beta2": 1e-7},
        {"eps": 1e-3},
        {"lr": 1e-6},
        {"weight_decay": 1e-2},
    ],
)
def test_the_proof_finds_arithmetic_that_is_a_little_different(change: dict[str, float]) -> None:
    def other(operands: Operands, hyper: Hyper, scaling: Scaling) -> TorchJob:
        changed = {key: getattr(hyper, key) * (1 - part) for key, part in change.items()}
        return TorchJob(operands, replace(hyper, **changed), scaling)

    assert "step" in str(choice.difference(other))


def test_the_proof_finds_one_weight_that_is_rounded_otherwise() -> None:
    class Careless(TorchJob):
        def start(self) -> None:
            super().start()
            operands = self.arguments[0]
            if operands.rounded and operands.rounded[0].dtype == torch.bfloat16:
                operands.rounded[-1].view(torch.int16)[-1] ^= 1

    assert "weights torch.bfloat16" in str(choice.difference(Careless))


def test_the_compiled_kernel_is_proven_here_or_says_why_not() -> None:
    try:
        found = choice.proven()
    except (NotBuilt, choice.NotProven) as error:
        pytest.skip(str(error))
    assert found.path.exists()
    weights = parameters([(70,)])
    assert OffloadedAdamW(weights, kernel="compiled").compiled
    assert OffloadedAdamW(weights).compiled
    assert not OffloadedAdamW(weights, kernel="torch").compiled


def refused() -> None:
    raise NotBuilt("no compiler today")


@pytest.mark.usefixtures("asked_anew")
def test_without_it_torch_does_the_same_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "built", refused)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            optimizer = OffloadedAdamW(parameters([(70,)]))
            assert not optimizer.compiled
    assert [record.getMessage() for record in caplog.records] == [
        "OffloadedAdamW uses torch's own kernels, which are slower: no compiler today"
    ]
    with pytest.raises(NotBuilt, match="no compiler today"):
        OffloadedAdamW(parameters([(70,)]), kernel="compiled")


@pytest.mark.usefixtures("asked_anew")
def test_one_that_is_not_proven_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "difference", lambda _: "the third element")
    try:
        choice.built()
    except NotBuilt as error:
        pytest.skip(str(error))
    assert not OffloadedAdamW(parameters([(70,)])).compiled
    with pytest.raises(choice.NotProven, match="the third element"):
        OffloadedAdamW(parameters([(70,)]), kernel="compiled")


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "adamw.so").write_text("no library")
    monkeypatch.setattr(choice, "built", lambda: tmp_path / "adamw.so")
    with pytest.raises(NotBuilt, match="cannot be loaded"):
        choice.proven()


@pytest.fixture(scope="module")
def proven() -> library.Library:
    try:
        return choice.proven()
    except (NotBuilt, choice.NotProven) as error:
        pytest.skip(str(error))


def test_many_jobs_and_threads_touch_every_element_once(proven: library.Library) -> None:
    """Runs of one block over parts of all lengths, more threads than cores, several tiles under way."""
    small = library.Library(proven.path, run=64)
    crew = library.Crew(small, 5)
    hyper = Hyper(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0, maximize=False)
    tiles = []
    for number in range(20):
        lengths = [64 * (1 + (number * 7 + part * 5) % 13) for part in range(1 + number % 6)]
        masters = [torch.zeros(length) for length in lengths]
        gradients = [torch.ones(length) for length in lengths]
        moments = [[torch.zeros(length) for length in lengths] for _ in range(2)]
        operands = Operands(masters, gradients, *moments, [torch.tensor(1.0)] * len(lengths))
        tiles.append((operands, crew.job(operands, hyper, Scaling())))
    for _, job in tiles:
        job.start()
    for operands, job in tiles:
        job.wait()
        job.wait()
        # The gradient over its root and eps, once.
        assert all(torch.equal(master, torch.full_like(master, -0.5)) for master in operands.masters)
    crew.close()
