"""What holds each tensor of another process in Python: the container, the element in it, and its bound."""

from __future__ import annotations

from typing import Any

from memtriage.model.paths import in_words
from memtriage.outside.holders import Holders, RemoteHolding
from memtriage.outside.naming import RemoteNamer
from support.outside_parts import known_python, walk_of

pytestmark = known_python

PROGRAM = """
import collections, functools
import torch
class Thing:
    def __init__(self, t): self.t = t
def T(): return torch.ones(4)
recent = collections.deque([T()], maxlen=3)
endless = collections.deque([T()])
records = [{"loss": T()}]
thing = Thing(T())
@functools.lru_cache(maxsize=7)
def cached(n): return T()
cached(1)
def generate():
    held = T()
    yield held
source = generate(); next(source)
chain = torch.ones(4, requires_grad=True) * T()
"""


def test_the_container_and_the_element_of_each_tensor(program: Any) -> None:
    program.run(PROGRAM)
    graph = walk_of({"train"}).run()
    namer = RemoteNamer(graph)
    holders = Holders(graph, namer)
    positions = {in_words(namer.path(at).whole): at for at in graph.tensors}
    tensor = {path: graph.objects[at] for path, at in positions.items()}
    at = {name: id(value) for name, value in vars(program.module).items()}
    module, record, chain = id(vars(program.module)), id(program["records"][0]), program["chain"]._cdata
    expected = {
        (path := "train.recent[*]"): RemoteHolding(at["recent"], tensor[path], "deque", 3),
        (path := "train.endless[*]"): RemoteHolding(at["endless"], tensor[path], "deque", None),
        (path := "train.records[*]['loss']"): RemoteHolding(record, tensor[path], "dict", None),
        (path := "train.thing.t"): RemoteHolding(at["thing"], tensor[path], "Thing", None),
        (path := "functools.lru_cache cached[*]"): RemoteHolding(
            at["cached"], tensor[path], "_lru_cache_wrapper", 7
        ),
        (path := "train.source -> generator generate(): held"): RemoteHolding(
            at["source"], tensor[path], "generator", None
        ),
        "train.chain": RemoteHolding(module, chain, "dict", None),
        "train.chain -> grad_fn MulBackward0 -> saved other": RemoteHolding(module, chain, "dict", None),
    }
    assert {path: holders.of(positions[path]) for path in expected} == expected
    assert holders.containers([positions["train.records[*]['loss']"]]) == [1]
