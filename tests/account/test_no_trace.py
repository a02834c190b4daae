"""A census runs none of the program's code, keeps nothing of it alive, and leaves every switch as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memtriage
from memtriage.account import held
from memtriage.account.census import CensusView, Look, take_census
from memtriage.observe.alone import backward_runs
from memtriage.observe.containers import ContainerLengths, grown_containers
from memtriage.observe.frames import running_frames
from memtriage.session.remote.take import take_answer


class Counting(TorchFunctionMode):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_everything(calls: list[str]) -> Iterator[None]:
    with torch.inference_mode(), Counting(calls), Dispatching(calls):
        yield


MODES: dict[str, Callable[[list[str]], AbstractContextManager[Any]]] = {
    "everything counted": counting_everything,
    "fake tensors": lambda calls: FakeTensorMode(),
    "meta device": lambda calls: torch.device("meta"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_sees_the_census(program: Any, mode: str) -> None:
    program.run("import torch\nkept = [torch.ones(4096)]\nsparse = torch.eye(9).to_sparse()")
    program.made(program["kept"][0], "real")
    calls: list[str] = []

    def ask(view: CensusView) -> None:
        view.heads()
        if mode == "everything counted":
            view.details([("cpu", "train.kept[*]")], lambda obj: None)

    with MODES[mode](calls):
        inside = torch.ones(4) * 2
        calls.clear()
        program.look(ask)
        assert calls == []
        del inside
        torch.ones(1)
        assert len(calls) == (2 if mode == "everything counted" else 0)  # the guards are off again
    assert program.holders("real") == {"train.kept[*]"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch.func's own
def test_census_inside_function_transforms() -> None:
    counts: list[int] = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        counts.append(len(take_census().storages))
        return y.sum()

    torch.vmap(torch.func.grad(traced))(torch.ones(3, 4))
    torch.func.jvp(traced, (torch.ones(3),), (torch.ones(3),))
    assert len(counts) == 2


def test_nothing_is_kept_alive() -> None:
    def step() -> list[weakref.ref[Any]]:
        class Local(torch.nn.Module):
            pass

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.stash = x.clone()
                return x * 1

            @staticmethod
            def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
                return g

        module, tensor = Local(), torch.ones(100, requires_grad=True)
        out = Function.apply(tensor)
        with Look() as view:
            view.details([group.key for group in view.census().groups], lambda obj: None)
        return [weakref.ref(each) for each in (Local, Function, module, tensor, out, out.grad_fn.stash)]

    gone = step()
    gc.collect()  # classes are cycles
    assert [ref() for ref in gone] == [None] * 6


def test_tensors_die_at_once_after_a_census() -> None:
    gc.disable()
    try:
        kept = [torch.ones(10, requires_grad=True).exp()]
        watched = weakref.ref(kept[0])
        take_census()
        kept.clear()
        assert watched() is None
    finally:
        gc.enable()


def _in_a_backward(look: Callable[[], object]) -> None:
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(lambda gradient: None if look() else gradient)
    tensor.exp().backward()


LOOKS: dict[str, Callable[[], object]] = {
    "census": take_census,
    "asked": lambda: take_answer({}, None),
    "ledger": memtriage.ledger,
    "frames": lambda: [name for name, _ in running_frames(lambda file: False)],
    "first frame": lambda: next(running_frames(lambda file: False))[0],
    "backward": backward_runs,
    "backward under way": lambda: _in_a_backward(backward_runs),
}


@pytest.mark.parametrize("look", LOOKS)
def test_variables_of_callers_die_as_they_return(look: str) -> None:
    """A look at the stack meets its own frame: a cycle would keep all callers until the collector comes."""

    def step() -> weakref.ref[Any]:
        batch = torch.ones(10)
        LOOKS[look]()
        return weakref.ref(batch)

    end = threading.Event()
    other = threading.Thread(target=end.wait)
    other.start()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
        end.set()
        other.join()


def test_failure_in_the_census_leaves_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError("short of memory")

    monkeypatch.setattr(held, "owners_in", fail)
    with pytest.raises(MemoryError):
        take_census()
    assert gc.isenabled()
    calls: list[str] = []
    with Counting(calls), Dispatching(calls):
        torch.ones(1)
    assert len(calls) == 2


ODD_THINGS = """
import functools, sys, types, unittest.mock, weakref
import torch
from torch import nn

