"""Mechanisms: one rule for each way of keeping memory, told by the holder path; the first that applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage.diagnose.mechanisms import Held, explain

LOSSES = "frame main(): losses['lm'][*]"


def held(anchor: str, tail: str = "", **known: object) -> Held:
    """What the census says: `tail` is the part of the path behind its first hop into the graph."""
    fields: dict[str, object] = {"attached": bool(tail), "owner": "variable"}
    return Held(holder=anchor + tail, anchor=anchor, **(fields | known))  # type: ignore[arg-type]


RULES = [
    pytest.param(held("garbage cycle of Node: .value"), "Node", ["gc.enable", "weakref"], id="garbage"),
    pytest.param(
        held("frame train(): everything", lengthens=True),
        "everything is one tensor that is made anew, longer",
        ["preallocated", "end of each epoch"],
        id="lengthens",
    ),
    pytest.param(
        held("model.layers[*]._fp8_workspaces['weight']", known="te.fp8_workspaces"),
        "TransformerEngine: _fp8_workspaces of each module (te.fp8_workspaces) holds",
        ["memtriage.clear_caches(['te.fp8_workspaces'])", "memtriage holders"],
        id="known",
    ),
    pytest.param(
        held("model.layers[*].fp8_meta", known="te.fp8_meta"),
        "te.fp8_meta",
        ["it is model state", "what clears it: nothing"],
        id="known-and-never-cleared",
    ),
    pytest.param(
        held("frame train(): seen[*]", shared=True), "shared memory", ["seen", "clone()"], id="shared"
    ),
    pytest.param(
        held("train.model.weight.grad", " -> grad_fn AddBackward0 -> saved self"),
        "create_graph=True",
        ["zero_grad(set_to_none=True)", "torch.autograd.grad"],
        id="gradient-graph",
    ),
    pytest.param(
        held("C++", " -> grad_fn ExpBackward -> ctx.result"),
        "`ctx.result`: output -> grad_fn -> ctx",
        ["ctx.save_for_backward", "`ctx.result`"],
        id="context-cycle",
    ),
    pytest.param(
        held(LOSSES, " -> grad_fn WrapBackward -> ctx.context[1]"),
        "losses['lm'] keeps the node alive",
        ["losses['lm']", "detach", "ctx.save_for_backward", "`ctx.context`"],
        id="context",
    ),
    pytest.param(
        held("closure of hook grab: captured['n1'][*]"), "captured['n1']", ["detach()", "remove()"], id="hook"
    ),
    pytest.param(
        held("train.model._forward_hooks[*].inputs[*]"), "a hook keeps", ["remove()"], id="hook-object"
    ),
    pytest.param(
        held("functools.lru_cache causal_mask[*]"),
        "functools.lru_cache causal_mask keeps every value",
        ["cache_clear()", "maxsize="],
        id="lru",
    ),
    pytest.param(
        held("train.errors[*].__traceback__: frame step(): x"),
        "traceback",
        ["str(error)", "clear_frames"],
        id="traceback",
    ),
    pytest.param(held("train.open[*]: generator batches(): x"), "generators", ["close()"], id="generator"),
    pytest.param(
        held("default argument of remember: store[*]"),
        "made once",
        ["`None` as the default"],
        id="default-argument",
    ),
    pytest.param(
        held('thread "loader" frame fill(): queue[*]'), "a thread keeps", ["maxsize=", "consume"], id="thread"
    ),
    pytest.param(
        held("frame main(): optimizer.state[*]['exp_avg']", owner="optimizer state"),
        "the optimizer gets new parameters",
        ["optimizer.state"],
        id="optimizer-state",
    ),
    pytest.param(
        held("frame main(): optimizer.param_groups[*]['params'][*]", owner="parameter"),
        "the optimizer gets new parameters",
        ["add_param_group once"],
        id="param-groups",
    ),
    pytest.param(
        held("train.model.heads[*].weight", owner="parameter"),
        "the model itself grows",
        ["once"],
        id="module",
    ),
    pytest.param(
        held("train.model.mask_[*]", owner="buffer"), "the model itself grows", ["buffers"], id="buffer"
    ),
    pytest.param(
        held("frame train(): state", " -> grad_fn TanhBackward0 -> saved result"),
        "state is carried from step to step",
        ["state = state.detach()", ".item()"],
        id="carried",
    ),
    pytest.param(
        held(LOSSES, " -> grad_fn MulBackward0 -> saved self"),
        "losses['lm'] keeps tensors that still carry a grad_fn",
        ["loss.detach()", "loss.item()"],
        id="attached",
    ),
    pytest.param(held("C++ only"), "nothing in Python refers", ["detach()"], id="c++"),
    pytest.param(
        held("frame main(): history[*]"),
        "history gets new tensors and never lets go",
        ["clear history", "deque(maxlen=...)", ".item()"],
        id="collection",
    ),
]


@pytest.mark.parametrize(("one", "mechanism", "fix"), RULES)
def test_each_holder_has_its_mechanism_and_its_fix(one: Held, mechanism: str, fix: list[str]) -> None:
    said = explain(one)
    assert mechanism in said.mechanism
    missing = [word for word in fix if word not in said.fix]
    assert not missing, said.fix


def test_no_two_rules_give_the_same_fix() -> None:
    fixes = {explain(case.values[0]).fix for case in RULES}  # type: ignore[arg-type]
    ids = {case.id for case in RULES} - {"hook-object", "param-groups", "buffer"}
    assert len(fixes) >= len(ids)


@pytest.mark.parametrize(
    ("one", "first"),
    [
        (held("garbage cycle of Node: .loss", " -> grad_fn F -> ctx.x"), "gc.enable"),
        (held("frame main(): seen", " -> grad_fn CatBackward0", lengthens=True), "preallocated"),
        (held("frame main(): seen[*]", " -> grad_fn MulBackward0 -> saved x", shared=True), "loss.detach()"),
        (held("closure of hook grab: kept[*]", " -> grad_fn F -> ctx.x"), "ctx.save_for_backward"),
        (held("closure of hook grab: kept[*]", " -> grad_fn MulBackward0"), "remove()"),
        (held("functools.lru_cache f[*]", " -> grad_fn MulBackward0 -> saved x"), "cache_clear"),
        (held("train.model.p[*].grad", owner="gradient"), "zero_grad"),
        (held("C++", " -> grad_fn MulBackward0 -> saved self[*]", attached=True), "detach()"),
    ],
)
def test_the_first_rule_that_applies_wins(one: Held, first: str) -> None:
    assert first in explain(one).fix


def test_the_fix_names_the_variable_not_the_whole_path() -> None:
    said = explain(held("frame run(): self.metrics.store[*]"))
    assert said.mechanism.startswith("self.metrics.store gets new tensors")
    assert said.fix.startswith("clear store when")


@given(
    st.text(max_size=60),
    st.text(max_size=60),
    st.booleans(),
    st.sampled_from(["variable", "parameter", "gradient", "garbage", "c++ only"]),
    st.booleans(),
)
def test_every_path_is_explained(anchor: str, tail: str, attached: bool, owner: str, shared: bool) -> None:
    said = explain(Held(anchor + tail, anchor, attached, owner, shared=shared))
    assert said.mechanism and said.fix
