"""Leak mechanisms: why a holder keeps memory, and what to change.

The first rule of `_RULES` that applies to the segments of its path decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal

from memtriage.catalogue.catalogue import holders
from memtriage.catalogue.entry import Holder
from memtriage.catalogue.growing import growing_part
from memtriage.model.paths import (
    ANY_ITEM,
    HolderPath,
    PathSegment,
    SegmentKind,
    has,
    in_words,
    last_name,
    without_last_item,
)


@dataclass(frozen=True, slots=True)
class Held:
    """What the rules look at: facts about one holder.

    Attributes:
        path: whole path of what grew most.
        anchor: its part before the autograd graph.
        attached: it hangs on the autograd graph.
        owner: what most of the bytes are.
        kind: type of the holding Python object, e.g. `list`.
        lengthens: it is one storage that grows at its end.
        shared: its storages are in shared memory.
        known: the entry of the catalogue of known holders that keeps most of it.
        gradients: the program has computed gradients.
        differentiated: its graph has nodes that differentiate a gradient.
        entries_grow: the anchor names more objects than before; None where that is unknown.
        holders_multiply: there are more containers like the last one on the anchor, and none has got longer.
        anchor_owner: what the tensor is that the anchor names.
        packs_itself: a pack hook returned the tensor that it was given, which its own node saves.
        stored_value: source of what the program stores there.
        stored_at: the line that does.
        stored_by_hook: that line is in a hook of a module.
        carried: what it stores is made of what was there before.
        classes: classes of the objects on the way to the holder.
        in_optimizer: one of these objects is an optimizer.
        collected: what it belongs to, where whole modules or optimizers are collected.
        ordinary: what grows is ordinary data, and no tensors.
        every: what it grows with, for the sentence.
    """

    path: HolderPath
    anchor: HolderPath
    attached: bool
    owner: str
    kind: str | None = None
    lengthens: bool = False
    shared: bool = False
    known: str | None = None
    gradients: bool = True
    differentiated: bool = False
    entries_grow: bool | None = None
    holders_multiply: bool = False
    anchor_owner: str | None = None
    packs_itself: bool = False
    stored_value: str | None = None
    stored_at: str | None = None
    stored_by_hook: bool = False
    carried: bool = False
    classes: tuple[str, ...] = ()
    in_optimizer: bool = False
    collected: Literal["module", "optimizer"] | None = None
    ordinary: bool = False
    every: Literal["step", "backward", "second", "run"] = "step"


@dataclass(frozen=True, slots=True)
class MechanismText:
    """A mechanism in one sentence and its fix."""

    mechanism: str
    fix: str


MechanismRule = tuple[Callable[[Held], bool], Callable[[Held], MechanismText]]


def mechanism_of(held: Held) -> MechanismText:
    """Return the mechanism behind a holder path, and the fix."""
    for applies, says in _RULES:
        if applies(held):
            return says(held)
    return _collection(held)


def _subject(held: Held) -> HolderPath:
    """Return the variable to name: the anchor without frame, and without its item in the last container."""
    path = held.anchor[1:] if held.anchor[0].kind is SegmentKind.THREAD else held.anchor
    if len(path) > 1 and path[0].kind is SegmentKind.FRAME:
        path = path[1:]
    return without_last_item(path)


def _container(held: Held) -> HolderPath:
    """Return what gets new entries: of entries that are objects with tensors, the container of these."""
    path = _subject(held)
    ends_in_items = without_last_item(held.anchor) != held.anchor and not held.holders_multiply
    if ends_in_items or held.entries_grow is False or ANY_ITEM not in path:
        return path
    place = len(path) - 1 - path[::-1].index(ANY_ITEM)
    parts = path[place:]
    own = all(part.kind in _PARTS for part in parts)
    return path[:place] if own else path


_PARTS: Final = frozenset(
    (
        SegmentKind.ATTRIBUTE,
        SegmentKind.ITEM,
        SegmentKind.GRADIENT,
        SegmentKind.PARTIAL,
        SegmentKind.CLOSURE,
        SegmentKind.VARIABLE,
    )
)
"""Kinds that lead from an object to a part of its own."""


def _how_often(held: Held) -> str:
    return {"step": "at every step", "backward": "with every backward"}.get(held.every, "all the time")


def _context_attribute(held: Held) -> str:
    return in_words((next(filter(_is_context_attribute, held.path)),))


def _is_context_attribute(segment: PathSegment) -> bool:
    return segment.kind is SegmentKind.CONTEXT and bool(segment.name)


def _garbage(held: Held) -> MechanismText:
    first, *rest = held.anchor
    members = in_words((PathSegment(SegmentKind.CLASS, first.name), *rest))
    return MechanismText(
        f"objects that refer to each other in a cycle ({members}) keep "
        "their tensors until the cyclic collector runs, and it is switched off",
        "break the cycle (weakref for the back reference), or switch the collector on again with "
        "gc.enable(), or call gc.collect() every few steps",
    )


def _known_holder(held: Held) -> MechanismText:
    """In the catalogue's words; the program that is judged may have registered the entry itself."""
    entry = next((holder for holder in holders() if holder.name == held.known), None)
    return _collection(held) if entry is None else mechanism_of_known(entry)


