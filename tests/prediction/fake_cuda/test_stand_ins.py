"""What is replaced for a trace looks like the original to TorchScript, inspect, pickle and schemas."""

import contextlib
import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch._dynamo  # replaces attributes of torch when it is first imported
from torch import fx, nn
from torch.jit._builtins import _find_builtin
from torch.utils._device import DeviceContext

from memtriage.prediction.fake_cuda.stand_ins import passing_for, replaced
from support.traced import traced

OWNERS = [
    *(torch, torch.Tensor, torch.UntypedStorage, torch._C, torch._C._nn, torch._utils, torch.serialization),
    *(torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs),
    *(torch.accelerator, torch.backends.cuda, torch.backends.cudnn, DeviceContext),
]
BEFORE = [(owner, dict(vars(owner))) for owner in OWNERS]
TENSOR_METHODS = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}


def stand_ins():
    """Functions that are replaced now, with what they stand for."""
    for owner, before in [*BEFORE, (torch.Tensor, TENSOR_METHODS)]:
        for name, original in before.items():
            now = getattr(owner, name, original)
            other = isinstance(original, (type, staticmethod, classmethod)) or not callable(original)
            if not other and now is not original and now != original:
                yield now, original


def asked(question, function):
    try:
        return question(function)
    except (TypeError, ValueError) as error:
        return type(error)


def test_functions_look_like_the_originals():
    def compared(device):
        found = list(stand_ins())
        for now, original in found:
            for question in (
                lambda function: function.__name__,
                lambda function: function.__doc__,
                inspect.signature,
                inspect.getsource,
                _find_builtin,
            ):
                assert asked(question, now) == asked(question, original), (now, question)
            assert pickle.loads(pickle.dumps(now)) is now
            assert copy.deepcopy(now) is now
        return {original for _, original in found}

    originals = traced(compared).answer
    assert len(originals) > 100
    # None of them is left in a table that TorchScript or torch.overrides made meanwhile.
    assert {torch.zeros, torch.tensor, torch.cuda.synchronize, TENSOR_METHODS["to"]} <= originals
    assert _find_builtin(torch.zeros) == "aten::zeros"
    assert torch.zeros_like in torch.overrides.get_overridable_functions()[torch]


def filled(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros(2, device=device) + torch.tensor([1.0], device=source.device) + source.sum()


class Filling(nn.Module):
    def forward(self, source):
        return torch.zeros_like(source) + torch.ones_like(source)


def test_torchscript_compiles_what_uses_them():
    def compiled(device):
        source = torch.ones(3, device=device)
        scripted = torch.jit.script(filled)
        module = torch.jit.script(nn.Linear(3, 3).to(device))
        return scripted(source, device).device.type, module(source).device.type, scripted.code

    *kinds, code = traced(compiled).answer
    assert kinds == ["cuda", "cuda"]
    assert code == torch.jit.script(filled).code


def test_a_function_of_python_is_compiled_from_its_own_source(monkeypatch):
    def helper(x):
        return x + 1

    monkeypatch.setattr(torch, "_helper_of_a_test", helper, raising=False)

    def program(x):
        return torch._helper_of_a_test(x)

    with replaced(torch, "_helper_of_a_test", lambda *args, **kwargs: None):
        assert torch.jit.script(program)(torch.ones(1)).tolist() == [2]


def test_fx_graphs_call_them_by_their_names():
    def drawn(device):
        graph = fx.symbolic_trace(Filling())
        return graph.code, pickle.loads(pickle.dumps(graph)).code, copy.deepcopy(graph).code

    assert set(traced(drawn).answer) == {fx.symbolic_trace(Filling()).code}


def test_annotations_name_the_class_itself():
    def defined(device):
        @torch.library.custom_op("memtriage_tests::placed", mutates_args=())
        def placed(source: torch.Tensor, device: torch.device) -> torch.Tensor:
            return source.clone()

        return str(placed._opoverload._schema)

    assert "Device device" in traced(defined).answer


def test_one_function_stands_for_several():
    def answer(*args, **kwargs):
        return "answered"

    with replaced(torch, "zeros", answer), replaced(torch, "ones", answer):
        assert (torch.zeros(1), torch.ones(1)) == ("answered", "answered")
        assert (torch.zeros.__name__, torch.ones.__name__) == ("zeros", "ones")
        assert _find_builtin(torch.ones) == "aten::ones"
    assert answer.__name__ == "answer"
    assert _find_builtin(answer) is None


def test_classes_that_pass_for_others():
    made = []
    passing = passing_for(dict, lambda *args, **kwargs: made.append((args, kwargs)) or "made")
    assert passing(1, a=2) == "made" and made == [((1,), {"a": 2})]
    assert isinstance({}, passing) and not isinstance([], passing)
    assert issubclass(dict, passing) and not issubclass(list, passing)
    assert (passing.__name__, passing.__module__) == ("dict", "torch")
    assert passing_for(dict, dict, "other").__module__ == "other"
    assert {dict: 1}[passing] == {passing: 1}[dict] == 1
    described = functools.singledispatch(lambda value: "other")
    described.register(passing, lambda value: "passing")
    assert (described({}), described([])) == ("passing", "other")


@pytest.mark.parametrize("fails", [False, True])
def test_it_is_put_back(fails):
    class Owner:
        def method(self):
            return "true"

    original = Owner.__dict__["method"]
    with (
        pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(),
        replaced(Owner, "other", 1),
        replaced(Owner, "method", lambda self: "false"),
    ):
        assert (Owner.other, Owner().method()) == (1, "false")
        assert Owner.method.__qualname__ == original.__qualname__
        if fails:
            raise ZeroDivisionError
    assert Owner.__dict__["method"] is original
    assert not hasattr(Owner, "other")
