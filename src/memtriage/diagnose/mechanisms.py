"""Why a holder keeps memory, and what to change, read off its path: the first rule that applies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from memtriage.observe.holders.catalogue import holders
from memtriage.observe.holders.entry import Holder


@dataclass(frozen=True, slots=True)
class Held:
    """What the rules look at.

    Attributes:
        holder: whole path of what grew most.
        anchor: its part before the autograd graph.
        attached: it hangs on the autograd graph.
        owner: what most of the bytes are.
        kind: type of the holding Python object, e.g. `list`.
        lengthens: it is one storage that grows at its end.
        shared: its storages lie in shared memory.
        known: the entry of the catalogue of known holders that keeps most of it.
    """

    holder: str
    anchor: str
    attached: bool
    owner: str
    kind: str | None = None
    lengthens: bool = False
    shared: bool = False
    known: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A mechanism in one sentence and its fix."""

    mechanism: str
    fix: str


Rule = tuple[Callable[[Held], bool], Callable[[Held], Explanation]]


def explain(held: Held) -> Explanation:
    """The mechanism behind a holder path, and the fix."""
    for applies, says in _RULES:
        if applies(held):
            return says(held)
    return _collection(held)


def _subject(held: Held) -> str:
    """The variable to talk about: the anchor without its frame and its last `[*]`."""
    return re.sub(r"^(thread \".*\" )?frame [^:]*: ", "", held.anchor).removesuffix("[*]")


def _context_attribute(held: Held) -> str:
    found = re.search(r"ctx\.\w+", held.holder)
    return found.group(0) if found else "ctx"


def _garbage(held: Held) -> Explanation:
    return Explanation(
        f"objects that refer to each other in a cycle ({held.anchor.removeprefix('garbage cycle of ')}) keep "
        "their tensors until the cyclic collector runs, and it is switched off",
        "break the cycle (weakref for the back reference), or switch the collector on again with "
        "gc.enable(), or call gc.collect() every some steps",
    )


def _known_holder(held: Held) -> Explanation:
    """In the catalogue's words; the program that is judged may have registered the entry itself."""
    entry = next((one for one in holders() if one.name == held.known), None)
    return _collection(held) if entry is None else explain_known(entry)


def explain_known(entry: Holder) -> Explanation:
    """What an entry of the catalogue of known holders keeps, and what clears it."""
    action = f"{entry.why}; what clears it: {entry.clears or 'nothing'}"
    if entry.policy != "never":
        action = f"memtriage.clear_caches([{entry.name!r}]) where a phase ends ({entry.clears})"
    return Explanation(
        f"{entry.library}: {entry.symbol} ({entry.name}) holds {entry.holds}",
        f"{action}; `memtriage holders` tells when that is safe and how it fills again",
    )


def _lengthening(held: Held) -> Explanation:
    return Explanation(
        f"{_subject(held)} is one tensor that is made anew, longer, at every step (as torch.cat does), and "
        "holds all that was ever added",
        "reduce the values before you keep them, move them to the host in blocks, or clear the tensor at the "
        "end of each epoch; a preallocated buffer avoids the copies",
    )


def _shared_batches(held: Held) -> Explanation:
    subject = _subject(held)
    return Explanation(
        f"{subject} keeps tensors that lie in shared memory (a DataLoader worker's batches): each kept view "
        "holds the whole segment, and a file descriptor with it",
        f"clone() what {_last_name(subject)} keeps (`item.clone()`), so that the batch's segment can go; or "
        "set torch.multiprocessing.set_sharing_strategy('file_system') where descriptors run out",
    )


def _gradient_graph(held: Held) -> Explanation:
    return Explanation(
        "a gradient carries a graph of its own (backward with create_graph=True), which leads back to the "
        "parameter: a cycle through C++ that no collection frees",
        "use torch.autograd.grad(..., create_graph=True) and detach() what you keep, or set `.grad = None` "
        "after use (optimizer.zero_grad(set_to_none=True))",
    )


def _context(held: Held) -> Explanation:
    attribute = _context_attribute(held)
    where = _subject(held)
    return Explanation(
        f"a custom autograd.Function keeps tensors on `{attribute}`; they live as long as its node, and "
        f"{where} keeps the node alive through grad_fn",
        f"detach what {where} keeps (`append(loss.detach())` or `.item()`); in the Function use "
        f"ctx.save_for_backward instead of `{attribute}`, or clear it at the end of backward",
    )


def _context_cycle(held: Held) -> Explanation:
    attribute = _context_attribute(held)
    return Explanation(
        f"a custom autograd.Function keeps one of its outputs on `{attribute}`: output -> grad_fn -> ctx -> "
        "output is a cycle through C++, which neither backward nor the cyclic collector frees",
        f"use ctx.save_for_backward for outputs, or clear `{attribute}` at the end of backward, or keep "
        "`output.detach()` there",
    )