def mechanism_of_known(entry: Holder) -> MechanismText:
    """Say what an entry of the catalogue of known holders keeps, and what clears it."""
    action = f"{entry.why}; what clears it: {entry.clears or 'nothing'}"
    if entry.policy != "never":
        action = f"memtriage.clear_caches([{entry.name!r}]) where a phase ends ({entry.clears})"
    return MechanismText(
        f"{entry.library}: {entry.symbol} ({entry.name}) holds {entry.holds}",
        f"{action}; `memtriage holders` shows when that is safe and how it refills",
    )


def _lengthening(held: Held) -> MechanismText:
    if held.ordinary:
        subject = _subject(held)
        return MechanismText(
            f"{in_words(subject)} is replaced by a longer one {_how_often(held)} (as numpy.concatenate and "
            "pandas.concat do), and holds all that was ever added",
            "bound it (keep the last entries, `a = a[-n:]`), keep reduced values, write blocks out, or "
            "clear it at the end of each epoch; a list of blocks that is joined once avoids the copies",
        )
    return MechanismText(
        f"{in_words(_subject(held))} is one tensor that is replaced by a longer one {_how_often(held)} "
        "(as torch.cat does), and holds all that was ever added",
        "bound it (keep the last rows, `t = t[-n:]`, after each cat), reduce the values before you keep "
        "them, move them to the host in blocks, or clear it at the end of each epoch; a preallocated buffer "
        "avoids the copies",
    )


def _shared_batches(held: Held) -> MechanismText:
    subject = _subject(held)
    return MechanismText(
        f"{in_words(subject)} keeps tensors in shared memory (a DataLoader worker's batches): each "
        "kept view holds the whole segment, and a file descriptor with it",
        f"clone() what {last_name(subject)} keeps (`item.clone()`), so that the batch's segment can go; or "
        "set torch.multiprocessing.set_sharing_strategy('file_system') where descriptors run out",
    )


def _gradient_graph(held: Held) -> MechanismText:
    return MechanismText(
        "a gradient carries a graph of its own (backward with create_graph=True), which leads back to the "
        "parameter: a cycle through C++ that no collection frees",
        "use torch.autograd.grad(..., create_graph=True) and detach() what you keep, or set `.grad = None` "
        "after use (optimizer.zero_grad(set_to_none=True))",
    )


def _context(held: Held) -> MechanismText:
    attribute = _context_attribute(held)
    where = in_words(_subject(held))
    return MechanismText(
        f"a custom autograd.Function keeps tensors on `{attribute}`; they live as long as its node, and "
        f"{where} keeps the node alive through grad_fn",
        f"detach what {where} keeps (`append(loss.detach())` or `.item()`); in the Function use "
        f"ctx.save_for_backward instead of `{attribute}`, or clear it at the end of backward",
    )


def _context_cycle(held: Held) -> MechanismText:
    attribute = _context_attribute(held)
    return MechanismText(
        f"a custom autograd.Function keeps one of its outputs on `{attribute}`: output -> grad_fn -> ctx -> "
        "output is a cycle through C++, which neither backward nor the cyclic collector frees",
        f"use ctx.save_for_backward for outputs, or clear `{attribute}` at the end of backward, or keep "
        "`output.detach()` there",
    )


def _hook(held: Held) -> MechanismText:
    return MechanismText(
        f"a hook keeps the tensors it is given: {in_words(held.anchor)}",
        "detach() in the hook and keep no more than you need, clear the list after each step, and remove() "
        "the hook's handle when it is no longer needed",
    )


def _lru(held: Held) -> MechanismText:
    return MechanismText(
        f"{in_words(without_last_item(held.anchor))} keeps every value (and every key, `self` among them) it "
        "has seen",
        "bound it (`maxsize=`), make the key a plain number and cache on the instance instead of a method, "
        "or call cache_clear() at the end of a phase",
    )


