"""What a program may hold a tensor with, and how every census names that."""

from __future__ import annotations

PRELUDE = """
import atexit, collections, contextlib, dataclasses, functools, gc, queue, threading, types, weakref
import torch
from torch import nn

def T():
    return made(torch.ones(100))

class Thing:
    def __init__(self, t=None):
        self.t = t
    def go(self):
        pass
"""

# case: (source, holder path of every tensor that it makes)
PYTHON: dict[str, tuple[str, str | None]] = {
    "global": ("plain = T()", "train.plain"),
    "view": ("view = T()[:3]", "train.view"),
    "list in a dict": ("losses = {'lm': [T() for _ in range(5)]}", "train.losses['lm'][*]"),
    "nested lists": ("nested = [[T()]]", "train.nested[*][*]"),
    "tuple": ("pair = (None, T())", "train.pair[1]"),
    "long tuple": ("long = tuple(T() for _ in range(12))", "train.long[*]"),
    "namedtuple": ("point = collections.namedtuple('Point', 'x y')(1, T())", "train.point.y"),
    "dataclass": (
        "@dataclasses.dataclass\nclass Record:\n    value: object\nrecords = [Record(T()) for _ in range(3)]",
        "train.records[*].value",
    ),
    "slots": (
        "class Slotted:\n    __slots__ = ('held',)\nclass Sub(Slotted): pass\n"
        "slotted = Sub(); slotted.held = T()",
        "train.slotted.held",
    ),
    "method of what C++ calls at the end": (
        "class Trainer:\n    def close(self): pass\n"
        "trainer = Trainer(); trainer.last = T(); atexit.register(trainer.close); del trainer",
        "C++ or an evaluation stack -> method Trainer.close.__self__.last",
    ),
    "deque": ("recent = collections.deque([T()], maxlen=3)", "train.recent[*]"),
    "defaultdict": (
        "counts = collections.defaultdict(list); counts['a'].append(T())",
        "train.counts['a'][*]",
    ),
    "ordered dict": ("ordered = collections.OrderedDict(a=T())", "train.ordered['a']"),
    "set": ("several = {T()}", "train.several[*]"),
    "queue": ("waiting = queue.Queue(); waiting.put(T())", "train.waiting.queue[*]"),
    "integer keys": ("by_step = {i: T() for i in range(2)}", "train.by_step[*]"),
    "numbered keys": ("by_name = {f'step_{i}': T() for i in range(5)}", "train.by_name['step_*']"),
    "two numbered keys": ("few = {'block_1': T()}", "train.few['block_1']"),
    "table of many keys": ("table = {'a' * i: T() for i in range(1, 40)}", "train.table[*]"),
    "tensor as a key": ("keyed = {T(): 1}", "train.keyed[*]"),
    "list subclass": ("class Mine(list): pass\nmine = Mine([T()])", "train.mine[*]"),
    "attribute of a list subclass": ("marked = Mine(); marked.extra = T()", "train.marked.extra"),
    "attribute of a dict subclass": (
        "class Output(dict): pass\nout = Output(); out.loss = T()",
        "train.out.loss",
    ),
    "attribute of a tuple subclass": (
        "class Pair(tuple): pass\nboth = Pair((1, 2)); both.note = T()",
        "train.both.note",
    ),
    "class attribute": ("class Meter:\n    history = [T()]", "train.Meter.history[*]"),
    "inner class": ("class Outer:\n    class Inner:\n        best = T()", "train.Outer.Inner.best"),
    "local class": (
        "def local():\n    class Local:\n        seen = [T()]\n    return Local()\nkept = local()",
        "train.local.<locals>.Local.seen[*]",
    ),
    "default argument": (
        "def default(x, store=[T()]): pass",
        "train.default -> default argument of default: store[*]",
    ),
    "keyword default": (
        "def keyword(*, store={'a': T()}): pass",
        "train.keyword -> default argument of keyword: store['a']",
    ),
    "default of a method": (
        "class Cls:\n    def add(self, x, store=[T()]): pass",
        "train.Cls.add -> default argument of Cls.add: store[*]",
    ),
    "function attribute": ("def cached(): pass\ncached.cache = [T()]", "train.cached.cache[*]"),
    "closure": (
        "def make():\n    captured = {'n1': [T()]}\n    def grab(): return captured\n    return grab\n"
        "callback = make()",
        "train.callback -> closure of grab: captured['n1'][*]",
    ),
    "partial": (
        "part = functools.partial(print, 1, T())",
        "train.part -> functools.partial print[1]",
    ),
    "bound method": ("bound = Thing(T()).go", "train.bound.__self__.t"),
    "lru cache": (
        "@functools.lru_cache(maxsize=7)\ndef causal_mask(n): return T()\nfor i in range(3): causal_mask(i)",
        "functools.lru_cache causal_mask[*]",
    ),
    "unbounded cache": (
        "@functools.cache\ndef rotary(n): return T()\nfor i in range(3): rotary(i)",
        "functools.lru_cache rotary[*]",
    ),
    "cache of a method": (
        "class Rope:\n    @functools.cache\n    def table(self): return T()\nrope = Rope(); rope.table()",
        "functools.lru_cache Rope.table[*]",
    ),
    "cached property": (
        "class Lazy:\n    @functools.cached_property\n    def heavy(self): return T()\n"
        "lazy = Lazy(); lazy.heavy",
        "train.lazy.heavy",
    ),
    "generator": (
        "def generate():\n    held = [T()]\n    yield held\nsource = generate(); next(source)",
        "train.source -> generator generate(): held[*]",
    ),
    "variable of a generator that a function inside uses": (
        "def counting():\n    kept = [T()]\n    def more(): return kept\n    yield more\n"
        "counted = counting(); next(counted)",
        "train.counted -> generator counting(): kept[*]",
    ),
    "asynchronous generator": (
        "async def stream():\n    one = T()\n    yield one\nagen = stream()\n"
        "with contextlib.suppress(StopIteration): agen.asend(None).send(None)",
        "train.agen -> generator stream(): one",
    ),
    "traceback": (
        "errors = []\ndef failing():\n    big = [T()]\n    raise ValueError\n"
        "try: failing()\nexcept ValueError as error: errors.append(error)",
        "train.errors[*].__traceback__ -> frame failing(): big[*]",
    ),
    "linked list": ("head = Thing(T())", "train.head.t"),
    "weak key's value": (
        "key = Thing(); weak_keys = weakref.WeakKeyDictionary(); weak_keys[key] = T()",
        "train.weak_keys.data[*]",
    ),
    "attribute of a thread": ("local = threading.local(); local.masks = {7: T()}", "train.local.masks[*]"),
    "attribute of a thread's object": (
        "class Scratch(threading.local):\n    def __init__(self): self.buffers = [T()]\nscratch = Scratch()",
        "train.scratch.buffers[*]",
    ),
    "attribute of a tensor": ("carrier = torch.ones(1); carrier.extra = T()", "train.carrier.extra"),
    "attribute of a tensor in a graph": (
        "carried = torch.ones(9, requires_grad=True); carried.extra = T(); scaled = carried * 2",
        "train.carried.extra",
    ),
    "leaf's gradient": (
        "leaf = torch.ones(100, requires_grad=True); leaf.sum().backward(); made(leaf.grad)",
        "train.leaf.grad",
    ),
    "retained gradient": (
        "kept_out = torch.ones(100, requires_grad=True) * 2; kept_out.retain_grad()\n"
        "kept_out.sum().backward(); made(kept_out.grad)",
        "train.kept_out.grad",
    ),
    "sparse values": (
        "sparse = torch.eye(9).to_sparse(); made(sparse._values()); made(sparse._indices())",
        "train.sparse",
    ),
    "compressed rows": ("csr = torch.eye(9).to_sparse_csr(); made(csr.values())", "train.csr"),
    "module": (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 9)) for _ in range(3))\n"
        "model = Net()\nfor layer in model.layers: made(layer[0].weight)\ndel layer",
        "train.model.layers[*][*].weight",
    ),
    "named module": ("model.mlp = nn.Linear(9, 9); made(model.mlp.weight)", "train.model.mlp.weight"),
    "module dict": (
        "model.heads = nn.ModuleDict({'lm': nn.Linear(9, 9)}); made(model.heads['lm'].bias)",
        "train.model.heads.lm.bias",
    ),
    "attribute of a module": ("model.stash = [T()]", "train.model.stash[*]"),
    "closure of a hook": (
        "def install():\n    captured = {'n1': []}\n"
        "    def grab(m, i, o): captured['n1'].append(made(o.detach().clone()))\n"
        "    model.mlp.register_forward_hook(grab)\ninstall()\nfor _ in range(2): model.mlp(torch.ones(9))",
        "train.model.mlp._forward_hooks[*] -> closure of hook grab: captured['n1'][*]",
    ),
    "closure of a tensor's hook": (
        "hooked = torch.ones(9, requires_grad=True)\n"
        "def watch(t):\n    mask = T()\n    t.register_hook(lambda g: g * mask.sum())\nwatch(hooked)",
        "train.hooked._hooks[*] -> closure of hook <lambda>: mask",
    ),
    "future": (
        "future = torch.futures.Future(); future.set_result([T()])",
        "train.future -> Future.value()[*]",
    ),
    "simple namespace": ("space = types.SimpleNamespace(t=T())", "train.space.t"),
    "finalizer": ("weakref.finalize(key, print, T())", "weakref.finalize._registry[*].args[0]"),
    "instance attribute": ("thing = Thing(T())", "train.thing.t"),
    "weak reference only": ("weak = weakref.ref(T())", None),
}
