"""Training jobs on the host, for what changes a program: its weights after a step, as it is and changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtriage.planning.changes import Change, Rung
from memtriage.planning.facts import Facts, Observer
from memtriage.prediction.build import Built


class Job:
    """A job whose step takes its batch from a fixed set of rows."""

    def __init__(
        self, model: nn.Module, optimizer: Callable[..., Any] = torch.optim.AdamW, **zero: bool
    ) -> None:
        torch.manual_seed(0)
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.rows = torch.randn(8, 16)
        self.zero = zero
        self.taken = 0

    def build(self, device: str = "cpu", micro_batch: int = 8) -> tuple[nn.Module, Any, Callable[[], None]]:
        def step() -> None:
            rows = self.rows.roll(-self.taken, 0)[:micro_batch]
            self.taken += micro_batch
            # A sum, so that micro-batches add up to the whole batch without a factor.
            self.model(rows).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(**self.zero)

        return self.model, self.optimizer, step

    def built(self, **arguments: Any) -> Built:
        model, optimizer, step = self.build(**arguments)
        return Built(model, (optimizer,), step)

    def facts(self) -> Facts:
        """What is seen of a copy of it."""
        job = copy.deepcopy(self)
        return facts_of(job.built(), job.build)


def language_job(model: Any) -> Built:
    """One step of a language model by its own loss, which it gives back."""
    ids = torch.arange(48).view(2, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return Built(model, (optimizer,), step)


def facts_of(built: Built, build: Callable[..., Any] = lambda device: None) -> Facts:
    """What is seen of a program in a step of it."""
    observer = Observer()
    observer.observe(build, built).step()
    return observer.facts()


def last(rung: Rung, facts: Facts) -> Change:
    """The way of a rung that saves most."""
    offer = rung.offer(facts)
    assert not isinstance(offer, str)
    return offer[-1][-1]


def weights(model: nn.Module) -> torch.Tensor:
    """All weights in a row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
