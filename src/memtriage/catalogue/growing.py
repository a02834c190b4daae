"""Parts of libraries that grow when they are used in a loop, and how to prevent it.

They are not entries of the catalogue: nothing may clear them, because the program works with their contents.
An object belongs to one if its class, or a base class, is named here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GrowingPart:
    """One such part.

    Attributes:
        library: in words.
        classes: `module.Name` of the classes whose objects keep what grows; empty for native code.
        why: why it grows, as the end of a sentence about the holder.
        fix: what to change.
        alone: that is of one object that grows, and not of many that a program keeps.
    """

    library: str
    classes: frozenset[str]
    why: str
    fix: str
    alone: bool = False


NATIVE: Final = {
    "shapes vary": "pad batches to few shapes, or bound oneDNN's caches of compiled primitives with the "
    "environment variables ONEDNN_PRIMITIVE_CACHE_CAPACITY=N and LRU_CACHE_CAPACITY=N",
    "compressed sparse matrices are multiplied (`csr @ csr`)": "multiply them as COO matrices "
    "(`a.to_sparse_coo() @ b.to_sparse_coo()`)",
}
"""Known growth of native memory on a CPU: what the program does, and what to change.

oneDNN keeps a primitive for each new shape, up to 1,024. Torch keeps a second copy of a sparse product.
Measured in torch 2.13: one of 35,042 elements leaves 311.6 KiB with float32 and 448.5 KiB with float64,
`torch.sparse.addmm` twice that; COO products, and CSR times dense, leave nothing."""

PROFILER: Final = GrowingPart(
    "torch.profiler",
    frozenset(),
    "torch's profiler is on all the time, and keeps every event in native memory until it stops",
    "profile a few steps only: `schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)` and "
    "`prof.step()` in the loop, or leave the `with profile(...)` block after them",
)

GROWING: Final = (
    GrowingPart(
        "torchmetrics",
        frozenset({"torchmetrics.wrappers.tracker.MetricTracker"}),
        "each `increment()` of a tracker adds a copy of its metric, and all of them are kept",
        "call `increment()` once per epoch, not for each batch; keep the numbers of `compute_all()` and make "
        "a new tracker where a run has many epochs",
    ),
    GrowingPart(
        "torchmetrics",
        frozenset({"torchmetrics.metric.Metric", "torchmetrics.collections.MetricCollection"}),
        "a metric keeps what `update()` or `forward()` gives it until it is reset",
        "call the metric's `reset()` at the end of each epoch (after `compute()`), give it detach()ed "
        "tensors, and keep `compute()`'s result as a number",
    ),
    GrowingPart(
        "peft",
        frozenset({"peft.tuners.tuners_utils.BaseTunerLayer", "peft.tuners.tuners_utils.BaseTuner"}),
        "each adapter that is loaded or added under a new name stays in the model",
        "call `model.delete_adapter(name)` when an adapter has been used, or load the next one under the "
        "same name",
    ),
    GrowingPart(
        "higher",
        frozenset({"higher.optim.DifferentiableOptimizer", "higher.patch._MonkeyPatchBase"}),
        "higher keeps the parameters of every inner step, and with them the graph of all inner steps",
        "leave the `higher.innerloop_ctx` block after each task and keep nothing of it, pass "
        "`track_higher_grads=False` where no second derivative is needed, and detach() what is kept",
    ),
    GrowingPart(
        "itertools",
        frozenset({"itertools.cycle"}),
        "itertools.cycle keeps every item of its first round, to give the same ones again",
        "restart the loader for each round: `while True: yield from loader` in a generator function",
    ),
    GrowingPart(
        "itertools",
        frozenset({"itertools._tee", "itertools._tee_dataobject"}),
        "itertools.tee keeps what one of its iterators gave until the others have given it, too",
        "delete the iterator that is not advanced any more, or begin a new one for it: `iter(loader)`",
    ),
    GrowingPart(
        "queue",
        frozenset(
            {"queue.Queue", "_queue.SimpleQueue", "asyncio.queues.Queue", "multiprocessing.queues.Queue"}
        ),
        "it is filled faster than it is emptied, and what waits in it stays alive",
        "bound the queue (`queue.Queue(maxsize=...)`), so that put() waits, or empty it faster",
    ),
    GrowingPart(
        "multiprocessing",
        frozenset({"multiprocessing.pool.IMapIterator"}),
        "a pool makes results whether or not they are taken, and what waits stays alive",
        "hand the pool few inputs at a time: have the input's generator wait for a `threading.Semaphore` "
        "that the loop releases when it has taken a result",
    ),
    GrowingPart(
        "weakref",
        frozenset({"weakref.WeakKeyDictionary", "torch.utils.weak.WeakIdKeyDictionary"}),
        "a value stays as long as its key is alive, and a value that refers to its key keeps it alive for "
        "ever",
        "keep no reference to the key in its value (a `weakref.ref()`, or the few numbers that are needed), "
        "and clear what grows in a value",
    ),
    GrowingPart(
        "weakref",
        frozenset({"weakref.finalize"}),
        "a finalizer keeps its arguments until its object is gone, and that object lives on",
        "register one finalizer for each object, not one at every step; give it no large arguments, and "
        "call its detach() when it is not needed any more",
    ),
    GrowingPart(
        "transformers",
        frozenset({"transformers.cache_utils.Cache"}),
        "a cache of keys and values keeps those of every token that it was given",
        "make a new cache for each sequence, or remove what a sequence has added with `cache.crop()` before "
        "the next one",
        alone=True,
    ),
    GrowingPart(
        "torch.jit",
        frozenset({"torch.jit._recursive.ConcreteTypeStore"}),
        "torch.jit keeps what it compiled for each module that is traced or scripted",
        "trace or script the module once, before the loop, and call the result inside it: what is compiled "
        "stays until the process ends",
    ),
    GrowingPart(
        "torch.optim.LBFGS",
        frozenset({"torch.optim.lbfgs.LBFGS"}),
        "LBFGS keeps two vectors as large as all parameters for each of the last `history_size` iterations",
        "lower `history_size` (100 by default): it stops growing when that many iterations are kept",
    ),
)


def growing_part(classes: Iterable[str]) -> GrowingPart | None:
    """Return the part that one of these classes (`module.Name`) belongs to; None where none does."""
    known = set(classes)
    return next((part for part in GROWING if part.classes & known), None)
