"""The line that stores into a holder is found in the source, and only where it is certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtriage.model.paths import ANY_ITEM, HolderPath, PathSegment, SegmentKind
from memtriage.observe.store_statements import Store, parsed
from memtriage.observe.stores import forget_sources, making_line, pack_hook, storing_line
from support.paths import attribute, item, items_of, local, named, of_module

SELF = local("main", "me")
CLOSURE = (
    PathSegment(SegmentKind.HOOK_CLOSURE, "install.<locals>.grab"),
    PathSegment(SegmentKind.VARIABLE, "kept"),
)
DEFAULT = (PathSegment(SegmentKind.DEFAULT_ARGUMENT, "remember"), PathSegment(SegmentKind.VARIABLE, "store"))

FAILED = PathSegment(SegmentKind.TRACEBACK, "__traceback__")


FOUND: dict[str, tuple[str, HolderPath, str | None]] = {
    "attribute": (
        "class A:\n    def __init__(self):\n        self.seen = []\n    def f(self, x):\n"
        "        self.seen.append(x.sum())  # here", (*SELF, *attribute("seen"), ANY_ITEM), "x.sum()"),
    "cut after it was lengthened": (
        "class Q:\n    def add(self, keys):\n        self.queue = torch.cat([keys, self.queue])  # here\n"
        "        if len(self.queue) > 9:\n            self.queue = self.queue[:9]",
        (*SELF, *attribute("queue")), "torch.cat([keys, self.queue])"),
    "exception": (
        "def forward(x):\n    h = layer(x)\n    raise Bad\ndef main():\n    skipped = []\n"
        "    try: forward(x)\n    except Bad as error: skipped.append((step, error))  # here",
        (*items_of("main", "skipped"), item("1"), FAILED, *local("forward", "h")), "(step, error)"),
    "key of a dict": (
        "episode = {'obs': [], 'act': []}\nepisode['obs'].append(o)\nepisode['act'].append(a)  # here",
        (*SELF, *attribute("episodes"), ANY_ITEM, item("'act'"), ANY_ITEM), "a"),
    "carried": (
        "h = torch.zeros(3)\nfor x in xs:\n    y, h = net(x, h)  # here",
        of_module("train", "h"), "net(x, h)"),
    "a key that is not in the source": (
        "params = dict(model.named_parameters())\nfor x in xs:\n    params = step(params, x)  # here",
        (*of_module("train", "params"), item("'0.bias'")), "step(params, x)"),
    "in place": (
        "class N:\n    def __init__(self):\n        self.register_buffer('mean', torch.zeros(3))\n"
        "    def forward(self, x):\n        self.mean.mul_(0.9).add_(x.mean())  # here",
        (*SELF, *attribute("mean")), None),
    "a variable of a notebook": (
        "losses = []\nlosses.append(loss)  # here", (*named("losses"), ANY_ITEM), "loss"),
    "an attribute of one": (
        "class A: pass\ndef f(a, x):\n    a.seen = a.seen + [x]  # here",
        (*named("a"), *attribute("seen"), ANY_ITEM), "a.seen + [x]"),
    "closure of a hook": (
        "def install(model):\n    kept = []\n    def grab(m, args, out):\n        kept.append(out)  # here",
        (*SELF, *CLOSURE, ANY_ITEM), "out"),
    "closure that another function around which it is made fills": (
        "def other():\n    kept = []\n    def put(x): kept.append(1 + x)\n"
        "def watch():\n    kept = {}\n    def hook_for(name):\n        def hook(m, args, out):\n"
        "            kept[name].append(out)  # here\n        return hook\n"
        "    def grab(): return kept",
        (*SELF, *CLOSURE, item("'act*'"), ANY_ITEM), "out"),
    "default argument": (
        "def remember(x, store=[]):\n    store.append(x)  # here", (*DEFAULT, ANY_ITEM), "x"),
    "cached function": (
        "@lru_cache(None)\ndef mask(n):  # here\n    return n",
        (PathSegment(SegmentKind.LRU_CACHE, "A.mask"), ANY_ITEM), None),
    "what an entry is made of": (
        "class League:\n    def __init__(self): self.players = []\n    def add(self, student):\n"
        "        self.players.append(copy.deepcopy(student))  # here",
        (*SELF, *attribute("players"), ANY_ITEM, ANY_ITEM, *attribute("weight")), None),
    "an attribute of entries": (
        "class Episode:\n    def __init__(self, x):\n        self.obs = x.sum()\n"
        "class Buffer:\n    def add(self, x): self.episodes.append(Episode(x))  # here",
        (*SELF, *attribute("episodes"), ANY_ITEM, *attribute("obs")), "x.sum()"),
    "an attribute of entries that a library keeps": (
        "class Episode:\n    def __init__(self, x):\n        self.obs = x  # here\n"
        "def add(x): library.keep(Episode(x))", (*SELF, *attribute("all"), ANY_ITEM, *attribute("obs")), "x"),
    "an attribute of entries that changes later": (
        "class Layer:\n    def __init__(self):\n        self.seen = zeros()\n    def forward(self, x):\n"
        "        self.seen = cat([self.seen, x])  # here\ndef build(n): self.layers.append(Layer())",
        (*SELF, *attribute("layers"), ANY_ITEM, *attribute("seen")), "cat([self.seen, x])"),
    "parametrization": (
        "def prune(layer):\n    parametrize.register_parametrization(layer, 'weight', Mask(m))  # here\n"
        "class Mask:\n    def __init__(self, mask):\n        self.register_buffer('mask', mask)",
        (*SELF, *attribute("weight"), ANY_ITEM, *attribute("mask")), "mask"),
    "lists of entries": (
        "class Game:\n    def __init__(self): self.rows = Rows()\n"
        "games = []\ndef play(): games.append(Game())  # here",
        (*of_module("train", "games"), ANY_ITEM, *attribute("rows"), *attribute("values"), ANY_ITEM), None),
    "inside a container of a library": (
        "cache = WeakKeyDictionary()\ndef f(k, v):\n    cache[k] = v  # here",
        (*of_module("train", "cache"), *attribute("data"), ANY_ITEM), None),
    "inside a queue": (
        "class W:\n    def __init__(self): self.jobs = SimpleQueue()\n    def add(self, x):\n"
        "        self.jobs.put(x)  # here",
        (*SELF, *attribute("jobs"), *attribute("<list>"), ANY_ITEM), None),
    "context variable": (
        "trace = ContextVar('trace')\ntrace.set([])\ndef span(x):\n    trace.get().append(x)  # here",
        (PathSegment(SegmentKind.CONTEXT_VARIABLE, "trace"), ANY_ITEM), "x"),
    "another function's variable of the name": (
        "def other():\n    losses = []\n    losses.append(1 + x)\ndef main():\n    losses.append(y)  # here",
        items_of("main", "losses"), "y"),
}  # fmt: skip
NOT_CERTAIN: dict[str, tuple[str, HolderPath]] = {
    "two lines": ("def main():\n    losses.append(a)\n    losses.append(b)", items_of("main", "losses")),
    "a method of what keeps the container": (
        "class A:\n    def __init__(self): self.seen = []\n    def update(self, x): keep(self.seen, x)\n"
        "def main():\n    a.update(x)",
        (*local("main", "a"), *attribute("seen"), ANY_ITEM),
    ),
    "passed on": ("def main():\n    losses = []\n    keep(losses, x)", items_of("main", "losses")),
    "a library's list in entries": (
        "class Observed:\n    def __init__(self): self.recorder = Recorder()\n"
        "model = Sequential(Observed(), Observed())",
        (*of_module("train", "model"), ANY_ITEM, *attribute("recorder"), *attribute("values"), ANY_ITEM),
    ),
    "no source": ("(", items_of("main", "losses")),
    "no name": ("x.append(y)", (PathSegment(SegmentKind.NATIVE, "Tensor"),)),
    "a name inside a closure nobody names": ("x.append(y)", (PathSegment(SegmentKind.CLOSURE, "f"),)),
}


def place(folder: Path, source: str) -> str:
    file = folder / "train.py"
    file.write_text(source)
    return str(file)


@pytest.mark.parametrize(("source", "anchor", "value"), FOUND.values(), ids=FOUND)
def test_the_line_is_found(tmp_path: Path, source: str, anchor: HolderPath, value: str | None) -> None:
    file = place(tmp_path, source)
    line = next(number for number, text in enumerate(source.splitlines(), 1) if text.endswith("# here"))
    store = storing_line(anchor, [file, file])
    assert store is not None
    assert (store.filename, store.line, store.value) == (file, line, value)


@pytest.mark.parametrize(("source", "anchor"), NOT_CERTAIN.values(), ids=NOT_CERTAIN)
def test_what_is_not_certain_is_not_told(tmp_path: Path, source: str, anchor: HolderPath) -> None:
    assert storing_line(anchor, [place(tmp_path, source)]) is None


def test_of_several_lines_the_one_that_allocates_is_told(tmp_path: Path) -> None:
    file = place(tmp_path, NOT_CERTAIN["two lines"][0])
    line = storing_line(items_of("main", "losses"), [file], "train.py:3 in main")
    assert line == Store(file, 3, "b")


def test_what_is_made_of_itself_is_known(tmp_path: Path) -> None:
    file = place(tmp_path, "params = dict(model.named_parameters())\nparams = step(params, g)")
    assert storing_line(of_module("train", "params"), [file]) == Store(
        file, 2, "step(params, g)", itself=True
    )


def test_a_pack_hook_is_found(tmp_path: Path) -> None:
    source = (
        "def f(x):\n    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):\n        g(x)"
    )
    file = place(tmp_path, source)
    assert pack_hook([file]) == Store(file, 2, "lambda x: x")


HOOKS = (
    *SELF, PathSegment(SegmentKind.ATTRIBUTE, "blocks"), ANY_ITEM,
    PathSegment(SegmentKind.HOOKS, "_forward_pre_hooks"), ANY_ITEM,
)  # fmt: skip
ONE_HOOK = """
def scales(block, scale):
    def pre_hook(module, args): return args[0] * scale
    handle = block.register_forward_pre_hook(pre_hook)
    block.register_forward_hook(print)
    block.weight.register_hook(print)
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (ONE_HOOK, 4),
        (ONE_HOOK + "    block.register_forward_pre_hook(other)", 4),
        (ONE_HOOK + "    block.register_forward_pre_hook(pre_hook, prepend=True)", None),
        (ONE_HOOK.replace("_pre_hook(", "_hook("), None),
    ],
)
def test_the_line_of_a_hook_is_its_registration(tmp_path: Path, source: str, line: int | None) -> None:
    scale = (PathSegment(SegmentKind.HOOK_CLOSURE, "scales.<locals>.pre_hook"), *of_module("", "scale")[1:])
    store = storing_line((*HOOKS, *scale), [place(tmp_path, source)])
    assert (None if store is None else store.line) == line