ran = []

def raises(name):
    def method(self, *args):
        ran.append(name)
        raise RuntimeError(name)
    return method

def T():
    return made(torch.ones(100))

class Proxied: pass
def dead_proxy():
    thing = Proxied()
    return weakref.proxy(thing)
proxy = [dead_proxy()]

class Raising:
    def __init__(self): object.__setattr__(self, 't', T())
    for name in ('__getattr__', '__getattribute__', '__eq__', '__hash__', '__len__', '__bool__', '__iter__',
                 '__repr__', '__call__', '__getitem__'):
        locals()[name] = raises(name)
    for name in ('__class__', 'shape', 'grad_fn', 'maxlen', 'cache_info', 'config'):
        locals()[name] = property(raises(name))
raising = Raising()

class OwnDict:
    __slots__ = ('t',)
    __dict__ = property(raises('__dict__'))
own_dict = OwnDict(); own_dict.t = T()

class Meta(type):
    __module__ = property(raises('metaclass __module__'))
    __name__ = property(raises('metaclass __name__'))
    __getattr__ = raises('metaclass __getattr__')
    __subclasscheck__ = raises('__subclasscheck__')
    __instancecheck__ = raises('__instancecheck__')
class Odd(metaclass=Meta):
    t = T()
odd = Odd(); odd.u = T()

class NoModuleName:
    __module__ = 17
    def __init__(self): self.t = T()
no_module_name = NoModuleName()

class Listed(list):
    __len__ = __iter__ = __getitem__ = __getattr__ = raises('list')
listed = Listed([T()])
class Mapped(dict):
    items = values = keys = __iter__ = __len__ = __getitem__ = raises('dict')
mapped = Mapped(k=T())
class Tupled(tuple):
    __iter__ = __len__ = __getitem__ = raises('tuple')
    _fields = property(raises('_fields'))
tupled = Tupled((T(),))

class Lazy(types.ModuleType):
    __getattr__ = __getattribute__ = raises('module')
sys.modules['train_lazy'] = Lazy('train_lazy')
class NoModule:
    __getattr__ = raises('no module')
sys.modules['train_no_module'] = NoModule()
sys.modules['train_nameless'] = nameless = types.ModuleType('nameless'); del nameless.__name__

class FooOptimizer:
    def __init__(self): self.state = {'a': T()}
    __getattr__ = step = zero_grad = raises('optimizer')
    param_groups = property(raises('param_groups'))
optimizer = FooOptimizer()

class NoParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.__dict__['_parameters'] = None
        self.__dict__['t'] = T()
    __getattr__ = raises('nn.Module')
no_parameters = NoParameters()

class Called:
    __call__ = __getattr__ = raises('called')
part = functools.partial(Called(), T())
mock = unittest.mock.MagicMock(); mock.t = T()
class Failed(Exception):
    __traceback__ = property(raises('__traceback__'))
    __getattr__ = raises('exception')
failed = Failed(); failed.t = T()
class Unseen(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        ran.append('__torch_function__')
        raise RuntimeError
unseen = T().as_subclass(Unseen)
ran.clear()
"""


def test_no_code_of_the_program_runs(program: Any) -> None:
    program.run(ODD_THINGS)

    def ask(view: CensusView) -> None:
        keys = [group.key for group in view.census().groups if group.anchor[0].name == "train"]
        view.details(keys, lambda obj: None)
        view.heads()
        lengths = ContainerLengths(view.graph.objects)
        grown_containers(view.graph, lengths.by_address())

    program.look(ask)
    assert program["ran"] == []
    assert program.holders() == {
        "train.raising.t",
        "train.own_dict.t",
        "train.Odd.t",
        "train.odd.u",
        "train.no_module_name.t",
        "train.listed[*]",
        "train.mapped['k']",
        "train.tupled[0]",
        "train.optimizer.state['a']",
        "train.no_parameters.t",
        "train.part -> functools.partial Called[0]",
        "train.mock.t",
        "train.failed.t",
        "train.unseen",
    }
    program.run("for name in ('train_lazy', 'train_no_module', 'train_nameless'): del sys.modules[name]")
