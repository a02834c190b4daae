"""Entries that the program registers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, get_args

from memtriage.catalogue.entry import Holder
from memtriage.catalogue.finders import length
from memtriage.catalogue.place import Place
from memtriage.catalogue.scene import Scene
from memtriage.model.holders import KINDS, Condition, HolderKind

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
    """Put a cache of the program itself into the catalogue, to be named, measured and cleared like others.

    Args:
        name: how it is to be called; an entry registered under the same name is replaced.
        values: gives the cache, in which tensors are looked for (containers, objects, tensors), or None while
            there is none. Called at each census too: it must be quick, and must not make tensors.
        clear: empties it; None for a cache that is only told of.
        holds, refills: words for reports: what it keeps, and how it fills again.
        forbidden: when it must not be cleared: `graphs` (CUDA graphs captured), `backward` (one is pending).
        kind: the group by which `clear_caches(kinds=...)` chooses.
        automatic: False to have it cleared only when its kind or name is asked for.

    Returns:
        A handle whose `remove()` takes it out again.

    Raises:
        ValueError: the name is a kind's or empty, or a condition or the kind is unknown.
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
        del scene
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