def _traceback(held: Held) -> MechanismText:
    return MechanismText(
        "kept exceptions carry their traceback, its frames, and so every local variable of these functions",
        "keep `str(error)` instead of the exception, or call traceback.clear_frames(error.__traceback__) "
        "or error.with_traceback(None) before you keep it",
    )


def _coroutine(held: Held) -> MechanismText:
    container = in_words(_subject(replace(held, anchor=_outside_generator(held.anchor))))
    return MechanismText(
        f"{container} keeps coroutines that have not ended, each with its local variables: they are made "
        "faster than they end",
        "await them (`await asyncio.gather(*tasks)`), bound how many wait (acquire a semaphore before the "
        "next is made, or use an `asyncio.Queue(maxsize=...)`), or cancel() those that will not end",
    )


def _outside_generator(path: HolderPath) -> HolderPath:
    """Return the path up to the item of a container that a generator or coroutine is part of."""
    kinds = [segment.kind for segment in path]
    generator = kinds.index(SegmentKind.GENERATOR)
    items = [at for at, segment in enumerate(path[:generator]) if segment == ANY_ITEM]
    return path[: items[-1] + 1] if items else path


def _generator(held: Held) -> MechanismText:
    return MechanismText(
        "generators that were not run to their end keep their local variables",
        "close() or delete them when you stop iterating",
    )


def _thread(held: Held) -> MechanismText:
    return MechanismText(
        f"a thread keeps what it was given: {in_words(held.anchor)}",
        "bound the queue (`queue.Queue(maxsize=...)`), consume it as fast as it is filled, and clear what "
        "the thread has done with",
    )


def _threads(held: Held) -> MechanismText:
    return MechanismText(
        f"threads that have not ended keep what they were given: {in_words(held.anchor)}; they are started "
        "faster than they end",
        "end each of them: cancel() a `threading.Timer` that is not needed any more, join() a thread; or let "
        "a pool of few do the work (`ThreadPoolExecutor(max_workers=...)`)",
    )


def _default_argument(held: Held) -> MechanismText:
    return MechanismText(
        f"a mutable default argument is made once and kept for ever: {in_words(held.anchor)}",
        "use `None` as the default and make the list inside the function; keep detach()ed values",
    )


def _module_grows(held: Held) -> MechanismText:
    return MechanismText(
        f"the model itself grows: {in_words(held.anchor)} gets new entries while it trains",
        "register buffers, parameters and sub-modules once, before training, and reuse or clear them",
    )


def _collected(held: Held) -> MechanismText:
    container = held.anchor[: held.anchor.index(ANY_ITEM)]
    subject, name = in_words(_subject(replace(held, anchor=container))), last_name(container)
    if held.collected == "optimizer":
        return MechanismText(
            f"{subject} keeps optimizers that are no longer used, each with its state",
            f"make the optimizer once, or take the old one out of {name} before the next is made; "
            "what is to be used again later can be saved to disk as its state_dict()",
        )
    return MechanismText(
        f"{subject} gets new modules, each with all its parameters, and is never cleared",
        f"bound {name} (`deque(maxlen=...)`), copy the weights into one module that is kept "
        "(`load_state_dict()`), or save each state_dict() to disk",
    )


def _optimizer_grows(held: Held) -> MechanismText:
    return MechanismText(
        f"the optimizer gets new parameters while it trains, each with its state: {in_words(held.anchor)}",
        "call add_param_group once for each set of parameters; remove old groups from optimizer.param_groups "
        "with their entries in optimizer.state, or make a new optimizer",
    )


def _part_of_library(held: Held) -> MechanismText:
    part = growing_part(held.classes)
    assert part is not None
    grows = "gets longer" if held.lengthens else f"gets new {'entries' if held.ordinary else 'tensors'}"
    return MechanismText(f"{in_words(_subject(held))} {grows}: {part.why}", part.fix)


def _pack_hook(held: Held) -> MechanismText:
    hook = f" `{held.stored_value}`" if held.stored_value is not None else ""
    where = f" ({held.stored_at})" if held.stored_at is not None else ""
    return MechanismText(
        f"the pack hook{hook}{where} of saved_tensors_hooks returns the very tensor that it is given. "
        "Where a node saves its own output, output -> grad_fn -> packed output is a cycle through C++, which "
        "no collection frees",
        "return a detached copy from the pack hook: `x.detach().clone()`, or `x.detach()` where nothing "
        "changes it in place",
    )


