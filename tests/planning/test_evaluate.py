"""What a traced step counts as work."""

import torch
from torch.utils.flop_counter import flop_registry

from memtriage.planning.changes import Change
from memtriage.planning.evaluate import FINENESS, Evaluator, Work
from memtriage.planning.facts import Facts
from memtriage.prediction.gpu_kinds import machine
from memtriage.prediction.script import Script
from support.training import training


def test_products_forward_and_backward_are_counted():
    weight = torch.randn(16, 32, requires_grad=True)
    inputs = torch.randn(8, 16, requires_grad=True)
    work = Work()
    with work:
        (inputs @ weight).relu().sum().backward()
    assert work.flops == 3 * 2 * 8 * 16 * 32
    assert not work.uncounted


def test_operators_whose_formula_does_not_know_the_shapes_are_named(monkeypatch):
    def of_other_shapes(*args, **kwargs):
        raise AssertionError

    monkeypatch.setitem(flop_registry, torch.ops.aten.bmm, of_other_shapes)
    batches, work = torch.randn(3, 4, 5), Work()
    with work:
        product = batches @ batches.mT
        product[0] @ product[0]
    assert work.uncounted == {"aten.bmm"}
    assert work.flops == 2 * 4 * 4 * 4


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


def linear(device):
    model = torch.nn.Linear(64, 64, device=device)
    return training(model, lambda: model(torch.randn(8, 64, device=device)).sum())


def change(name, **fields):
    return Change(rung=name, action=name, speed="none", maths="same", code={}, **fields)


def test_each_set_of_changes_is_traced_once_and_the_last_three_are_kept():
    evaluator = Evaluator(linear, machine("h200"), (2, 11), "", 1, 1 << 40)
    names = ["one", "two", "three", "four"]
    for name in names:
        evaluator.of((change(name, work_factor=2.0),))
    assert evaluator.traces == 4
    assert evaluator.of((change("one"),)).work == 2 * 2 * 2 * 8 * 64 * 64
    assert evaluator.traces == 4
    of_allocator = change("conf", conf="expandable_segments:True")
    evaluator.of((change("four"), of_allocator))
    assert evaluator.traces == 4  # the same trace under other settings of the allocator
    evaluator.of((change("one"), of_allocator))
    assert evaluator.traces == 5  # that one was no longer kept


def fragmenting(device):
    """Activations of growing sizes that are all freed, and a block that only merged memory has room for."""
    model, optimizer, train = linear(device)

    def step():
        activations = [
            torch.empty((12 + place) << 20, dtype=torch.uint8, device=device) for place in range(20)
        ]
        del activations
        whole = torch.empty(300 << 20, dtype=torch.uint8, device=device)
        del whole
        train()

    return model, optimizer, step


def test_primed_memory_is_evaluated_on_the_same_trace():
    evaluator = Evaluator(fragmenting, machine("h200"), (2, 11), "", 2, 1 << 40)
    plain, primed = evaluator.of(()).peak, evaluator.of((change("primed", primed=True),)).peak
    assert evaluator.traces == 1
    assert primed.allocated <= plain.allocated  # less is lost to rests that are not split off
    assert primed.reserved < 0.75 * plain.reserved
    assert primed.needs <= plain.needs
    expandable = change("conf", conf="expandable_segments:True")
    both = evaluator.of((expandable, change("primed", primed=True))).peak
    assert both == evaluator.of((expandable,)).peak  # expandable segments have no blocks to choose


def test_a_program_is_looked_at_once_and_of_a_script_nothing_is_known(tmp_path):
    evaluator = Evaluator(linear, machine("h200"), (2, 11), "", 1, 1 << 40)
    facts = evaluator.facts()
    assert facts.trained == 64 * 64 + 64 and not facts.compiled
    assert evaluator.facts() is facts
    evaluator.of(())
    assert evaluator.traces == 1  # what is looked at is traced as it is
    file = tmp_path / "train.py"
    file.write_text("raise AssertionError")
    script = Evaluator(Script(str(file)), machine("h200"), (2, 11), "", 1, 1 << 40)
    assert script.facts() == Facts() and script.traces == 0


def test_options_of_the_allocator_that_were_not_given_are_those_that_a_trace_finds(monkeypatch):
    given = Evaluator(linear, machine("h200"), (2, 11), "max_split_size_mb:64", 1, 1 << 40)
    assert (given.conf(), given.traces) == ("max_split_size_mb:64", 0)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = Evaluator(linear, machine("h200"), (2, 11), None, 1, 1 << 40)
    assert (found.conf(), found.traces) == ("expandable_segments:True", 1)
