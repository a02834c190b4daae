"""What to say of each way in which memory is kept: why it grows, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Mechanism = Literal[
    "garbage cycle",
    "pack hook",
    "array gets longer",
    "tensor gets longer",
    "shared memory",
    "gradient with a graph",
    "context in a cycle",
    "context",
    "hook",
    "lru_cache",
    "kept exceptions",
    "unfinished coroutines",
    "unfinished generators",
    "default argument",
    "unfinished threads",
    "thread",
    "only C++",
    "only C code",
    "collected optimizers",
    "collected modules",
    "no backward",
    "buffer with a graph",
    "new parameters in the optimizer",
    "updated parameters",
    "carried state",
    "model grows",
    "ordinary data",
    "collection with graphs",
    "collection",
    "shown values of cells",
    "process groups",
    "objects of C++",
    "native code",
    "not named",
    "not listed from outside",
    "context after backward",
]
"""How a holder keeps memory. Rules of `diagnose.mechanisms` choose most of them by holder path."""


@dataclass(frozen=True, slots=True)
class MechanismText:
    """A mechanism in one sentence and its fix; words in braces are still to be filled in."""

    mechanism: str
    fix: str

    def filled(self, words: Mapping[str, str]) -> MechanismText:
        """The same with these words. Raises `KeyError` where one is missing."""
        return MechanismText(self.mechanism.format_map(words), self.fix.format_map(words))


MECHANISMS: Final[Mapping[Mechanism, MechanismText]] = {
    "garbage cycle": MechanismText(
        "objects that refer to each other in a cycle ({members}) keep their tensors until the cyclic "
        "collector runs, and it is switched off",
        "break the cycle (weakref for the back reference), or switch the collector on again with "
        "gc.enable(), or call gc.collect() every few steps",
    ),
    "pack hook": MechanismText(
        "the pack hook{hook} of saved_tensors_hooks returns the very tensor that it is given. Where a node "
        "saves its own output, output -> grad_fn -> packed output is a cycle through C++, which no "
        "collection frees",
        "return a detached copy from the pack hook: `x.detach().clone()`, or `x.detach()` where nothing "
        "changes it in place",
    ),
    "array gets longer": MechanismText(
        "{subject} is replaced by a longer one {how_often} (as numpy.concatenate and pandas.concat do), and "
        "holds all that was ever added",
        "bound it (keep the last entries, `a = a[-n:]`), keep reduced values, write blocks out, or clear it "
        "at the end of each epoch; a list of blocks that is joined once avoids the copies",
    ),
    "tensor gets longer": MechanismText(
        "{subject} is one tensor that is replaced by a longer one {how_often} (as torch.cat does), and holds "
        "all that was ever added",
        "bound it (keep the last rows, `t = t[-n:]`, after each cat), reduce the values before you keep "
        "them, move them to the host in blocks, or clear it at the end of each epoch; a preallocated buffer "
        "avoids the copies",
    ),
    "shared memory": MechanismText(
        "{subject} keeps tensors in shared memory (a DataLoader worker's batches): each kept view holds the "
        "whole segment, and a file descriptor with it",
        "clone() what {name} keeps (`item.clone()`), so that the batch's segment can go; or set "
        "torch.multiprocessing.set_sharing_strategy('file_system') where descriptors run out",
    ),
    "gradient with a graph": MechanismText(
        "a gradient carries a graph of its own (backward with create_graph=True), which leads back to the "
        "parameter: a cycle through C++ that no collection frees",
        "use torch.autograd.grad(..., create_graph=True) and detach() what you keep, or set `.grad = None` "
        "after use (optimizer.zero_grad(set_to_none=True))",
    ),
    "context in a cycle": MechanismText(
        "a custom autograd.Function keeps one of its outputs on `{attribute}`: output -> grad_fn -> ctx -> "
        "output is a cycle through C++, which neither backward nor the cyclic collector frees",
        "use ctx.save_for_backward for outputs, or clear `{attribute}` at the end of backward, or keep "
        "`output.detach()` there",
    ),
    "context": MechanismText(
        "a custom autograd.Function keeps tensors on `{attribute}`; they live as long as its node, and "
        "{subject} keeps the node alive through grad_fn",
        "detach what {subject} keeps (`append(loss.detach())` or `.item()`); in the Function use "
        "ctx.save_for_backward instead of `{attribute}`, or clear it at the end of backward",
    ),
    "hook": MechanismText(
        "a hook keeps the tensors it is given: {anchor}",
        "detach() in the hook and keep no more than you need, clear the list after each step, and remove() "
        "the hook's handle when it is no longer needed",
    ),
    "lru_cache": MechanismText(
        "{all_items} keeps every value (and every key, `self` among them) it has seen",
        "bound it (`maxsize=`), make the key a plain number and cache on the instance instead of a method, "
        "or call cache_clear() at the end of a phase",
    ),
    "kept exceptions": MechanismText(
        "kept exceptions carry their traceback, its frames, and so every local variable of these functions",
        "keep `str(error)` instead of the exception, or call traceback.clear_frames(error.__traceback__) or "
        "error.with_traceback(None) before you keep it",
    ),
    "unfinished coroutines": MechanismText(
        "{container} keeps coroutines that have not ended, each with its local variables: they are made "
        "faster than they end",
        "await them (`await asyncio.gather(*tasks)`), bound how many wait (acquire a semaphore before the "
        "next is made, or use an `asyncio.Queue(maxsize=...)`), or cancel() those that will not end",
    ),
    "unfinished generators": MechanismText(
        "generators that were not run to their end keep their local variables",
        "close() or delete them when you stop iterating",
    ),
    "default argument": MechanismText(
        "a mutable default argument is made once and kept for ever: {anchor}",
        "use `None` as the default and make the list inside the function; keep detach()ed values",
    ),
    "unfinished threads": MechanismText(
        "threads that have not ended keep what they were given: {anchor}; they are started faster than they "
        "end",
        "end each of them: cancel() a `threading.Timer` that is not needed any more, join() a thread; or let "
        "a pool of few do the work (`ThreadPoolExecutor(max_workers=...)`)",
    ),
    "thread": MechanismText(
        "a thread keeps what it was given: {anchor}",
        "bound the queue (`queue.Queue(maxsize=...)`), consume it as fast as it is filled, and clear what "
        "the thread has done with",
    ),
    "only C++": MechanismText(
        "nothing in Python refers to these tensors: C++ holds them (a graph, a future, a script object, a "
        "library)",
        "clear or delete the object that was given the tensors; give it detach()ed copies",
    ),
    "only C code": MechanismText(
        "{subject}: no variable of the program leads there. C code holds it, such as a callback that was "
        "registered (atexit, a signal, an extension)",
        "unregister the callback when it is no longer needed, or give it values instead of the tensors",
    ),
    "collected optimizers": MechanismText(
        "{container} keeps optimizers that are no longer used, each with its state",
        "make the optimizer once, or take the old one out of {container_name} before the next is made; what "
        "is to be used again later can be saved to disk as its state_dict()",
    ),
    "collected modules": MechanismText(
        "{container} gets new modules, each with all its parameters, and is never cleared",
        "bound {container_name} (`deque(maxlen=...)`), copy the weights into one module that is kept "
        "(`load_state_dict()`), or save each state_dict() to disk",
    ),
    "no backward": MechanismText(
        "{subject} keeps tensors with a grad_fn although no backward has run: every operation is recorded, "
        "and keeps what a backward would need",
        "run the loop under `torch.inference_mode()` or `torch.no_grad()`; nothing is recorded then",
    ),
    "buffer with a graph": MechanismText(
        "{subject} is a buffer that is updated with gradients on: its graph gets longer {how_often}",
        "update `{name}` inside `with torch.no_grad():`, or from a detached value (`mean.detach()`)",
    ),
    "new parameters in the optimizer": MechanismText(
        "the optimizer gets new parameters while it trains, each with its state: {anchor}",
        "call add_param_group once for each set of parameters; remove old groups from optimizer.param_groups "
        "with their entries in optimizer.state, or make a new optimizer",
    ),
    "updated parameters": MechanismText(
        "{subject} is replaced by a result computed from itself, with its history: the graph reaches back to "
        "the first update, and keeps what every update saved",
        "detach the update: keep `new.detach()` for each tensor of {name} (`new.detach().requires_grad_()` "
        "where it is trained), or update it under `torch.no_grad()`",
    ),
    "carried state": MechanismText(
        "{subject} is carried from step to step with its history: its graph gets longer, and every step's "
        "saved activations stay alive",
        "detach it where it is carried over (`{name} = {name}.detach()`), or add `.item()` to a running "
        "total",
    ),
    "model grows": MechanismText(
        "the model itself grows: {anchor} gets new entries while it trains",
        "register buffers, parameters and sub-modules once, before training, and reuse or clear them",
    ),
    "ordinary data": MechanismText(
        "{subject}{kind} gets new entries {how_often} and is never cleared",
        "clear it when its content has been used, keep reduced values, write entries out, or bound it "
        "(`collections.deque(maxlen=...)`)",
    ),
    "collection with graphs": MechanismText(
        "{container} keeps tensors that still carry a grad_fn; each keeps its whole graph and what that "
        "saved for backward",
        "append {detached} instead of the tensor itself, and clear {container_name} when it has been read",
    ),
    "collection": MechanismText(
        "{container} gets new tensors and is never cleared",
        "clear {container_name} when its content has been used, bound it (`deque(maxlen=...)`), or keep "
        "reduced values (`.item()`, `.detach().cpu()`) instead of the tensors",
    ),
    "shown values of cells": MechanismText(
        "the cell's last line shows a value, and IPython keeps every value that it has shown in Out",
        "end the cell's last line with `;`, or show a number (`loss.item()`); %memtriage_free --out clears "
        "what is kept",
    ),
    "process groups": MechanismText(
        "new process groups are made in the loop; torch.distributed keeps each until it is destroyed",
        "make a group once and reuse it, or call torch.distributed.destroy_process_group(group) for each",
    ),
    "objects of C++": MechanismText(
        "{subject} gets new objects of type {type}, which hold memory of a C++ library",
        "clear it when its content has been used, or close what the objects stand for",
    ),
    "native code": MechanismText(
        "native code allocates memory and keeps it: a library, or an object that hides its size "
        "(io.StringIO)",
        "look at native libraries that are called in the loop (tokenizers, data loaders, script modules); a "
        "profiler of native allocations such as `memray run --native` names the call. Where shapes vary: "
        "{shapes}",
    ),
    "not named": MechanismText(
        "no census was taken while memory grew, or only one, so nothing is known of what keeps it",
        "if the program's loop makes no optimizer step, call memtriage.step() once per iteration: then "
        "censuses are taken while it runs",
    ),
    "not listed from outside": MechanismText(
        "no tensor that was listed from outside explains it: only libraries hold it, or it is ordinary data "
        "or memory of native code",
        "watch for a longer time, so that libraries are searched more often, or start the program with "
        "`memtriage run`, which also lists ordinary data",
    ),
    "context after backward": MechanismText(
        "contexts of custom autograd Functions keep the quantized tensors that their backward has restored "
        "into ctx.tensor_objects, until the loss is assigned again; under checkpointing those of all layers "
        "gather during one backward",
        "set ctx.tensor_objects = None once backward has read it: TransformerEngine 2.15 does; before, "
        "memtriage.treat.te_restore.EmptyAfterRestore around the training does the same",
    ),
}