def _never_backward(held: Held) -> MechanismText:
    subject = in_words(_subject(held))
    return MechanismText(
        f"{subject} keeps tensors with a grad_fn although no backward has run: every operation is recorded, "
        "and keeps what a backward would need",
        "run the loop under `torch.inference_mode()` or `torch.no_grad()`; nothing is recorded then",
    )


def _buffer_with_graph(held: Held) -> MechanismText:
    subject = _subject(held)
    name = last_name(subject)
    return MechanismText(
        f"{in_words(subject)} is a buffer that is updated with gradients on: its graph gets longer "
        f"{_how_often(held)}",
        f"update `{name}` inside `with torch.no_grad():`, or from a detached value (`mean.detach()`)",
    )


def _updated_parameters(held: Held) -> MechanismText:
    subject = _subject(held)
    name = last_name(subject)
    return MechanismText(
        f"{in_words(subject)} is replaced by a result computed from itself, with its history: the "
        "graph reaches back to the first update, and keeps what every update saved",
        f"detach the update: keep `new.detach()` for each tensor of {name} (`new.detach().requires_grad_()` "
        "where it is trained), or update it under `torch.no_grad()`",
    )


def _carried_state(held: Held) -> MechanismText:
    subject = _subject(held)
    name = last_name(subject)
    return MechanismText(
        f"{in_words(subject)} is carried from step to step with its history: its graph gets longer, and "
        "every step's saved activations stay alive",
        f"detach it where it is carried over (`{name} = {name}.detach()`), or "
        "add `.item()` to a running total",
    )


def _attached_collection(held: Held) -> MechanismText:
    subject = _container(held)
    value = _kept_value(held)
    number = f" (or `{value}.item()`)" if "loss" in value else ""
    return MechanismText(
        f"{in_words(subject)} keeps tensors that still carry a grad_fn; each keeps its whole graph and what "
        "that saved for backward",
        f"append `{value}.detach()`{number} instead of the tensor itself, and clear "
        f"{last_name(subject)} when it has been read",
    )


def _kept_value(held: Held) -> str:
    """Return what the program stores, as an expression that a method can be called on; `loss` of `losses`."""
    value = held.stored_value
    if value is not None and value[0] not in "([{":
        return value if re.fullmatch(r"[\w.]+([(\[].*[)\]])?", value) else f"({value})"
    key = held.anchor[-1]
    if key.kind is SegmentKind.ITEM and key.name[1:-1].isidentifier():
        return key.name[1:-1]
    variables = [
        segment.name
        for segment in held.anchor
        if segment.kind in (SegmentKind.VARIABLE, SegmentKind.ATTRIBUTE)
    ]
    plural = variables[-1] if variables else "values"
    if "loss" in plural:
        return "loss"
    return plural[:-1] if plural.endswith("s") and len(plural) > 2 else "value"


def _only_cpp(held: Held) -> MechanismText:
    return MechanismText(
        "nothing in Python refers to these tensors: C++ holds them (a graph, a future, a script object, a "
        "library)",
        "clear or delete the object that was given the tensors; give it detach()ed copies",
    )


def _only_unseen(held: Held) -> MechanismText:
    return MechanismText(
        f"{in_words(_subject(held))}: no variable of the program leads there. C code holds it, such as a "
        "callback that was registered (atexit, a signal, an extension)",
        "unregister the callback when it is no longer needed, or give it values instead of the tensors",
    )


def _collection(held: Held) -> MechanismText:
    subject = _container(held)
    return MechanismText(
        f"{in_words(subject)} gets new tensors and is never cleared",
        f"clear {last_name(subject)} when its content has been used, bound it (`deque(maxlen=...)`), or "
        "keep reduced values (`.item()`, `.detach().cpu()`) instead of the tensors",
    )


def _data(held: Held) -> MechanismText:
    kind = f" ({held.kind})" if held.kind else ""
    return MechanismText(
        f"{in_words(_subject(held))}{kind} gets new entries {_how_often(held)} and is never cleared",
        "clear it when its content has been used, keep reduced values, write entries out, or bound it "
        "(`collections.deque(maxlen=...)`)",
    )


def _carries_graph(held: Held) -> bool:
    """Whether a gradient carries a graph: on the way to what is held, or as what is held itself."""
    hops = pairwise(segment.kind for segment in held.path)
    graph = (SegmentKind.GRADIENT, SegmentKind.GRAD_FN) in hops
    return graph or (held.attached and held.anchor[-1].kind is SegmentKind.GRADIENT)


