"""Paths of another process's objects, as the program wrote them: this process, read as if it were another."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import _CheckpointFrame

from memtriage.model.paths import in_words
from memtriage.outside.graph import RemoteGraph
from memtriage.outside.naming import RemoteNamer
from support.outside_parts import known_python, walk_of
from support.path_cases import PRELUDE, PYTHON

pytestmark = known_python

MORE = """
from torch.autograd.graph import saved_tensors_hooks
def leaf(): return torch.ones(100, requires_grad=True)
plain_thing = Thing()
"""

# (statements, the paths of the tensors that they make, what follows in a graph after `->`)
PROGRAM: list[tuple[str, list[str]]] = [
    ("eight = (*range(7), T()); nine = (*range(8), T())", ["train.eight[7]", "train.nine[*]"]),
    ("class More(collections.namedtuple('More', 'x')): pass\nmore = More(T())", ["train.more.x"]),
    ("several = {T()}; frozen = frozenset([T()])", ["train.several[*]", "train.frozen[*]"]),
    ("class Output(dict): pass\n"
     "out = Output(key=T()); out.loss = T()", ["train.out['key']", "train.out.loss"]),
    ("class Pair(tuple): pass\nboth = Pair((1, T())); both.note = T()", ["train.both[1]", "train.both.note"]),
    ("def default(x, y=1, store=T(), *, z=2): pass", ["train.default -> default argument of default: store"]),
    ("def make():\n    one, kept = 1, T()\n    def grab(argument): return one, kept\n    return grab\n"
     "call = make()",
     ["train.call -> closure of grab: kept"]),
    ("class Static:\n    @staticmethod\n    def call(store=T()): pass",
     ["train.Static.call.__func__ -> default argument of Static.call: store"]),
    ("of_class = functools.partial(Thing, T())", ["train.of_class -> functools.partial Thing[0]"]),
    ("of_method = functools.partial(plain_thing.go, T())",
     ["train.of_method -> functools.partial Thing.go[0]"]),
    ("of_bound = functools.partial(types.MethodType(plain_thing.go, 1), T())",
     ["train.of_bound -> functools.partial Thing.go[0]"]),
    ("class Callable:\n    def __call__(self): pass\nof_other = functools.partial(Callable(), T())",
     ["train.of_other -> functools.partial Callable[0]"]),
    ("@functools.lru_cache(maxsize=7)\ndef bounded(n): return T()\nbounded(1); bounded(2)",
     ["functools.lru_cache bounded[*]"]),
    ("of_cache = functools.partial(bounded, T())", ["train.of_cache -> functools.partial bounded[0]"]),
    ("def failing():\n    big = [T()]\n    raise ValueError(T())\n"
     "try: failing()\nexcept ValueError as error: kept_error = error; kept_error.note = T()",
     ["train.kept_error.__traceback__ -> frame failing(): big[*]", "train.kept_error.<tuple>[0]",
      "train.kept_error.note"]),
    ("space = types.SimpleNamespace(t=T()); iterator = iter([T()])",
     ["train.space.t", "train.iterator.<list>[*]"]),
    ("array = T().numpy()", ["train.array.<Tensor>"]),
    ("class Tagged(torch.Tensor): __slots__ = ('tag',)\n"
     "tagged = torch.ones(3).as_subclass(Tagged); tagged.tag = T()",
     ["train.tagged", "train.tagged._base", "train.tagged.tag"]),
    ("chain = (leaf().exp() * T()).sin()",
     ["train.chain", "train.chain -> grad_fn SinBackward0 -> saved self",
      "train.chain -> grad_fn SinBackward0 -> … -> MulBackward0 -> saved other",
      "train.chain -> grad_fn SinBackward0 -> … -> ExpBackward0 -> saved result",
      "train.chain -> grad_fn SinBackward0 -> … -> AccumulateGrad -> variable"]),
    ("picked = leaf()[torch.arange(3),]",
     ["train.picked", "train.picked -> grad_fn IndexBackward0 -> saved indices[0]",
      "train.picked -> grad_fn IndexBackward0 -> … -> AccumulateGrad -> variable"]),
    ("nodes = [(leaf() * T()).grad_fn]; of_key = {'node': T().sub_(1).requires_grad_().exp().grad_fn}",
     ["train.nodes[*] -> saved other", "train.nodes[*] -> … -> AccumulateGrad -> variable",
      "train.of_key['node'] -> saved result", "train.of_key['node'] -> … -> AccumulateGrad -> variable"]),
    ("class Function(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
     "        ctx.save_for_backward(x * 1, x * 2)\n"
     "        ctx.note, ctx.record, ctx.table = T(), [1, T()], {'a': T()}\n"
     "        ctx.many = [*range(8), T()]\n        return x * 1\n"
     "    @staticmethod\n    def backward(ctx, g): return g\ncustom = Function.apply(leaf())",
     ["train.custom", "train.custom -> grad_fn FunctionBackward -> saved[0]",
      "train.custom -> grad_fn FunctionBackward -> saved[1]",
      "train.custom -> grad_fn FunctionBackward -> ctx.note",
      "train.custom -> grad_fn FunctionBackward -> ctx.record[1]",
      "train.custom -> grad_fn FunctionBackward -> ctx.many[*]",
      "train.custom -> grad_fn FunctionBackward -> ctx.table['a']",
      "train.custom -> grad_fn FunctionBackward -> … -> AccumulateGrad -> variable"]),
    ("with saved_tensors_hooks(lambda t: (5, t.clone()), lambda kept: kept[1]): packed = leaf() * T()",
     ["train.packed", "train.packed -> grad_fn MulBackward0 -> saved other[1]",
      "train.packed -> grad_fn MulBackward0 -> … -> AccumulateGrad -> variable"]),
    ("with saved_tensors_hooks(lambda t: t.clone(), lambda kept: kept): copied = leaf() * T()",
     ["train.copied", "train.copied -> grad_fn MulBackward0 -> saved other",
      "train.copied -> grad_fn MulBackward0 -> … -> AccumulateGrad -> variable"]),
]  # fmt: skip


NOT_READ = ("future", "sparse values", "compressed rows", "finalizer", "method of what C++ calls at the end")
"""Cases in which only C++, or another module than the program, holds the tensor."""


def T() -> Any:
    return torch.ones(100)


def leaf() -> Any:
    return torch.ones(100, requires_grad=True)


def paths(graph: RemoteGraph, tensors: list[int] | None = None) -> set[str]:
    namer = RemoteNamer(graph)
    return {in_words(namer.path(at).whole) for at in (graph.tensors if tensors is None else tensors)}


def test_what_a_program_holds_is_named_as_it_is_written(program: Any) -> None:
    statements = "\n".join(each[0] for each in PROGRAM)
    program.run(f"{PRELUDE}{MORE}{statements}")
    found = paths(walk_of({"train"}).run())
    assert found == {path for _, expected in PROGRAM for path in expected}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_holder_is_named_as_by_the_census_inside(program: Any) -> None:
    program.run(PRELUDE)
    for case, (source, _) in PYTHON.items():
        program.run(source, case)
    graph = walk_of({"train"}).run()
    namer = RemoteNamer(graph)
    found: dict[int, str] = {}
    for at in graph.tensors:
        if (facts := graph.torch.storage(graph.objects[at])) is not None:
            found.setdefault(facts.address, in_words(namer.path(at).whole))
    for case, (_, holder) in PYTHON.items():
        named = {found.get(address) for address, noted in program._noted if noted == case}
        assert named == {None if case in NOT_READ else holder}, case


def test_what_a_checkpoint_will_compute_again_holds_what_it_needs(program: Any) -> None:
    program.run(PRELUDE + MORE)
    program.run(
        """
        from torch.utils.checkpoint import checkpoint
        def block():
            mask = T()
            return checkpoint(lambda x: (x * mask).sin(), leaf(), use_reentrant=False)
        again = block()
        """
    )
    frames = [id(obj) for obj in gc.get_objects() if type(obj) is _CheckpointFrame]
    (needed,) = [path for path in paths(walk_of({"train"}, frames).run()) if path.endswith(": mask")]
    assert needed.startswith("train.again -> grad_fn SinBackward0 -> saved self -> checkpoint.")
    assert needed.endswith(" -> closure of <lambda>: mask")


def test_variables_of_running_functions_go_by_their_thread(program: Any) -> None:
    program.run(PRELUDE + MORE)
    program.run(
        """
        from queue import SimpleQueue
        ready, stop = SimpleQueue(), threading.Lock()
        stop.acquire()
        def wait():
            ready.put(None)
            stop.acquire()
            stop.release()
        def work():
            items = [T()]
            wait()
        def evaluate():
            acts, cell, module = [T()], T(), nn.Linear(2, 2, bias=False)
            def inner():
                mine = leaf() * cell
                wait()
            return inner()
        """
    )
    threads = [threading.Thread(target=program[name], name=name) for name in ("evaluate", "work")]
    for thread in threads:
        thread.start()
    for _ in threads:
        program["ready"].get()
    try:
        graph = walk_of({"train", "threading"}, threads=threads).run()
    finally:
        program["stop"].release()
        for thread in threads:
            thread.join()
    assert paths(graph) == {
        'thread "work" frame work(): items[*]',
        "frame evaluate(): acts[*]",
        "frame evaluate(): module.weight",
        "frame inner(): cell",
        "frame inner(): mine",
        "frame inner(): mine -> grad_fn MulBackward0 -> … -> AccumulateGrad -> variable",
    }


def test_what_no_root_leads_to_is_native_or_garbage(program: Any) -> None:
    program.run(PRELUDE + MORE)
    program.run(
        """
        class Child:
            def __init__(self, parent): self.parent, self.data = parent, [T()]
        class Parent:
            def __init__(self): self.child = Child(self)
        def cycle():
            made = Parent()
            return list(map(id, [made, vars(made), made.child, vars(made.child), made.child.data]))
        def lists():
            plain, thing = [T()], [Thing(T())]
            plain.append(plain)
            thing.append(thing)
            return list(map(id, [thing, thing[0], vars(thing[0]), plain]))
        def suspended():
            big = T()
            yield big
        """
    )
    gc.disable()
    try:
        garbage = [*program["cycle"](), *program["lists"]()]
        held = [program["suspended"](), T(), (leaf() * T()).grad_fn, program["Thing"](T())]
        held.append(program["Thing"](T()).go)
        next(held[0])
        graph = walk_of({"train"}, [*garbage, *map(id, held)]).run()
        assert paths(graph) == {
            "garbage cycle of Parent.child.data[*]",
            "garbage cycle of Thing[*].t",
            "garbage cycle of Tensor[*]",
            "generator suspended() -> generator suspended(): big",
            "C++ -> Tensor",
            "C++ -> grad_fn MulBackward0 -> saved other",
            "C++ -> grad_fn MulBackward0 -> … -> AccumulateGrad -> variable",
            "C++ or an evaluation stack -> Thing.t",
            "C++ or an evaluation stack -> method Thing.go.__self__.t",
        }
    finally:
        gc.enable()


def test_what_is_not_searched_has_no_holder(program: Any) -> None:
    held = [T(), [leaf()]]
    graph = walk_of({"train"}, [id(held[0]), id(held[1]), id(held[1][0])], is_late=lambda: True).run()
    assert paths(graph) == {"(not searched)"}
    assert graph.cut is not None