def test_the_line_of_a_tensors_hook_is_its_registration(tmp_path: Path) -> None:
    path = (*SELF, PathSegment(SegmentKind.HOOKS, "_hooks"), ANY_ITEM)
    store = storing_line(path, [place(tmp_path, ONE_HOOK)])
    assert store is not None and store.line == 6


def test_a_source_is_read_anew_after_it_was_forgotten(tmp_path: Path) -> None:
    file = place(tmp_path, "seen.append(x)")
    anchor = (*of_module("train", "seen"), ANY_ITEM)
    assert storing_line(anchor, [file]) == Store(file, 1, "x")
    place(tmp_path, "\nseen.append(y)")
    forget_sources()
    assert storing_line(anchor, [file]) == Store(file, 2, "y")


THREADS = (PathSegment(SegmentKind.THREAD, "Thread-*"), *local("run", "self"))
FINALIZERS = (PathSegment(SegmentKind.CLASS, "weakref.finalize"), *attribute("_registry"), ANY_ITEM)


@pytest.mark.parametrize(
    ("source", "anchor", "line"),
    [
        ("t = threading.Timer(9, f, args=(batch,))\nt.start()", THREADS, 1),
        ("from threading import Thread\nfor x in xs:\n    Thread(target=f, args=[x]).start()", THREADS, 3),
        ("Thread(target=f)\nThread(target=g)", THREADS, None),
        ("import weakref\nweakref.finalize(data, release, staging)", FINALIZERS, 2),
        ("finalize(data, release)\nfinalize(data, release)", FINALIZERS, None),
        ("Thread(target=f)", SELF, None),
    ],
)
def test_the_call_that_makes_what_a_library_keeps(
    tmp_path: Path, source: str, anchor: HolderPath, line: int | None
) -> None:
    file = tmp_path / "made.py"
    file.write_text(source)
    found = making_line(anchor, [str(file)])
    assert (None if found is None else found.line) == line


def test_a_file_without_the_name_is_not_parsed(tmp_path: Path) -> None:
    """A program may have many large files, and each is searched for each holder."""
    forget_sources()
    other, here = tmp_path / "other.py", tmp_path / "here.py"
    other.write_text("def main():\n    seen = []\n    seen.append(1)\n")
    here.write_text("def main():\n    losses = []\n    losses.append(loss)\n")
    store = storing_line(items_of("main", "losses"), [str(other), str(here)])
    assert store is not None and (store.filename, store.line) == (str(here), 3)
    assert parsed.cache_info().misses == 1
    forget_sources()