def _on_context(held: Held) -> bool:
    return any(map(_is_context_attribute, held.path))


def _generators_pile_up(held: Held) -> bool:
    """Whether suspended generators keep it, each its part: not where a container in one of them grows."""
    kinds = [segment.kind for segment in held.anchor]
    if SegmentKind.GENERATOR not in kinds:
        return False
    inside = held.anchor[kinds.index(SegmentKind.GENERATOR) :]
    of_last = inside[:-1] if inside[-1].kind is SegmentKind.ITEM else inside
    return ANY_ITEM not in (of_last if held.holders_multiply else inside)


def _threads_pile_up(held: Held) -> bool:
    """Whether threads with one name hold it, each its part: not where a container in one of them grows."""
    several = held.anchor[0].kind is SegmentKind.THREAD and "*" in held.anchor[0].name
    return several and (held.holders_multiply or ANY_ITEM not in held.anchor)


def _only_native(held: Held) -> bool:
    return held.anchor[0].kind is SegmentKind.NATIVE


def _is_unseen(held: Held) -> bool:
    """Whether C code alone holds it. What a running loop iterates over is not: its attributes have names."""
    return held.anchor[0].kind is SegmentKind.UNSEEN and not has(held.anchor[1:], SegmentKind.ATTRIBUTE)


def _is_carried(held: Held) -> bool:
    """Whether the same variables get longer graphs, and no container gets more entries."""
    if held.entries_grow is not None:
        return not held.entries_grow
    return held.carried or ANY_ITEM not in held.anchor


def _never_differentiated(held: Held) -> bool:
    return held.attached and not (held.gradients or held.differentiated)


def _holds_several(held: Held) -> bool:
    """Whether the anchor names the items of a container that has a fixed number of them."""
    return held.differentiated or held.anchor[-1].kind is SegmentKind.ITEM


def _in_hook(held: Held) -> bool:
    return held.stored_by_hook or has(held.anchor, SegmentKind.HOOKS, SegmentKind.HOOK_CLOSURE)


def _in_optimizer(held: Held) -> bool:
    parts = ("param_groups", "state") if held.in_optimizer else ("param_groups",)
    return held.owner == "optimizer state" or any(
        PathSegment(SegmentKind.ATTRIBUTE, part) in held.anchor for part in parts
    )


_RULES: tuple[MechanismRule, ...] = (
    (lambda h: has(h.anchor, SegmentKind.GARBAGE_CYCLE), _garbage),
    (lambda h: h.known is not None and not h.attached, _known_holder),
    (lambda h: h.packs_itself, _pack_hook),
    (lambda h: h.lengthens and growing_part(h.classes) is None, _lengthening),
    (lambda h: h.shared and not h.attached, _shared_batches),
    (_carries_graph, _gradient_graph),
    (lambda h: _on_context(h) and _only_native(h), _context_cycle),
    (_on_context, _context),
    (_in_hook, _hook),
    (lambda h: has(h.anchor, SegmentKind.LRU_CACHE), _lru),
    (lambda h: has(h.anchor, SegmentKind.TRACEBACK), _traceback),
    (lambda h: _generators_pile_up(h) and h.kind == "coroutine", _coroutine),
    (_generators_pile_up, _generator),
    (lambda h: has(h.anchor, SegmentKind.DEFAULT_ARGUMENT), _default_argument),
    (_threads_pile_up, _threads),
    (lambda h: has(h.anchor, SegmentKind.THREAD), _thread),
    (_only_native, _only_cpp),
    (_is_unseen, _only_unseen),
    (lambda h: h.collected is not None and not h.attached, _collected),
    (lambda h: _never_differentiated(h) and _is_carried(h), _never_backward),
    (lambda h: growing_part(h.classes) is not None, _part_of_library),
    (lambda h: h.attached and h.anchor_owner == "buffer" and _is_carried(h), _buffer_with_graph),
    (_in_optimizer, _optimizer_grows),
    (_never_differentiated, _never_backward),
    (lambda h: h.attached and _is_carried(h) and _holds_several(h), _updated_parameters),
    (lambda h: h.attached and _is_carried(h), _carried_state),
    (lambda h: h.owner in ("parameter", "buffer"), _module_grows),
    (lambda h: h.ordinary, _data),
    (lambda h: h.attached, _attached_collection),
)
"""The first that applies decides, so what is special comes before what is general. What no rule takes is a
collection that grows."""
