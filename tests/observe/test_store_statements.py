"""Which statements of a source file store under a name, and what they store."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from memtriage.model.paths import PathSegment, SegmentKind
from memtriage.observe.store_statements import StoreTarget, called, short_source, stores_into
from support.paths import attribute, item

SEEN = StoreTarget(attribute("seen")[0], None, None, shared=False, module=False)
NUMBERED = StoreTarget(attribute("seen_*")[0], None, None, shared=False, module=False)
INSIDE = StoreTarget(attribute("seen")[0], None, None, shared=False, module=False, inside=True)
KEY = StoreTarget(item("'act'"), None, None, shared=False, module=False)
OF_MODULE = StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, None, shared=False, module=True)
OF_MAIN = StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, "main", shared=False, module=False)
CLOSED = StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, "grab", shared=True, module=False)
OWN = StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, "grab", shared=False, module=False)
CONTEXT = StoreTarget(PathSegment(SegmentKind.CONTEXT_VARIABLE, "h"), None, None, shared=False, module=True)


def stores(folder: Path, source: str, target: StoreTarget) -> list[str]:
    """What stores into a target, a line for each, such as `2 adds x`."""
    file = folder / "source.py"
    file.write_text(source)
    found = []
    for rank, store in stores_into(str(file), target):
        assert store.filename == str(file)
        words = [str(store.line), ("adds", "replaces")[rank], str(store.value)]
        words += ["of itself"] * store.itself + ["in a constructor"] * store.constructs
        found.append(" ".join(words))
    return found


# (the target, a statement, how it stores `x` if it does)
STATEMENTS: list[tuple[StoreTarget, str, str]] = [
    *((SEEN, f"self.seen.{f}(x)", "adds x") for f in ("append", "appendleft", "extend", "extendleft")),
    *((SEEN, f"self.seen.{f}(x)", "adds x") for f in ("add", "update", "put", "put_nowait")),
    *((SEEN, f"heapq.{f}(self.seen, x)", "adds x") for f in ("heappush", "insort_left", "insort_right")),
    (SEEN, "insort(self.seen[k], x)", "adds x"),
    (SEEN, "insort(self.seen)", ""),
    (SEEN, "insort(other, x)", ""),
    (SEEN, "self.seen.insert(0, x)", "adds x"),
    (SEEN, "self.seen.setdefault(k, x)", "adds x"),
    (SEEN, "self.seen.setdefault(k, [])", ""),
    (SEEN, "self.seen.update()", ""),
    (SEEN, "self.seen.remove(x)", ""),
    (SEEN, "self.other.append(x)", ""),
    (SEEN, "seen.append(x)", ""),
    (SEEN, "seen = x", ""),
    (SEEN, "seen[k] = x", ""),
    (SEEN, "self.seen[k].append(x)", "adds x"),
    (SEEN, "self.seen[k][0].append(x)", "adds x"),
    (SEEN, "self.seen.get(k).append(x)", "adds x"),
    (SEEN, "self.seen.setdefault(k, []).append(x)", "adds x"),
    (SEEN, "self.seen.pop(k).append(x)", ""),
    (SEEN, "get(k).append(x)", ""),
    (SEEN, "self.seen.mul_(x)", "adds None"),
    (SEEN, "self.seen.__init__(x)", ""),
    (SEEN, "self.seen.mul(x)", ""),
    (SEEN, "self.other.mul_(x)", ""),
    (SEEN, "mul_(self.seen, x)", ""),
    (SEEN, "self.seen += x", "adds x"),
    (SEEN, "self.seen[k] += x", "adds x"),
    (SEEN, "self.other += x", ""),
    (SEEN, "self.seen[k] = x", "adds x"),
    (SEEN, "self.other[k] = x", ""),
    (SEEN, "self.seen = x", "replaces x"),
    (SEEN, "self.seen: list = x", "replaces x"),
    (SEEN, "self.seen: list", ""),
    (SEEN, "self.other, self.seen = x", "replaces x"),
    (SEEN, "self.other = self.seen = x", "replaces x"),
    (SEEN, "[self.other, (self.one, *self.seen)] = x", "replaces x"),
    (SEEN, "self.seen = self.seen + x", "adds self.seen + x of itself"),
    (SEEN, "self.seen = self.seen[-9:]", ""),
    (SEEN, "self.seen = self.other[-9:]", "replaces self.other[-9:]"),
    *((SEEN, f"self.seen = {e}", "") for e in ("[]", "()", "{}", "None", "0", "{'a': [], 'b': None}")),
    *((SEEN, f"self.seen = {e}", "") for e in ("list()", "dict()", "set()", "tuple()", "deque([], 9)")),
    *((SEEN, f"self.seen = {e}()", "") for e in ("Counter", "queue.Queue", "OrderedDict")),
    (SEEN, "self.seen = collections.defaultdict(lambda: 0)", ""),
    (SEEN, "self.seen = defaultdict(list)", ""),
    *((SEEN, f"self.seen = {v}", f"replaces {v}") for v in ("[x]", "(x,)", "{x}", "{'a': [], 'b': x}")),
    *((SEEN, f"self.seen = {v}", f"replaces {v}") for v in ("list([x])", "deque([], f(x))", "made()")),
    (SEEN, "setattr(self, 'seen', x)", "adds x"),
    (SEEN, "register_parametrization(self, 'seen', x)", "adds x"),
    *((SEEN, f"self.{f}('seen', x)", "replaces x") for f in ("register_buffer", "register_parameter")),
    *((SEEN, f"self.{f}('seen', x)", "replaces x") for f in ("add_module", "register_module")),
    (SEEN, "self.register_buffer(f'seen', x)", "replaces x"),
    (SEEN, "self.register_buffer('other', x)", ""),
    (SEEN, "self.register_buffer(seen, x)", ""),
    (SEEN, "self.register_buffer('seen')", ""),
    (SEEN, "self.register_buffer(one, two, 'seen')", ""),
    (SEEN, "self.other('seen', x)", ""),
    (NUMBERED, "self.register_buffer(f'seen_{i}', x)", "adds x"),
    (NUMBERED, "self.register_buffer(f'seen_1{i}0', x)", "adds x"),
    (NUMBERED, "self.register_buffer(f'other_{i}', x)", ""),
    (NUMBERED, "self.register_buffer('seen_1', x)", ""),
    (INSIDE, "self.seen.append(x)", "adds x"),
    (INSIDE, "self.seen[k] = x", "adds x"),
    (INSIDE, "self.seen = x", ""),
    (INSIDE, "self.seen += x", ""),
    (INSIDE, "self.seen.mul_(x)", ""),
    (KEY, "episode['act'] = x", "replaces x"),
    (KEY, "episode['act'].append(x)", "adds x"),
    (KEY, "episode['obs'] = x", ""),
    (KEY, "episode[act] = x", ""),
    (KEY, "episode.act = x", ""),
    (OF_MODULE, "h = x", "replaces x"),
    (OF_MODULE, "h.append(x)", "adds x"),
    (OF_MODULE, "other = x", ""),
    (OF_MODULE, "self.h = x", ""),
    (OF_MODULE, "setattr(self, 'h', x)", ""),
    (CONTEXT, "h = x", "replaces x"),
    (OF_MAIN, "h = x", ""),
]  # fmt: skip


@pytest.mark.parametrize(("target", "statement", "stored"), STATEMENTS, ids=[each[1] for each in STATEMENTS])
def test_a_statement_stores_or_does_not(
    tmp_path: Path, target: StoreTarget, statement: str, stored: str
) -> None:
    assert stores(tmp_path, f"import torch\n{statement}\n", target) == ([f"2 {stored}"] if stored else [])


# (the target, a source, each statement in it that stores)
SOURCES: dict[str, tuple[StoreTarget, str, list[str]]] = {
    "all of a class": (
        SEEN,
        "class A:\n    def __init__(self, x):\n        self.seen = x\n        self.seen.append(y)\n"
        "    def __new__(cls):\n        made.seen = x\n    def __post_init__(self):\n        self.seen = y\n"
        "    def step(self, x):\n        self.seen.append(x)",
        ["3 replaces x in a constructor", "4 adds y in a constructor", "6 replaces x in a constructor",
         "8 replaces y in a constructor", "10 adds x"],
    ),
    "another name of an attribute": (
        SEEN,
        "def f(self):\n    store = self.seen\n    store.append(x)\n    store[k] = y\n    store = z\n"
        "def g(self):\n    store.append(x)",
        ["3 adds x", "4 adds y"],
    ),
    "another name of an entry": (
        SEEN,
        "def f(self):\n    of_key = self.seen.setdefault(k, [])\n    of_key.append(x)\n"
        "    lost = self.seen.pop(k)\n    lost.append(x)\n    other = self.other.setdefault(k, [])\n"
        "    other.append(x)",
        ["3 adds x"],
    ),
    "another name at the top": (SEEN, "store = model.seen\nstore.append(x)", ["2 adds x"]),
    "a function that returns an attribute": (
        SEEN,
        "def get():\n    return state.seen\ndef part():\n    return state.seen[0]\n"
        "def either(k):\n    if k:\n        return state.seen\n    return other\ndef none():\n    pass\n"
        "get().append(x)\npart().append(x)\neither(1).append(x)\nnone().append(x)\nget()[k] = y",
        ["11 adds x", "15 adds y"],
    ),
    "carried by way of variables of a function": (
        SEEN,
        "def f(self, x):\n    old = self.seen\n    (new, _), rest = step(old, x)\n    self.seen = new\n"
        "def g(self, x):\n    new = step(x)\n    x = new\n    self.seen = new\n"
        "def other(self):\n    self.seen = old",
        ["4 adds new of itself", "8 replaces new", "10 replaces old"],
    ),
    "a variable is not followed": (
        OF_MODULE,
        "loss = h\ny = step(loss)\nh = y\nh = step(h, x)",
        ["3 replaces y", "4 adds step(h, x) of itself"],
    ),
    "a value of its own in each iteration": (
        OF_MODULE,
        "for x in xs:\n    h = start(x)\n    h = step(h)\nfor x in xs:\n    h = step(h)\n    h = start(x)\n"
        "for h in xs:\n    h = step(h)\nfor k, h in xs:\n    h = step(h)\nwhile h:\n    h = step(h)\n"
        "while True:\n    if x:\n        one, h = start(x)\n    h = step(h)\nh = start(x)\nh = step(h)",
        ["2 replaces start(x)", "3 replaces step(h)", "5 adds step(h) of itself", "6 replaces start(x)",
         "8 replaces step(h)", "10 replaces step(h)", "12 adds step(h) of itself", "15 replaces start(x)",
         "16 replaces step(h)", "17 replaces start(x)", "18 adds step(h) of itself"],
    ),
    "the loop nearest to a statement": (
        OF_MODULE,
        "for epoch in epochs:\n    h = start()\n    for x in xs:\n        h = step(h)\n    h = step(h)",
        ["2 replaces start()", "4 adds step(h) of itself", "5 replaces step(h)"],
    ),
    "an assignment made of itself begins nothing new": (
        OF_MODULE,
        "for x in xs:\n    h = first(h)\n    h = second(h)",
        ["2 adds first(h) of itself", "3 adds second(h) of itself"],
    ),
    "a variable of a module in its functions": (
        OF_MODULE,
        "h = []\ndef f():\n    h.append(x)\ndef g():\n    global h\n    h = x\ndef own():\n    h = y\n"
        "def inside():\n    def inner():\n        h.append(z)\n    return inner\n"
        "def between(h):\n    return lambda: h.append(y)",
        ["3 adds x", "6 replaces x", "11 adds z"],
    ),
    "parameters of every kind": (
        OF_MODULE,
        "def a(h, /): h.append(x)\ndef b(h): h.append(x)\ndef c(*, h): h.append(x)\ndef d(*h): h.append(x)\n"
        "def e(**h): h.append(x)\nf = lambda h: h.append(x)\ng = lambda k: h.append(x)\n"
        "async def i(h): h.append(x)\nasync def j(): h.append(x)\nclass K:\n    h.append(x)",
        ["7 adds x", "9 adds x", "11 adds x"],
    ),
    "a variable of a function": (
        OF_MAIN,
        "h = y\ndef main():\n    h = x\n    def inner():\n        h.append(x)\n"
        "    def own(h):\n        h.append(y)\n    def hides():\n        h = y\n"
        "    def nonlocal_one():\n        nonlocal h\n        h = x\ndef other():\n    h = y",
        ["3 replaces x", "5 adds x", "12 replaces x"],
    ),
    "a variable that several functions share": (
        CLOSED,
        "def outer():\n    h = x\n    def put():\n        h.append(x)\n    def grab():\n        return h\n"
        "    def own():\n        h = y\ndef elsewhere():\n    h = y",
        ["2 replaces x", "4 adds x"],
    ),
    "a variable that one function alone uses": (
        OWN,
        "def outer():\n    h = y\n    def grab():\n        h.append(x)",
        ["4 adds x"],
    ),
    "a variable whose function is not known": (
        StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, None, shared=True, module=False),
        "h = y\ndef main():\n    h = x",
        [],
    ),
    "a variable of a lambda": (
        StoreTarget(PathSegment(SegmentKind.VARIABLE, "h"), None, "<lambda>", shared=True, module=False),
        "def outer():\n    h = x\n    return lambda: h\ndef other():\n    h = y",
        ["2 replaces x"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES)
def test_statements_of_a_source(tmp_path: Path, case: str) -> None:
    target, source, found = SOURCES[case]
    assert stores(tmp_path, f"{source}\n", target) == found


@pytest.mark.parametrize("source", [None, "def broken(:\n    h.append(x)"])
def test_a_file_that_cannot_be_parsed_has_no_statements(tmp_path: Path, source: str | None) -> None:
    file = tmp_path / "source.py"
    if source is not None:
        file.write_text(source)
    assert list(stores_into(str(file), OF_MODULE)) == []


def expression(source: str) -> Any:
    return ast.parse(source, mode="eval").body


def test_the_source_of_a_value_is_shown_up_to_sixty_characters() -> None:
    assert short_source(None) is None
    assert short_source(expression("x  +  y")) == "x + y"
    assert short_source(expression("x" * 60)) == "x" * 60
    assert short_source(expression("x" * 61)) is None


@pytest.mark.parametrize(
    ("source", "name"), [("f", "f"), ("a.b.f", "f"), ("a[0].f", "f"), ("a[0]", ""), ("f()", "")]
)
def test_the_name_of_what_is_called(source: str, name: str) -> None:
    assert called(expression(source)) == name