def _hook(held: Held) -> Explanation:
    return Explanation(
        f"a hook keeps the tensors it is given: {held.anchor}",
        "detach() in the hook and keep no more than you need, clear the list after each step, and remove() "
        "the hook's handle when it is no longer needed",
    )


def _lru(held: Held) -> Explanation:
    return Explanation(
        f"{held.anchor.removesuffix('[*]')} keeps every value (and every key, `self` among them) it has seen",
        "bound it (`maxsize=`), make the key a plain number and cache on the instance instead of a method, "
        "or call cache_clear() at the end of a phase",
    )


def _traceback(held: Held) -> Explanation:
    return Explanation(
        "kept exceptions carry their traceback, its frames, and so every local variable of these functions",
        "keep `str(error)` instead of the exception, or call traceback.clear_frames(error.__traceback__) "
        "or error.with_traceback(None) before you keep it",
    )


def _generator(held: Held) -> Explanation:
    return Explanation(
        "generators that were not run to their end keep their local variables",
        "close() them, or let go of them, when you stop iterating",
    )


def _thread(held: Held) -> Explanation:
    return Explanation(
        f"a thread keeps what it was given: {held.anchor}",
        "bound the queue (`queue.Queue(maxsize=...)`), consume it as fast as it is filled, and clear what "
        "the thread has done with",
    )


def _default_argument(held: Held) -> Explanation:
    return Explanation(
        f"a mutable default argument is made once and kept for ever: {held.anchor}",
        "use `None` as the default and make the list inside the function; keep detach()ed values",
    )


def _module_grows(held: Held) -> Explanation:
    return Explanation(
        f"the model itself grows: {held.anchor} gets new entries while it trains",
        "register buffers, parameters and sub-modules once, before training, and reuse or clear them",
    )


def _optimizer_grows(held: Held) -> Explanation:
    return Explanation(
        f"the optimizer gets new parameters while it trains, each with its state: {held.anchor}",
        "call add_param_group once for each set of parameters; remove old groups from optimizer.param_groups "
        "with their entries in optimizer.state, or make a new optimizer",
    )


def _carried_state(held: Held) -> Explanation:
    subject = _subject(held)
    return Explanation(
        f"{subject} is carried from step to step with its history: its graph gets longer, and every step's "
        "saved activations stay alive",
        f"detach it where it is carried over (`{_last_name(subject)} = {_last_name(subject)}.detach()`), or "
        "add `.item()` to a running total",
    )


def _attached_collection(held: Held) -> Explanation:
    subject = _subject(held)
    return Explanation(
        f"{subject} keeps tensors that still carry a grad_fn; each keeps its whole graph and what that saved "
        "for backward",
        "append `loss.detach()` (or `loss.item()`) instead of the tensor itself, and clear "
        f"{_last_name(subject)} when it has been read",
    )


def _only_cpp(held: Held) -> Explanation:
    return Explanation(
        "nothing in Python refers to these tensors: C++ holds them (a future, a script object, a library)",
        "clear or delete the object that was given the tensors; give it detach()ed copies",
    )


def _collection(held: Held) -> Explanation:
    subject = _subject(held)
    return Explanation(
        f"{subject} gets new tensors and never lets go of old ones",
        f"clear {_last_name(subject)} when its content has been used, bound it (`deque(maxlen=...)`), or "
        "keep reduced values (`.item()`, `.detach().cpu()`) instead of the tensors",
    )


def _last_name(subject: str) -> str:
    words = re.findall(r"[A-Za-z_]\w*", subject)
    return words[-1] if words else subject


_RULES: tuple[Rule, ...] = (
    (lambda h: h.anchor.startswith("garbage cycle"), _garbage),
    (lambda h: h.known is not None and not h.attached, _known_holder),
    (lambda h: h.lengthens, _lengthening),
    (lambda h: h.shared and not h.attached, _shared_batches),
    (lambda h: ".grad -> grad_fn" in h.holder or h.anchor.endswith(".grad"), _gradient_graph),
    (lambda h: "-> ctx." in h.holder and h.anchor.startswith("C++"), _context_cycle),
    (lambda h: "-> ctx." in h.holder, _context),
    (lambda h: "closure of hook" in h.anchor or "_hooks" in h.anchor, _hook),
    (lambda h: "functools.lru_cache" in h.anchor, _lru),
    (lambda h: "__traceback__" in h.anchor, _traceback),
    (lambda h: "generator " in h.anchor, _generator),
    (lambda h: "default argument of" in h.anchor, _default_argument),
    (lambda h: h.anchor.startswith("thread "), _thread),
    (lambda h: h.owner == "optimizer state" or ".param_groups" in h.anchor, _optimizer_grows),
    (lambda h: h.owner in ("parameter", "buffer"), _module_grows),
    (lambda h: h.attached and "[*]" not in h.anchor, _carried_state),
    (lambda h: h.attached, _attached_collection),
    (lambda h: h.anchor.startswith("C++"), _only_cpp),
)
