"""Entries that the program registers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, get_args

from memtriage.model.holders import KINDS, Condition, HolderKind
from memtriage.observe.holders.entry import Holder, Place
from memtriage.observe.holders.finders import length
from memtriage.observe.holders.scene import Scene

_registered: Final[dict[str, Holder]] = {}


class Registration:
    """A registered entry; `remove()` takes it out again."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder

    def remove(self) -> None:
        """Take the entry out; nothing happens if another took its name meanwhile, or it is out already."""
        if _registered.get(self.holder.name) is self.holder:
            del _registered[self.holder.name]


def register_holder(
    name: str,
    values: Callable[[], Any],
    clear: Callable[[], object] | None = None,
    *,
    holds: str = "",
    refills: str = "",
    forbidden: Iterable[Condition] = ("graphs", "backward"),
    kind: HolderKind = "registered",
    automatic: bool = True,
) -> Registration:
    """Register a cache of the program itself, as `memtriage.register_holder`. See there."""
    conditions = tuple(forbidden)
    unknown = [each for each in conditions if each not in get_args(Condition)]
    if unknown:
        raise ValueError(f"forbidden takes {', '.join(get_args(Condition))}, not {unknown[0]!r}")
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    if not name or name in KINDS:
        raise ValueError(f"a holder cannot be called {name!r}: that is a kind, or nothing")

    def find(scene: Scene) -> Sequence[Place]:
        del scene
        found = values()
        return () if found is None else (Place(name, lambda: (values(),), clear, entries=length(found)),)

    holder = Holder(
        name=name,
        library="registered by the program",
        package="",
        kind=kind,
        symbol=getattr(values, "__qualname__", name),
        holds=holds or "what the program registered",
        find=find,
        clears="" if clear is None else getattr(clear, "__qualname__", "its clear function"),
        refills=refills,
        policy="never" if clear is None else "automatic" if automatic else "on request",
        why="it was registered without an action" if clear is None else "it was registered so",
        forbidden=conditions,
    )
    _registered[name] = holder
    return Registration(holder)


def registered() -> tuple[Holder, ...]:
    """The registered entries, in order of registration."""
    return tuple(_registered.values())
