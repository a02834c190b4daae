"""What to say of each way in which memory is kept: why it grows, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class MechanismText:
    """A mechanism in one sentence and its fix; words in braces are still to be filled in.

    Without a fix, it is what the best cut says (`playbook/cuts.py`).
    """

    mechanism: str
    fix: str = ""

    def filled(self, words: Mapping[str, str]) -> MechanismText:
        """The same with these words. Raises `KeyError` where one is missing."""
        return MechanismText(self.mechanism.format_map(words), self.fix.format_map(words))


MECHANISMS: Final[Mapping[str, MechanismText]] = {
    "collect": MechanismText(
        "objects that refer to each other in a cycle ({members}) keep their tensors until the cyclic "
        "collector runs, and it is switched off",
    ),
    "pack": MechanismText(
        "the pack hook{hook} of saved_tensors_hooks returns the very tensor that it is given. Where a node "
        "saves its own output, output -> grad_fn -> packed output is a cycle through C++, which no "
        "collection frees",
    ),
    "shorten": MechanismText(
        "{subject} is replaced by a longer one {how_often} (as {as_what}), and holds all that was ever added",
    ),
    "create_graph": MechanismText(
        "a gradient carries a graph of its own (backward with create_graph=True), which leads back to the "
        "parameter: a cycle through C++ that no collection frees",
    ),
    "context in a cycle": MechanismText(
        "a custom autograd.Function keeps one of its outputs on `{attribute}`: output -> grad_fn -> ctx -> "
        "output is a cycle through C++, which neither backward nor the cyclic collector frees",
    ),
    "context": MechanismText(
        "a custom autograd.Function keeps tensors on `{attribute}`; they live as long as its node, and "
        "{subject} keeps the node alive through grad_fn",
    ),
    "remove": MechanismText(
        "{container} gets new hooks {how_often}, and none is removed; each keeps what its function refers to",
    ),
    "hook of a node": MechanismText(
        "a hook of a grad_fn refers to an object that keeps the tensor: tensor -> grad_fn -> hook -> "
        "{hooked} -> tensor is a cycle through C++, which no collection frees",
    ),
    "cache": MechanismText(
        "{container} keeps every value (and every key, `self` among them) it has seen",
    ),
    "traceback": MechanismText(
        "kept exceptions carry their traceback, its frames, and so every local variable of these functions",
    ),
    "unfinished coroutines": MechanismText(
        "{container} keeps coroutines that have not ended, each with its local variables: they are made "
        "faster than they end",
        "await them (`await asyncio.gather(*tasks)`), bound how many wait (acquire a semaphore before the "
        "next is made, or use an `asyncio.Queue(maxsize=...)`), or cancel() those that will not end",
    ),
    "close": MechanismText(
        "generators that were not run to their end keep their local variables",
    ),
    "unfinished threads": MechanismText(
        "threads that have not ended keep what they were given: {anchor}; they are started faster than they "
        "end",
        "end each of them: cancel() a `threading.Timer` that is not needed any more, join() a thread; or let "
        "a pool of few do the work (`ThreadPoolExecutor(max_workers=...)`)",
    ),
    "only C++": MechanismText(
        "nothing in Python refers to these tensors: C++ holds them (a graph, a future, a script object, a "
        "library)",
        "clear or delete the object that was given the tensors; give it detach()ed copies",
    ),
    "only C code": MechanismText(
        "{subject}: no variable of the program leads there. C code holds it, such as a callback that was "
        "registered (atexit, a signal, an extension)",
        "unregister the callback when it is no longer needed (`atexit.unregister()`), give it a "
        "`weakref.ref()` of its object, or values instead of the tensors",
    ),
    "no_grad": MechanismText(
        "{subject} keeps tensors with a grad_fn although no backward has run: every operation is recorded, "
        "and keeps what a backward would need",
    ),
    "new parameters in the optimizer": MechanismText(
        "the optimizer gets new parameters while it trains, each with its state: {anchor}",
        "call add_param_group once for each set of parameters; when a parameter is replaced, remove it from "
        "optimizer.param_groups and its entry from the state (`optimizer.state.pop(old)`), or make a new "
        "optimizer",
    ),
    "carried state": MechanismText(
        "{subject} is carried from step to step with its history: its graph gets longer, and {of_step} stay "
        "alive",
    ),
    "model grows": MechanismText(
        "the model itself grows: {anchor} gets new entries while it trains",
    ),
    "bound": MechanismText(
        "{container} gets new {what} and is never cleared",
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
        "look at native libraries that are called in the loop (tokenizers, databases, data loaders, script "
        "modules); a profiler of native allocations such as `memray run --native` names the call. {known}",
    ),
    "native code on a GPU": MechanismText(
        "native code allocates GPU memory and keeps it: an extension in C++ or CUDA, or a library",
        "look at extensions that are called in the loop: the ledger of `memtriage report --full` names the "
        "lines that allocate what only C++ holds",
    ),
    "other anonymous memory": MechanismText(
        "a library maps memory itself and keeps it: neither malloc nor Python gives it out, as the pools of "
        "pyarrow, polars or duckdb, and what `mmap` returns",
        "look at such libraries that are called in the loop; many have a counter of their own, such as "
        "pyarrow.total_allocated_bytes()",
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
    "shared memory": MechanismText(
        "segments that processes of this job have open stay in /dev/shm, and no process maps them: tensors "
        "that were put into a queue and not taken out",
        "bound the queue (`Queue(maxsize=...)`), take out all that is put in, or end the process that sends",
    ),
    "mapped shared memory": MechanismText(
        "shared memory stays mapped: `multiprocessing.shared_memory`, `mmap` or a library maps more and more",
        "close what maps it once it has been used (`close()`, and `unlink()` by the process that made it), "
        "or use a few of these again",
    ),
    "processes": MechanismText(
        "more and more processes live at once: {why}",
        "end them when their work is done: make a loader with `persistent_workers=True` once and use it "
        "again, or drop the last reference to it; `close()` and `join()` pools, `shutdown()` executors",
    ),
    "not read": MechanismText(
        "what its objects hold is not known: {why}",
        "let the processes live longer (`persistent_workers=True`, fewer and longer epochs), or try the same "
        "work with num_workers=0: in the main process, all holders are named",
    ),
    "context after backward": MechanismText(
        "contexts of custom autograd Functions keep the quantized tensors that their backward has restored "
        "into ctx.tensor_objects, until the loss is assigned again; under checkpointing those of all layers "
        "gather during one backward",
        "set ctx.tensor_objects = None once backward has read it: TransformerEngine 2.15 does; before, "
        "memtriage.treat.te_restore.EmptyAfterRestore around the training does the same",
    ),
}
"""How a holder keeps memory. Where a kind of cut (`model.census.CutKind`) is due to how, it is the key."""
