"""What a traced step counts as work."""

import torch

from memtriage.planning.evaluate import FINENESS, Evaluator, Work
from memtriage.prediction.gpu_kinds import machine


def test_products_forward_and_backward_are_counted():
    weight = torch.randn(16, 32, requires_grad=True)
    inputs = torch.randn(8, 16, requires_grad=True)
    work = Work()
    with work:
        (inputs @ weight).relu().sum().backward()
    assert work.flops == 3 * 2 * 8 * 16 * 32
    assert not work.uncounted


def build(device):
    """A program that frees a large block in two halves, so that less would do than what is reserved."""
    model = torch.nn.Linear(1024, 1024, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        halves = [torch.empty(40 << 20, dtype=torch.uint8, device=device) for _ in range(2)]
        del halves
        whole = torch.empty(80 << 20, dtype=torch.uint8, device=device)
        del whole
        model.weight.sum().backward()
        optimizer.step()

    return model, optimizer, step


def test_what_a_program_needs_is_the_least_limit_that_it_runs_in():
    kind = machine("h200")

    def evaluated(limit):
        return Evaluator(build, kind, (2, 11), "", 2, limit).of(())

    whole = evaluated(kind.memory)
    peak = whole.peak
    assert whole.work == 0 and whole.fits  # no product in it
    needed = peak.needs - kind.outside
    assert 80 << 20 < peak.allocated <= needed
    assert needed + (60 << 20) < peak.reserved
    assert evaluated(needed).fits and not evaluated(needed - 2 * FINENESS).fits
