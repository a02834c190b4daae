"""The adapter for reinforcement-learning frameworks on a GPU: training is primed for its earlier needs."""

from __future__ import annotations

import pytest
import torch

from memtriage.integrations import rl
from memtriage.treat.phase import PhasePolicy

WIDTH = 8192
WEIGHTS = 2
BATCH = 16384


class Worker:
    """The methods of NeMo-RL's workers that move memory. It notes what is reserved when it prepares."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(WEIGHTS)])
        self.reserved: list[int] = []

    def prepare_for_training(self) -> None:
        self.reserved.append(torch.cuda.memory_reserved())
        self.model.to("cuda")

    def offload_before_refit(self) -> None:
        self.model.zero_grad()

    def offload_after_refit(self) -> None:
        self.model.to("cpu")
        self.offload_before_refit()

    def train(self) -> None:
        self.model(torch.ones(BATCH, WIDTH, device="cuda")).square().mean().backward()


@pytest.mark.parametrize("prime", [True, False])
def test_training_is_primed_for_what_it_needed_before(on_a_gpu: None, prime: bool) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    lines: list[str] = []
    policy = PhasePolicy(prime=prime, residue=None, log=lines.append)
    with rl.attach(Worker, policy=policy):
        worker = Worker()
        needed = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            worker.prepare_for_training()
            worker.train()
            needed.append(torch.cuda.max_memory_allocated())
            worker.offload_before_refit()
            worker.offload_after_refit()
            assert torch.cuda.memory_reserved() < WIDTH * WIDTH  # a quarter of one weight
    assert len(lines) == 9
    assert worker.reserved[0] < WIDTH * WIDTH
    for reserved in worker.reserved[1:]:
        assert (reserved > needed[0]) if prime else (reserved < WIDTH * WIDTH)
