"""What the changes do to real programs on the host: the result that each claims to keep stays."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from memtriage.planning.blocks import levels_of
from memtriage.planning.facts import BATCH_NAMES, Facts, Knob, Observer, OptimizerFacts, huggingface_in
from memtriage.planning.rungs import settings
from memtriage.planning.rungs.checkpointing import CHECKPOINTING, CHOICES
from memtriage.planning.rungs.knobs import MICRO_BATCH
from memtriage.planning.rungs.loss import CHUNKED_LOSS
from memtriage.planning.rungs.optimizer_state import EIGHT_BIT, OFFLOAD
from memtriage.planning.rungs.optimizer_step import OPTIMIZER_STEP
from memtriage.planning.rungs.precision import AUTOCAST, WHOLE
from memtriage.planning.rungs.settings import ATTENTION, SET_TO_NONE
from memtriage.prediction.build import Built


class Job:
    """A training job on the host, whose step takes its batch from a fixed set of rows."""

    def __init__(self, model, optimizer=torch.optim.AdamW, **zero):
        torch.manual_seed(0)
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.rows = torch.randn(8, 16)
        self.zero = zero
        self.taken = 0

    def build(self, device="cpu", micro_batch=8):
        def step():
            rows = self.rows.roll(-self.taken, 0)[:micro_batch]
            self.taken += micro_batch
            # A sum, so that micro-batches add up to the whole batch without a factor.
            self.model(rows).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(**self.zero)

        return self.model, self.optimizer, step

    def built(self, **arguments):
        model, optimizer, step = self.build(**arguments)
        return Built(model, (optimizer,), step)

    def facts(self):
        observer = Observer()
        job = copy.deepcopy(self)
        observer.observe(job.build, job.built()).step()
        return observer.facts()


def last(rung, facts):
    """The way that saves most."""
    offer = rung.offer(facts)
    assert not offer.absent
    return offer.tracks[-1][-1]


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])


@pytest.mark.parametrize("zero_first", [False, True])
def test_accumulated_micro_batches_equal_the_whole_batch(model, zero_first):
    whole = Job(model)
    whole.built().step()
    job = Job(model)
    change = MICRO_BATCH.offer(job.facts()).tracks[0][0]
    assert change.action == "micro-batch 4 instead of 8, accumulated 2 times"
    made = job.built(**change.build_arguments)
    if zero_first:
        inner = made.step

        def step():
            made.model.zero_grad()
            made.optimizers[0].zero_grad()
            inner()

        made = Built(made.model, made.optimizers, step)
    change.edit(made).step()
    torch.testing.assert_close(weights(job.model), weights(whole.model))
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert len(job.optimizer.state[next(job.model.parameters())]) == 3


@pytest.mark.parametrize("rung", [CHECKPOINTING, SET_TO_NONE, OPTIMIZER_STEP])
def test_the_result_stays(model, rung):
    plain = Job(model, set_to_none=False)
    changed = Job(model, set_to_none=False)
    change = last(rung, plain.facts())
    made = change.edit(changed.built())
    for _ in range(2):
        plain.built().step()
        made.step()
    torch.testing.assert_close(weights(changed.model), weights(plain.model))


def test_every_other_block_is_checkpointed_alone(model):
    job = Job(model)
    changes = CHECKPOINTING.offer(job.facts()).tracks[0]
    assert [change.action for change in changes] == [
        "checkpoint every second block of the model (2 of 4)",
        "checkpoint every block of the model (4 of 4)",
    ]
    changes[0].edit(job.built())
    assert ["forward" in vars(block) for block in job.model] == [True, False, True, False]
    assert "enumerate(model):\n    if number % 2 == 0:" in changes[0].code["torch"]


def test_more_blocks_are_chosen_from_one_choice_to_the_next():
    chosen = [choice.among(tuple("abcdefghijkl")) for choice in CHOICES]
    assert list(map(len, chosen)) == [3, 4, 6, 8, 9, 12]
    assert chosen[3] == list("bcefhikl")
    for choice in CHOICES[:-1]:
        by_code = [name for number, name in enumerate("abcdefghijkl") if eval(choice.condition)]
        assert by_code == choice.among(tuple("abcdefghijkl"))


def test_checkpointed_blocks_are_not_checkpointed_again(model):
    job = Job(model)
    last(CHECKPOINTING, job.facts()).edit(job.built())
    assert "already" in CHECKPOINTING.offer(job.facts()).absent


def test_gradients_are_set_to_none(model):
    job = Job(model, set_to_none=False)
    last(SET_TO_NONE, job.facts()).edit(job.built()).step()
    assert all(parameter.grad is None for parameter in job.model.parameters())
    assert "already" in SET_TO_NONE.offer(Job(model).facts()).absent


def test_the_step_is_fused(model):
    job = Job(model)
    last(OPTIMIZER_STEP, job.facts()).edit(job.built())
    assert job.optimizer.param_groups[0]["fused"] is True
    assert "foreach" in OPTIMIZER_STEP.offer(job.facts()).absent
    other = Job(model, torch.optim.RMSprop)
    change = last(OPTIMIZER_STEP, other.facts())
    change.edit(other.built())
    assert change.action == "RMSprop(foreach=False)"
    assert other.optimizer.param_groups[0]["foreach"] is False


def test_states_of_8_bits_have_the_sizes_of_the_real_ones():
    job = Job(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 500)))
    last(EIGHT_BIT, job.facts()).edit(job.built()).step()
    small, large = job.model[0].weight, job.model[1].weight
    assert {name: (each.dtype, each.numel()) for name, each in job.optimizer.state[small].items()} == {
        "state1": (torch.float32, 256),
        "state2": (torch.float32, 256),
    }
    assert {name: (each.dtype, each.numel()) for name, each in job.optimizer.state[large].items()} == {
        "state1": (torch.uint8, 8000),
        "state2": (torch.uint8, 8000),
        "absmax1": (torch.float32, 32),
        "absmax2": (torch.float32, 32),
    }


def test_offloaded_optimizer_keeps_nothing_on_the_device(model):
    job = Job(model)
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        scheduler = torch.optim.lr_scheduler.ConstantLR(job.optimizer)
        last(OFFLOAD, job.facts()).edit(job.built()).step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    finally:
        handle.remove()
    assert not any(job.optimizer.state.values())
    # Of the two: the steps of the copy that was looked at, and of the job.
    assert len(seen) == 2


@pytest.mark.parametrize("rung", [EIGHT_BIT, OFFLOAD])
def test_only_adam_has_smaller_states(model, rung):
    assert "SGD" in rung.offer(Job(model, torch.optim.SGD).facts()).absent


def test_autocast_and_narrow_models_have_nearly_the_same_outputs(model):
    job = Job(model)
    expected = job.model(job.rows)
    assert last(WHOLE, job.facts()).edit(job.built()).model(job.rows).dtype is torch.bfloat16
    torch.testing.assert_close(job.model(job.rows).float(), expected, atol=0.05, rtol=0.05)
    assert "already" in AUTOCAST.offer(job.facts()).absent
    assert "autocast" in last(AUTOCAST, Job(model).facts()).code["torch"]


def test_expandable_segments_are_offered_once():
    assert last(settings.allocator_rung(""), None).conf == "expandable_segments:True"
    assert settings.allocator_rung("expandable_segments:True").offer(None).absent
    merged = last(settings.allocator_rung("garbage_collection_threshold:0.8"), None).code["torch"]
    assert "CONF=garbage_collection_threshold:0.8,expandable_segments:True" in merged
    assert "max_split_size_mb" in settings.allocator_rung("max_split_size_mb:256").offer(None).absent


def test_primed_memory_takes_the_place_of_expandable_segments():
    primed = last(settings.primed_rung(""), None)
    assert primed.primed and not primed.traced
    assert settings.allocator_rung("").name in primed.displaces
    assert settings.primed_rung("expandable_segments:True").offer(None).absent


# Transformers


@pytest.fixture
def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_implementation="eager",
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).train()


def language_job(model):
    ids = torch.arange(48).view(2, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return Built(model, (optimizer,), step)


@pytest.mark.parametrize("rung", [CHUNKED_LOSS, CHECKPOINTING, ATTENTION])
def test_the_loss_and_the_weights_of_a_language_model_stay(language_model, rung):
    plain, changed = language_job(copy.deepcopy(language_model)), language_job(copy.deepcopy(language_model))
    observer = Observer()
    observed = language_job(copy.deepcopy(language_model))
    observer.observe(lambda device: None, observed).step()
    change = last(rung, observer.facts())
    made = change.edit(changed)
    assert made.step() == pytest.approx(plain.step(), rel=1e-5)
    torch.testing.assert_close(weights(changed.model), weights(plain.model), atol=1e-5, rtol=1e-4)
    again = Observer()
    again.observe(lambda device: None, changed).step()
    if rung is not CHUNKED_LOSS:
        assert "already" in rung.offer(again.facts()).absent


def test_chosen_layers_of_a_language_model_are_switched(language_model):
    job = language_job(language_model)
    observer = Observer()
    observer.observe(lambda device: None, language_job(copy.deepcopy(language_model))).step()
    half = CHECKPOINTING.offer(observer.facts()).tracks[0][0]
    half.edit(job)
    layers = huggingface_in(language_model).model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True, False]
    assert "block.gradient_checkpointing = number % 2 == 0" in half.code["torch"]


def test_a_loss_from_outside_the_model_is_not_replaced(language_model):
    built = language_job(copy.deepcopy(language_model))

    def step():
        logits = built.model(input_ids=torch.arange(24)[None], use_cache=False).logits
        functional.cross_entropy(logits.flatten(0, 1), torch.arange(24)).backward()

    observer = Observer()
    observer.observe(lambda device: None, Built(built.model, built.optimizers, step)).step()
    assert "within torch.utils.checkpoint" in CHUNKED_LOSS.offer(observer.facts()).absent


# Knobs


def facts_with(**changes):
    optimizer = OptimizerFacts("AdamW", adam=True, fusable=True, fused=False, foreach=True, amsgrad=False)
    given = {
        "batch": None,
        "accumulation": None,
        "length": None,
        "optimizers": (optimizer,),
        "keeps_gradients": False,
        "autocast": False,
        "parameter_types": frozenset({torch.float32}),
        "trained": 1,
        "frozen": False,
        "levels": (),
        "called": frozenset(),
        "recomputed": frozenset(),
        "huggingface": None,
        "parallel": "",
    }
    return Facts(**{**given, **changes})


def test_every_divisor_of_the_batch_is_offered():
    (track,) = MICRO_BATCH.offer(facts_with(batch=Knob("batch", 12, "build"))).tracks
    assert [change.build_arguments["batch"] for change in track] == [6, 4, 3, 2, 1]
    # Two micro-batches are simulated; a step of twelve is six times the work.
    assert [change.work_factor for change in track] == [1, 1.5, 2, 3, 6]


def test_a_keyword_of_the_step_and_one_for_the_accumulation():
    facts = facts_with(batch=Knob("batch", 8, "step"), accumulation=Knob("accum", 3, "build"))
    change = MICRO_BATCH.offer(facts).tracks[0][-1]
    assert change.step_arguments == {"batch": 1}
    assert change.build_arguments == {"accum": 6}
    assert change.action == "micro-batch 1 instead of 8, accumulated 24 times"


def test_a_batch_of_one_cannot_be_smaller():
    assert "1 already" in MICRO_BATCH.offer(facts_with(batch=Knob("batch", 1, "build"))).absent
    assert all(name in MICRO_BATCH.offer(facts_with()).absent for name in BATCH_NAMES)


def test_adapters_alone_are_trained(language_model):
    pytest.importorskip("peft")
    from memtriage.planning.rungs.adapters import LORA

    before = {name: each.clone() for name, each in language_model.named_parameters()}
    observer = Observer()
    observer.observe(lambda device: None, language_job(copy.deepcopy(language_model))).step()
    job = last(LORA, observer.facts()).edit(language_job(language_model))
    for _ in range(2):
        job.step()
    trained = {name for name, each in language_model.named_parameters() if each.requires_grad}
    assert trained and all("lora" in name for name in trained)
    now = {name.replace(".base_layer", ""): each for name, each in language_model.named_parameters()}
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert any(now[name].abs().sum() > 0 for name in trained if "lora_B" in name)
    (group,) = job.optimizers[0].param_groups
    assert len(group["params"]) == len(trained)
    again = Observer()
    again.observe(lambda device: None, job).step()
    assert "frozen" in LORA.offer(again.facts()).absent


def test_the_code_for_blocks_in_several_places_is_python():
    stages = nn.ModuleList(
        [
            nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(1, 1)) for _ in "ab"])})
            for _ in range(2)
        ]
    )
    levels = levels_of(nn.ModuleDict({"stages": stages}))
    names = frozenset(name for level in levels for name in level.blocks)
    facts = facts_with(levels=levels, called=names)
    code = CHECKPOINTING.offer(facts).tracks[1][-1].code["torch"]
    assert "for block in [*model.stages[0].layers, *model.stages[1].layers]:" in code
    compile(code, "code", "exec")
