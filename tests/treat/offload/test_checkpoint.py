"""`state_dict` and back: torch's AdamW, this class, other settings; and nothing held twice."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from memtriage import OffloadedAdamW
from memtriage.treat.offload.checkpoint import gathered_entry
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.pipeline import Ring, lane_to
from memtriage.treat.offload.resident import ResidentParameter, settle_in
from support.offload import (
    assert_same_as_reference,
    bits,
    give_gradients,
    group_of_one,
    make,
    masters_of,
    parameters,
    reference,
    same_bits,
)


def saved(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def trained(steps: int, **settings: Any) -> tuple[list[Parameter], OffloadedAdamW]:
    weights = parameters()
    optimizer = make(weights, **settings)
    for step in range(steps):
        give_gradients(weights, masters_of(weights), seed=step)
        optimizer.step()
    return weights, optimizer


def test_the_layout_is_that_of_torch() -> None:
    weights, optimizer = trained(1)
    masters = masters_of(weights)
    expected = reference(masters)
    give_gradients(weights, masters, seed=0)
    expected.step()
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert set(ours) == set(theirs)
    assert [set(group) for group in ours["param_groups"]] == [set(group) for group in theirs["param_groups"]]
    assert set(ours["state"]) == set(theirs["state"])
    for key, entry in theirs["state"].items():
        assert set(ours["state"][key]) == {*entry, "master"}
        for name, tensor in entry.items():
            assert (ours["state"][key][name].shape, ours["state"][key][name].dtype) == (
                tensor.shape,
                tensor.dtype,
            )


def test_state_is_empty_before_the_first_step_and_never_copied() -> None:
    weights = parameters()
    optimizer = make(weights)
    assert optimizer.state_dict()["state"] == {}
    give_gradients(weights, masters_of(weights), seed=0)
    optimizer.step()
    first, second = (optimizer.state_dict()["state"][0] for _ in range(2))
    for key in ("master", "exp_avg", "exp_avg_sq"):
        assert first[key].data_ptr() == second[key].data_ptr() == optimizer.state[weights[0]][key].data_ptr()


@pytest.mark.parametrize("model_first", [True, False])
def test_training_resumes_from_a_checkpoint_bit_for_bit(model_first: bool) -> None:
    weights, optimizer = trained(2)
    checkpoint = saved(optimizer.state_dict())
    model = [weight.detach().clone() for weight in weights]

    resumed = parameters(seed=77)
    other = make(resumed)

    def load_model() -> None:
        with torch.no_grad():
            for one, value in zip(resumed, model, strict=True):
                one.copy_(value)

    if model_first:
        load_model()
        other.load_state_dict(checkpoint)
    else:
        other.load_state_dict(checkpoint)
        load_model()
    for step in range(2, 4):
        for of, one in ((weights, optimizer), (resumed, other)):
            give_gradients(of, masters_of(of), seed=step)
            one.step()
    for weight, two in zip(weights, resumed, strict=True):
        assert same_bits(weight.detach(), two.detach())
        for key, value in optimizer.state[weight].items():
            assert same_bits(value, other.state[two][key])


def test_loading_copies_into_the_memory_that_is_there() -> None:
    weights, optimizer = trained(1)
    places = {key: value.data_ptr() for key, value in optimizer.state[weights[0]].items()}
    group = optimizer.param_groups[0]
    checkpoint = saved(optimizer.state_dict())
    checkpoint["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(checkpoint)
    assert {key: value.data_ptr() for key, value in optimizer.state[weights[0]].items()} == places
    assert optimizer.param_groups[0] is group
    assert group["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_torch_and_back(dtype: torch.dtype) -> None:
    """Two steps in torch, two here, one in torch again: five in torch."""
    weights = parameters(dtype=dtype)
    masters = masters_of(weights)
    expected = reference(masters)
    before = masters_of(weights)
    first = reference(before)
    for step in range(2):
        for of, one in ((masters, expected), (before, first)):
            give_gradients(weights, of, seed=step)
            one.step()

    with torch.no_grad():
        for weight, one in zip(weights, before, strict=True):
            weight.copy_(one)
            if dtype != torch.float32:  # what is loaded lacks the low bits of the weights: so must the rest
                one.copy_(weight)
                masters[[id(b) for b in before].index(id(one))].copy_(weight)
    optimizer = make(weights)
    optimizer.load_state_dict(saved(first.state_dict()))
    for step in range(2, 4):
        give_gradients(weights, masters, seed=step)
        optimizer.step()
        expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)

    after = [Parameter(master.detach().clone()) for master in masters]
    last = reference(after)
    last.load_state_dict(saved(optimizer.state_dict()))
    for of, one in ((masters, expected), (after, last)):
        give_gradients(weights, of, seed=4)
        one.step()
    assert all(same_bits(master.detach(), two.detach()) for master, two in zip(masters, after, strict=True))


def test_how_torch_computed_it_is_not_taken_over() -> None:
    weights, optimizer = trained(1)
    masters = masters_of(weights)
    other = torch.optim.AdamW(masters, foreach=True, capturable=False, lr=0.25)
    optimizer.load_state_dict(other.state_dict())
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"]) == (True, None, 0.25)
    assert not optimizer.state


@pytest.mark.parametrize(
    "forget",
    [
        lambda optimizer: optimizer.load_state_dict(make(parameters()).state_dict()),
        lambda optimizer: optimizer.state.clear(),
    ],
    ids=["loaded", "cleared by the user"],
)
def test_a_state_without_moments_begins_anew(forget: Any) -> None:
    weights, optimizer = trained(2)
    forget(optimizer)
    masters = masters_of(weights)
    expected = reference(masters)
    give_gradients(weights, masters, seed=8)
    optimizer.step()
    expected.step()
    assert_same_as_reference(optimizer, weights, expected, masters)


def test_moments_of_another_type_are_converted() -> None:
    weights, optimizer = trained(2)
    narrow = make(parameters(), state_dtype=torch.bfloat16)
    narrow.load_state_dict(optimizer.state_dict())
    for weight, entry in zip(weights, narrow.state_dict()["state"].values(), strict=True):
        assert same_bits(entry["exp_avg"], optimizer.state[weight]["exp_avg"].bfloat16())
        assert same_bits(entry["master"], optimizer.state[weight]["master"])


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    weights, optimizer = trained(1)
    before = [bits(entry["exp_avg"]).clone() for entry in optimizer.state.values()]

    def altered(**changes: Any) -> dict[str, Any]:
        state = saved(optimizer.state_dict())
        for key, value in changes.items():
            state["state"][5][key] = value
        return state

    too_few = saved(make(parameters()[:3]).state_dict())
    amsgrad = saved(torch.optim.AdamW(masters_of(weights), amsgrad=True).state_dict())
    lacking = altered()
    del lacking["state"][5]["exp_avg"]
    wrong_rate = altered()
    wrong_rate["param_groups"][0]["lr"] = -1.0
    stranger = altered()
    stranger["state"][99] = stranger["state"][0]
    partition = altered() | {"partition": {"rank": 1, "ranks": 2}}
    for state, words in (
        (too_few, "groups of"),
        (amsgrad, "amsgrad"),
        (lacking, "lacks exp_avg"),
        (wrong_rate, "lr"),
        (partition, r"share of \{'rank': 1, 'ranks': 2\}, this optimizer's is \{'rank': 0, 'ranks': 1\}"),
        (stranger, "99"),
        (altered(exp_avg_sq=torch.zeros(3)), r"exp_avg_sq of parameter 5 .*\(3,\)"),
        (altered(max_exp_avg_sq=torch.zeros(1000)), "amsgrad"),
    ):
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(state)
        after = [bits(entry["exp_avg"]) for entry in optimizer.state.values()]
        assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_hooks_on_saving_and_loading_run() -> None:
    _, optimizer = trained(1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("load") or dict(state))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["save", "load", "loaded"]


def test_full_state_dict_without_a_partition_is_the_state_dict() -> None:
    _, optimizer = trained(1)
    whole, plain = optimizer.full_state_dict(), optimizer.state_dict()
    assert whole["state"][0]["exp_avg"].data_ptr() == plain["state"][0]["exp_avg"].data_ptr()


def test_of_a_group_of_one_rank_the_state_is_that_without_a_group() -> None:
    with group_of_one() as group:
        weights, others = parameters(), parameters()
        masters = masters_of(weights)
        optimizer, expected = make(weights, process_group=group), reference(masters)
        give_gradients(weights, masters, seed=0)
        optimizer.step()
        expected.step()
        assert_same_as_reference(optimizer, weights, expected, masters)
        state, whole = optimizer.state_dict(), optimizer.full_state_dict()
        assert state.keys() == whole.keys() == {"state", "param_groups"}
        assert state["state"][0]["exp_avg"].shape == weights[0].shape
        again = make(others, process_group=group)
        for one in (state, whole, state | {"partition": {"rank": 0, "ranks": 1}}):
            again.load_state_dict(saved(one))
            assert same_bits(again.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("size", [64, 300])
def test_a_parameters_state_is_gathered_tile_by_tile(size: int, keep: bool) -> None:
    with group_of_one() as group:
        resident = ResidentParameter(Parameter(torch.rand(size)), "w", 1, 0)
        settle_in([resident], torch.float32, gradients=False)
        resident.exp_avg.copy_(torch.arange(float(size)))
        resident.exp_avg_sq.copy_(-torch.arange(float(size)))
        resident.step.fill_(7)
        ring = Ring(128, 1, pin=False)
        lane = lane_to(torch.device("cpu"))
        entry = gathered_entry(resident, Exchange(group, 128), lane, ring.slots[0], 64, keep=keep)
        ring.close()
    if not keep:
        assert entry == {}
        return
    assert {name: tensor.tolist() for name, tensor in entry.items()} == {
        "step": 7,
        "exp_avg": [float(number) for number in range(size)],
        "exp_avg_sq": [-float(number) for number in range(size)],
    }
    assert entry["step"].data_ptr() != resident.step.data_ptr()
