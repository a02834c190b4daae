"""Plans for programs whose peaks are in known places."""

import msgspec
import pytest
import torch
from torch import nn

import memtriage
from memtriage.model.plan import Plan
from memtriage.planning.api import MARGIN
from memtriage.playbook.entries import PLAYBOOK
from memtriage.prediction.build import BuildError
from memtriage.prediction.gpu_kinds import machine
from support.training import training

MIB = 1 << 20


def budget_for(allocator):
    """The budget that leaves the allocator so many bytes."""
    return int((machine("h200").outside + allocator) / (1 - MARGIN))


def needs(build):
    """What a program needs as it is."""
    return memtriage.plan(build, "100GiB").before.needs


def rungs(plan):
    return [step.rung for step in plan.steps]


def passed(plan):
    return {rung.rung: rung for rung in plan.passed_over}


def test_a_program_that_fits_needs_no_change(weights):
    plan = memtriage.plan(weights, "100GiB")
    assert plan.fits and plan.steps == [] and plan.next_cheaper is None and plan.short_by == 0
    assert plan.traces == 1
    assert {rung.outcome for rung in plan.passed_over} == {"not needed"}
    prediction = memtriage.predict(weights)
    assert plan.before.allocated == max(step.peak_allocated for step in prediction.steps)
    assert plan.before.reserved == max(step.peak_reserved for step in prediction.steps)
    assert plan.before.allocated <= plan.before.needs - plan.outside_allocator <= plan.before.reserved


def test_the_largest_micro_batch_that_fits_is_found(activations):
    whole = memtriage.predict(activations).peak_allocated
    half = memtriage.predict(lambda device: activations(device, micro_batch=32)).peak_allocated
    plan = memtriage.plan(activations, budget_for((whole + half) // 2))
    assert plan.fits
    assert rungs(plan) == ["micro-batch"]
    assert plan.steps[0].action == "micro-batch 32 instead of 64, accumulated 2 times"
    assert plan.steps[0].maths == "same" and plan.steps[0].playbook == "M5"
    assert "gradient_accumulation_steps=2" in plan.steps[0].code["trainer"]
    # Accumulation keeps the gradients of the first micro-batch while the second runs forward.
    assert plan.after.allocated > half
    assert plan.next_cheaper.actions == [] and plan.next_cheaper.needs == plan.before.needs
    assert plan.after.needs <= plan.budget * (1 - MARGIN) + 2 * MIB


def test_without_a_keyword_for_the_batch_blocks_are_checkpointed(activations_fixed):
    before = memtriage.plan(activations_fixed, "100GiB").before
    plan = memtriage.plan(activations_fixed, int((before.needs - 40 * MIB) / (1 - MARGIN)))
    assert plan.fits
    assert "write e.g. `def build(device, micro_batch=16)`" in passed(plan)["micro-batch"].why
    assert [step.rung for step in plan.steps][-1] in ("bf16 autocast", "checkpointing")


def test_no_more_blocks_than_needed_are_checkpointed():
    """Tanh blocks in bf16, where nothing cheaper helps."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return torch.tanh(torch.tanh(torch.tanh(torch.tanh(self.linear(x)))))

    def build(device):
        model = nn.Sequential(*[nn.Sequential(Block(), Block()) for _ in range(4)]).to(device)
        return training(
            model, lambda: model(torch.randn(1 << 15, 256, dtype=torch.bfloat16, device=device)).sum()
        )

    before = memtriage.plan(build, "100GiB").before
    plan = memtriage.plan(build, int((before.needs - 48 * MIB) / (1 - MARGIN)))
    assert plan.fits
    step = plan.steps[-1]
    assert step.rung == "checkpointing" and step.playbook == "M7"
    assert "every fourth block" in step.action or "every third block" in step.action
    # Each of 8 blocks has one product forward and two backward.
    assert 0 < step.slowdown < 1 / 3
    assert "counted in the trace" in step.speed
    assert "use_reentrant=False" in step.code["torch"]


def test_a_fused_step_is_found_where_the_optimizer_is_the_peak(weights):
    plan = memtriage.plan(weights, int(needs(weights) / (1 - MARGIN)) - 4 * MIB)
    assert plan.fits
    assert rungs(plan) == ["optimizer step"]
    assert plan.steps[0].action == "AdamW(fused=True)"
    assert plan.steps[0].saves >= 16 * MIB - 2 * MIB


def test_an_offloaded_optimizer_is_the_last_resort(narrow_weights):
    # Weights and gradients of 32 MiB each and cuBLAS's workspaces of 64; 8-bit states would be 32 more.
    plan = memtriage.plan(narrow_weights, budget_for(150 * MIB))
    assert plan.fits
    assert rungs(plan)[-1] == "offloaded optimizer"
    assert plan.steps[-1].simulated_by
    assert "optimizer state" not in plan.after.by_owner


def test_what_cannot_fit_says_by_how_much_and_what_is_left(narrow_weights):
    plan = memtriage.plan(narrow_weights, budget_for(40 * MIB))
    assert not plan.fits
    assert plan.short_by == plan.after.needs - int(plan.budget * (1 - MARGIN))
    assert plan.next_cheaper is None
    assert "give world_size" in passed(plan)["sharding"].why
    assert passed(plan)["micro-batch"].outcome == "does not apply"
    assert passed(plan)["8-bit optimizer"].why == "offloaded optimizer takes its place"


def test_savings_add_up_and_every_step_names_its_entry(weights):
    plan = memtriage.plan(weights, budget_for(40 * MIB))
    assert plan.before.needs - sum(step.saves for step in plan.steps) == plan.after.needs
    assert all(step.playbook in PLAYBOOK and step.code["torch"] for step in plan.steps)
    assert all(rung.playbook in PLAYBOOK for rung in plan.passed_over)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"budget": "much"}, "'much' is not a size"),
        ({"budget": 0}, "budget=0"),
        ({"budget": "500MiB"}, "lie outside the allocator"),
        ({"budget": "8GiB", "allow": ["less data"]}, "less data"),
        ({"budget": "8GiB", "gpu": "abacus"}, "no GPU kind"),
        ({"budget": "8GiB", "allocator_conf": "nonsense:1"}, "nonsense"),
    ],
)
def test_bad_arguments_are_refused(weights, arguments, said):
    with pytest.raises(ValueError, match=said):
        memtriage.plan(weights, **arguments)


def test_a_program_that_cannot_be_traced_is_an_error():
    with pytest.raises(BuildError, match="returned a NoneType"):
        memtriage.plan(lambda device: None, "8GiB")


def test_with_several_gpus_the_state_is_shared_out(deep_weights):
    plan = memtriage.plan(deep_weights, budget_for(140 * MIB), world_size=4)
    assert plan.fits
    assert rungs(plan)[-1] == "sharding"
    assert plan.steps[-1].action == "FSDP2 over 4 GPUs"
    assert plan.steps[-1].playbook == "M9"
    # Two states of a quarter of 32 MiB.
    assert plan.after.by_owner.get("optimizer state", 0) <= 16 * MIB + 64
    assert any("NCCL" in note for note in plan.notes)
