"""Entries that the program registers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, get_args

from memtriage.catalogue.entry import Holder, Place
from memtriage.catalogue.finders import length
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import KINDS, Condition, HolderKind

_registered: Final[dict[str, Holder]] = {}


class Registration:
    """A registered entry; `remove()` takes it out again."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder

    def remove(self) -> None:
        """Take the entry out. Does nothing if it is out already, or another entry has its name now."""
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
    """Add a cache of the program to the catalogue. It is then named, measured and cleared like the others.

    Args:
        name: its name in reports; an entry registered under the same name is replaced.
        values: returns the cache (a container, an object, a tensor), which is searched for tensors, or None
            while there is none. Also called at each census: it must be quick, and must not make tensors.
        clear: empties the cache; None for a cache that is only reported.
        holds, refills: texts for reports: what it keeps, and how it fills again.
        forbidden: when it must not be cleared: `graphs` (CUDA graphs are captured), `backward` (a backward is
            pending).
        kind: the group by which `clear_caches(kinds=...)` chooses.
        automatic: False to clear it only when its kind or name is given.

    Returns:
        A handle whose `remove()` takes it out again.

    Raises:
        ValueError: `name` is empty or names a kind, or `kind` or a condition is unknown.
    """
    conditions = tuple(forbidden)
    unknown = [condition for condition in conditions if condition not in get_args(Condition)]
    if unknown:
        raise ValueError(f"forbidden takes {', '.join(get_args(Condition))}, not {unknown[0]!r}")
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    if not name or name in KINDS:
        raise ValueError(f"a holder cannot be called {name!r}: that is a kind, or nothing")

    def find(scene: Scene) -> Sequence[Place]:
        cache = values()
        return () if cache is None else (Place(name, lambda: (values(),), clear, entries=length(cache)),)

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
