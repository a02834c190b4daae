"""The script died of memory: what the error says, when it happened, and what to do about it then.

Pure functions over texts and numbers. The same error has other causes, and so other fixes, in the first
backward, the first optimizer step, evaluation, or on the longest batch: `describe` decides by the moment.

Known limits: `read_message` reads the messages of CUDA, HIP and XPU of torch 2.1 and newer, what was asked by
most others, and no wrapped or cut texts. Sizes in messages have two decimals: a figure in GiB is off by up to
5 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations_with_replacement
from math import prod
from typing import Final, Literal

from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.units import size

Phase = Literal["forward", "backward", "optimizer", "evaluation", "setup"]

_KIB: Final = 1024
_MIB: Final = 1024**2
_GIB: Final = 1024**3

# Is it an out-of-memory error?

_MEMORY_CLASSES: Final = frozenset({"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"})

_ORDINARY_CLASSES: Final = frozenset(
    {
        "ValueError",
        "TypeError",
        "LookupError",
        "AttributeError",
        "AssertionError",
        "ImportError",
        "NameError",
        "SyntaxError",
        "Warning",
        "KeyboardInterrupt",
        "SystemExit",
    }
)
"""Classes whose text is the program's own talk: no runtime reports a failed allocation with them. (An
ImportError can say "cannot allocate memory in static TLS block", which is not about memory running out.)"""

_MEMORY_TEXTS: Final = re.compile(
    "|".join(
        (
            # accelerators; the form without a backend is that of the shared allocator
            r"\b(CUDA|HIP|XPU|MPS backend) out of memory",
            r"\bOut of memory\. Tried to allocate",
            r"\b(CUDA|HIP|CUDA driver) error: out of memory",
            r"\bwould exceed allowed memory\. \(out of memory\)",
            r"\b(cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY)\b",
            r"\bUR_RESULT_ERROR_OUT_OF_(RESOURCES|DEVICE_MEMORY|HOST_MEMORY)\b",
            r"\bInvalid buffer size: [\d.]+ [KMG]i?B",  # an MPS buffer over the limit for one buffer
            # the allocation had failed, then composing its message failed (MIG slices, containers)
            r"NVML_SUCCESS == r INTERNAL ASSERT FAILED at .{0,300}?CachingAllocator",
            # libraries
            r"\b(CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CUFFT|CURAND)_\w*ALLOC(ATION)?_FAILED\b",
            r"\bCuda failure (\d+ )?'out of memory'",
            r"\bFailed to CUDA [mc]alloc\b",
            r"\bCUDA error 2 'out of memory'",
            # the host
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"\balloc_cpu\.cpp\b|\bCPUAllocator\.cpp\b|\bposix_memalign\b",
            r"\bC10 Out of Memory\b",
            r"\bstd::bad_alloc\b",
            r"\[Errno 12\] Cannot allocate memory|\bCannot allocate memory \(12\)",
            r"\bUnable to allocate [\d.]+ ([KMGTPE]iB|bytes) for an array\b",
            r"\bCaught \w*MemoryError in ",  # raised again by a DataLoader for its worker
            # shared memory; an object that is gone, (2), or too many descriptors, (24), is not memory
            r"killed by signal: Bus error|\bbus error encountered in worker",
            r"</torch_\w+>.{0,40}?No space left on device",
        )
    ),
    re.IGNORECASE | re.DOTALL,
)


def is_out_of_memory(kind_names: Sequence[str], text: str) -> bool:
    """Whether an exception means that memory ran out, on a device or on the host.

    SIGKILL of a DataLoader worker is not called that: it alone proves nothing. Nor is a kernel that asks for
    more of a GPU's on-chip shared memory than there is (Triton's `OutOfResources`).

    Args:
        kind_names: names of the exception's class and of its bases, with or without their modules.
        text: its message.
    """
    names = {name.rpartition(".")[2] for name in kind_names}
    if names & _MEMORY_CLASSES:
        return True
    return not names & _ORDINARY_CLASSES and _MEMORY_TEXTS.search(text) is not None


# What the message says

_SUM_ERROR: Final = 64 * _MIB
"""Sums of a message's figures say nothing below this: each GiB figure is up to 5 MiB off, and free is read a
moment later than the rest."""


@dataclass(frozen=True, slots=True)
class OomFields:
    """Figures of an out-of-memory error, in bytes; None where the text (or the observer) does not say.

    Attributes:
        device: `cuda:N` (of HIP too: torch calls it so), `xpu:N`, `mps`, `cpu` where the CPU allocator
            refused a tensor, `host` for any other failure of the host.
        requested: what was asked. On a GPU that is what was asked of the driver: the tensor's size rounded up
            to 2 MiB, 20 MiB for tensors of 1 to 10 MiB.
        total: the device's capacity.
        free: free on the device.
        allocated: live blocks of this process. From a text, free memory in private pools is counted here.
        reserved_unallocated: reserved by the allocator, but free.
        private_pools: the free memory in private pools (CUDA graphs).
        allowed: the cap set for this process (`set_per_process_memory_fraction`).
        process_total: of this process on the device, context and libraries included.
    """

    device: str | None = None
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved_unallocated: int | None = None
    private_pools: int | None = None
    allowed: int | None = None
    process_total: int | None = None

    @property
    def reserved(self) -> int | None:
        """What the allocator has from the driver."""
        if self.allocated is None or self.reserved_unallocated is None:
            return None
        return self.allocated + self.reserved_unallocated

    @property
    def outside(self) -> int | None:
        """In use on the device but not of this process's allocator; None also where the figures disagree."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        rest = self.total - self.free - self.reserved
        return max(0, rest) if rest > -_SUM_ERROR else None


# The look-behind and the bound keep a long run of digits from costing quadratic time.
_SIZE: Final = r"(?<!\d)(\d[\d,]{0,30}(?:\.\d{1,9})?) ?(bytes?|[KMGTPE]i?B)\b"
_UNITS: Final = {unit: 1024**power for power, unit in enumerate(("b", "k", "m", "g", "t", "p", "e"))}
_UNLIMITED: Final = 2**63
"""Figures from here on are a driver's "unknown" (2**64 bytes) or an unset limit."""

_FIELD_TEXTS: Final[Mapping[str, str]] = {
    # The second form is that of cudaMallocAsync, the last but one that of numpy.
    "requested": rf"(?:Tried to allocate|Requested +:|you tried to allocate|Trying to allocate|Unable to "
    rf"allocate|unable to mmap|Invalid buffer size:|Failed to CUDA [mc]alloc(?: async)?) {_SIZE}",
    "total": rf"(?:has a total capaci?ty of|Device limit +:) {_SIZE}",
    "free": rf"(?:of which|Free \(according to CUDA\):) {_SIZE}",
    "allocated": rf"(?:Of the allocated memory|Currently allocated +:|MPS allocated:) {_SIZE}",
    "reserved_unallocated": rf"{_SIZE} is reserved by PyTorch but unallocated",
    "private_pools": rf"with {_SIZE} allocated in private pools",
    "allowed": rf"(?:\. {_SIZE} allowed;|max allowed: {_SIZE}|user-supplied memory fraction\)\s*: {_SIZE})",
    "process_total": rf"this process has {_SIZE} memory in use",
}
_FIELDS: Final = {name: re.compile(text) for name, text in _FIELD_TEXTS.items()}

_ACCELERATOR: Final = re.compile(
    r"\b(CUDA|HIP|XPU|MPS backend) out of memory|\bOut of memory\. Tried|Tried to allocate .{0,40}?\bGPU \d"
    r"|Allocation on device \d+ would exceed"
)
_INDEX: Final = re.compile(r"\bGPU (\d+)\b|Allocation on device (\d+)")
_CPU_ALLOCATOR: Final = re.compile(r"DefaultCPUAllocator|alloc_cpu\.cpp|CPUAllocator\.cpp|posix_memalign")
_HOST: Final = re.compile(
    r"\bDataLoader worker\b|\bencountered in worker\b|</torch_\w+>|\bbad_alloc\b|\bCannot allocate memory\b|"
    r"\bUnable to allocate\b.{0,40}?\bfor an array\b|(?<!\w)_?(Array)?MemoryError\b|C10 Out of Memory"
)
_SHARED_MEMORY: Final = re.compile(r"bus error|shared memory|</torch_\w+>", re.IGNORECASE)
_WORKER: Final = re.compile(r"\bDataLoader worker\b|\bencountered in worker\b")


def read_message(text: str) -> OomFields:
    """Read the figures of an error's message; what it does not have is None.

    Args:
        text: the message, with the name of its class in front where that is known (`MemoryError` has no
            text of its own).
    """
    figures = {name: _figure(pattern, text) for name, pattern in _FIELDS.items()}
    if figures["process_total"] == 0:
        figures["process_total"] = None  # "has 0 bytes memory in use": NVML could not tell, as in containers
    return OomFields(device=_device(text), **figures)


def _figure(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    if found is None:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    # KB, MB and GB of older MPS messages are powers of 1024 as well.
    exact = Decimal(number.replace(",", "")) * _UNITS[unit[0].lower()]
    return None if exact >= _UNLIMITED else int(exact.to_integral_value())


def _device(text: str) -> str | None:
    accelerator = _ACCELERATOR.search(text)
    if accelerator is not None:
        backend = accelerator.group(1) or "CUDA"
        if backend == "MPS backend":
            return "mps"
        index = _INDEX.search(text)
        if index is None:
            return None
        return f"{'xpu' if backend == 'XPU' else 'cuda'}:{int(index.group(1) or index.group(2))}"
    if _CPU_ALLOCATOR.search(text):
        return "cpu"
    return DEVICE_HOST if _HOST.search(text) else None


# The request as a product of sizes


def factor_request(nbytes: int, shapes: Mapping[str, int], itemsizes: Sequence[int] = (4, 2)) -> str | None:
    """Name a request as a product of known sizes, each used at most twice; None where no product fits.

    A request in whole MiB, or one printed with two decimals, also matches a tensor that the allocator rounded
    up to it. Requests of up to 20 MiB that are rounded so carry no shape.

    >>> factor_request(18650895483, {"tokens": 30688, "vocabulary": 151936})
    '17.37 GiB = 30,688 x 151,936 x 4 bytes (tokens x vocabulary)'

    Args:
        nbytes: what was asked.
        shapes: sizes by name (batch, sequence, vocabulary, hidden, heads, ...); sizes below 2 say nothing.
        itemsizes: bytes of an element to try, the likeliest first. The fewer, the fewer chance matches
            among powers of two.
    """
    known = [(name, count) for name, count in shapes.items() if count > 1]
    for length in range(1, 5):
        for names in combinations_with_replacement(known, length):
            if any(names.count(one) > 2 for one in names):
                continue
            for itemsize in itemsizes:
                if _makes(prod(count for _, count in names) * itemsize, nbytes):
                    factors = " x ".join(f"{count:,}" for _, count in names)
                    meaning = " x ".join(name for name, _ in names)
                    unit = "byte" if itemsize == 1 else "bytes"
                    return f"{_as_printed(nbytes)} = {factors} x {itemsize} {unit} ({meaning})"
    return None


_LARGE_REQUEST: Final = 10 * _MIB
"""Above this the CUDA allocator rounds up to 2 MiB; below it asks for 2 or 20 MiB, whatever the tensor.
Source: kMinLargeAlloc and kRoundLarge in c10/core/AllocatorConfig.h."""
_ROUNDING: Final = 2 * _MIB


def _makes(tensor: int, request: int) -> bool:
    """Whether a tensor of so many bytes makes a request of so many."""
    if tensor == request:
        return request not in (20 * _MIB, 2 * _MIB)
    if tensor < _LARGE_REQUEST or tensor > request + _print_error(request):
        return False
    rounded = -(-tensor // _ROUNDING) * _ROUNDING
    return abs(rounded - request) <= _print_error(request)


def _print_error(request: int) -> int:
    """How far a request may be from the truth: half of the last printed digit, 0 for an exact figure."""
    unit = _printed_unit(request)
    printed = int((Decimal(f"{request / unit:.2f}") * unit).to_integral_value())
    return unit // 200 if printed == request and request % _MIB else 0


def _printed_unit(nbytes: int) -> int:
    """The unit torch prints a size in (`format_size`): the step to the next is above 1024, not at it."""
    for unit in (_KIB, _MIB):
        if nbytes <= 1024 * unit:
            return unit if nbytes > 1024 else 1
    return _GIB


def _as_printed(nbytes: int) -> str:
    unit = _printed_unit(nbytes)
    name = {1: "bytes", _KIB: "KiB", _MIB: "MiB", _GIB: "GiB"}[unit]
    return f"{nbytes} {name}" if unit == 1 else f"{nbytes / unit:.2f} {name}"


# When it happened


@dataclass(frozen=True, slots=True)
class Moment:
    """What the program was doing when memory ran out.

    Attributes:
        phase: which part of training.
        step: completed optimizer steps.
        microbatch: completed backwards since the last step.
        backwards: completed backwards in all.
        input_elements: elements of the batch in work; None where unknown.
        largest_input_before: elements of the largest batch before it; None where unknown.
        grad_enabled: whether operations were being recorded for backward; None where unknown.
        device: the device that ran out, as far as known without the message.
    """

    phase: Phase
    step: int
    microbatch: int = 0
    backwards: int = 0
    input_elements: int | None = None
    largest_input_before: int | None = None
    grad_enabled: bool | None = None
    device: str = DEVICE_HOST

    @property
    def longest_batch(self) -> bool | None:
        """Whether the batch in work is larger than any before; None where sizes are unknown."""
        if self.input_elements is None or self.largest_input_before is None:
            return None
        return self.input_elements > self.largest_input_before


@dataclass(frozen=True, slots=True)
class FrameState:
    """What is known beside the frames of a traceback.

    Attributes:
        training_begun: a forward or backward was seen before.
        grad_enabled: see `Moment`; by the time an exception is caught its `no_grad` blocks have ended.
        eval_mode: the model that was running is in eval mode now and was in train mode before.
    """

    training_begun: bool
    grad_enabled: bool | None = None
    eval_mode: bool | None = None


_EVALUATES: Final = re.compile(r"eval(uat(e|ion|ing))?|val(id(at(e|ion|ing))?)?|predict(ions?)?|infer(ence)?")
_NEUTRAL: Final = re.compile(
    r"run|do|maybe|log|save|get|compute|perform|start|on|the|all|and|one|once|full|model|policy|loop|steps?|"
    r"epochs?|batch(es)?|set|split|data(set|loader)?|loader|phase|pass|loss(es)?|metrics?|accuracy|perplexity|"
    r"fn|func|hook|inner|impl"
)
_TESTS: Final = re.compile(r"_*(run_)?test(_step|_loop|(_one)?_epoch)?|_*generate(_text)?")
_TRAINS: Final = re.compile(r"train(ing)?")
_UPDATES: Final = re.compile(r"update|average|(^|_)ema(_|$)")
_INSIDE_TORCH: Final = re.compile(r"(site-packages|dist-packages|pytorch)/torch/")
_DECORATED: Final = frozenset({"decorate_context", "generator_context"})
_NOT_STEPPING: Final = frozenset({"__init__", "load_state_dict", "state_dict", "add_param_group"})
_OPTIMIZER_FILE: Final = re.compile(r"(^|/|_)optim(izers?)?(/|\.py$)")


def moment_from_frames(frames: Sequence[tuple[str, str, int]], state: FrameState) -> Phase:
    """Tell the phase by the functions that were running, for errors that no observer saw.

    The innermost frame that tells wins, so that an optimizer inside a backward, or a backward inside an
    optimizer's closure, is named rightly. Not told: an evaluation loop in a function with another name and
    with `no_grad()` as a block, unless `state` knows.

    Args:
        frames: (file name, function name, line) of the traceback, innermost first.
        state: what is known beside them.
    """
    forward = False
    candidate: Phase | None = None
    for position, (filename, function, _) in enumerate(frames):
        path, name = filename.replace("\\", "/"), function.rpartition(".")[2]
        if _is_backward(path, name):
            return "backward"
        if _is_optimizer(path, name):
            return "forward" if forward else "optimizer"  # a closure, as LBFGS takes one, runs the model
        if path.endswith("torch/nn/modules/module.py") and name.endswith("_call_impl"):
            # What was decorated or named so inside of a model is a part of the model.
            forward, candidate = True, None
        elif path.endswith("torch/nn/functional.py"):
            forward = True
        elif candidate is None:
            inner = frames[position - 1][1].rpartition(".")[2] if position else ""
            candidate = _candidate(path, name, inner, forward, state)
    if candidate is not None and candidate != "forward":
        return candidate
    if not forward and not state.training_begun:
        return "setup"
    return "evaluation" if candidate is None and _evaluating(frames, state) else "forward"


def _is_backward(path: str, name: str) -> bool:
    if path.endswith("torch/autograd/__init__.py"):
        return True
    return (path.endswith("torch/autograd/graph.py") and name == "_engine_run_backward") or (
        path.endswith("torch/_tensor.py") and name == "backward"
    )


def _is_optimizer(path: str, name: str) -> bool:
    if "torch/optim/" in path:
        # swa_utils calls the averaged model; a constructor or a checkpoint being loaded is no step.
        return not path.endswith("swa_utils.py") and name not in _NOT_STEPPING
    return name == "step" and _OPTIMIZER_FILE.search(path) is not None


def _candidate(path: str, name: str, inner: str, forward: bool, state: FrameState) -> Phase | None:
    """The phase that a frame of the program or of a library over torch speaks for; None for most."""
    if path.endswith("torch/utils/_contextlib.py") and name in _DECORATED:
        if inner == "step" and not forward:
            return "optimizer"  # one that is not torch's: its step is decorated with no_grad()
        if _UPDATES.search(inner) and not forward:
            return None  # an averaged copy of the weights
        ran = forward or state.training_begun  # before that, it is a decorated initialisation of weights
        return "evaluation" if ran and state.grad_enabled is not True else None
    if _INSIDE_TORCH.search(path):
        return None  # a `generate` there makes code
    if _TESTS.fullmatch(name):
        return "evaluation"
    words = {word.lower() for word in re.split(r"_+|(?<=[a-z])(?=[A-Z])", name) if word}
    evaluates = {word for word in words if _EVALUATES.fullmatch(word)}
    if evaluates:
        return "evaluation" if all(_NEUTRAL.fullmatch(word) for word in words - evaluates) else None
    return "forward" if any(_TRAINS.fullmatch(word) for word in words) else None


def _evaluating(frames: Sequence[tuple[str, str, int]], state: FrameState) -> bool:
    """Whether a forward without a name is an evaluation, by the model's mode or the missing graph."""
    if state.eval_mode is not None:
        return state.eval_mode
    # Reentrant checkpointing and Function.forward switch gradients off inside of a training forward.
    files = [filename.replace("\\", "/") for filename, _, _ in frames]
    hidden = any(file.endswith(("torch/utils/checkpoint.py", "torch/autograd/function.py")) for file in files)
    return state.grad_enabled is False and not hidden


# The finding

Cause = Literal[
    "shared memory",
    "worker",
    "host",
    "setup on the host",
    "setup",
    "first forward",
    "first backward",
    "second micro-batch",
    "first optimizer step",
    "after the first step",
    "evaluation with gradients",
    "evaluation without gradients",
    "evaluation",
    "longest batch",
    "later optimizer step",
    "growth",
    "unmeasured",
]
"""Why memory ran out just then, as far as the moment tells."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to say of a cause.

    Attributes:
        entry: of the playbook.
        why: the mechanism; `{phase}` and `{asked}` ("asked for 2.0 GiB") are filled in.
        fix: what to do, the first thing first.
        fix_on_cpu: the same for tensors on the CPU, where it differs.
    """

    entry: str
    why: str
    fix: str
    fix_on_cpu: str | None = None


ADVICE: Final[Mapping[Cause, Advice]] = {
    "shared memory": Advice(
        "M3",
        "A DataLoader worker found no room in shared memory (/dev/shm) for a batch",
        "Give /dev/shm more room (containers have 64 MiB by default: `docker run --shm-size` or "
        "`--ipc=host`), or use fewer workers and a smaller prefetch_factor.",
    ),
    "worker": Advice(
        "M3",
        "A DataLoader worker {asked}, and the host had none to give",
        "Use fewer DataLoader workers and a smaller prefetch_factor, and let each item load only what it "
        "needs (memory-mapped arrays in place of copies).",
    ),
    "host": Advice(
        "M3",
        "The process {asked} that is no tensor's, and the host had none to give",
        "Hold less in host memory: copies of the dataset, offloaded state, pinned buffers, the DataLoader's "
        "workers and prefetching; or raise the limit (cgroup, ulimit, scheduler).",
    ),
    "setup on the host": Advice(
        "M3",
        "Before training began a CPU tensor {asked}, more than the host would give",
        "Compare the size with the memory of the host or its cgroup; load lazily or in pieces "
        "(memory-mapped files, torch.load(mmap=True)) or in 16 bits.",
    ),
    "setup": Advice(
        "M4",
        "The setup {asked} before the first forward: weights, buffers and data alone do not fit",
        "Load the weights in 16 bits (M6) and once only (map_location), and see what else is on the "
        "device; then shard them (M9), offload them (M10), or train adapters over a 4-bit base (M13).",
    ),
    "first forward": Advice(
        "M4",
        "The first forward {asked} before any gradient or optimizer state existed: weights and activations "
        "alone do not fit",
        "It does not fit: take the ladder in order of cost, a smaller micro-batch with gradient "
        "accumulation (M5), bf16 autocast (M6), activation checkpointing (M7).",
    ),
    "first backward": Advice(
        "M14",
        "The first backward {asked}: gradients come on top of every activation that the forward saved",
        "Checkpoint the largest blocks (M7, use_reentrant=False); where the logits are the large term, use "
        "a fused or chunked cross-entropy; then a smaller micro-batch with gradient accumulation (M5) or "
        "bf16 autocast (M6).",
    ),
    "second micro-batch": Advice(
        "M14",
        "The {phase} of the second micro-batch {asked}: its activations lie beside the first one's gradients",
        "Checkpoint the largest blocks (M7, use_reentrant=False); then a smaller micro-batch with more "
        "accumulation (M5), bf16 autocast (M6) or sharded gradients (M9).",
    ),
    "first optimizer step": Advice(
        "M17",
        "The first optimizer step {asked}: optimizers create their state in it (8 bytes a parameter for fp32 "
        "AdamW), beside weights and gradients",
        "Use an 8-bit or paged optimizer (M12, 2 bytes a parameter in place of 8), or shard the state over "
        "ranks (M9); fused=True or foreach=False spares temporaries as large as the weights.",
        "Use an optimizer with less state (it changes convergence), keep weights and so the state in bf16, "
        "or shard the state over machines (M9).",
    ),
    "after the first step": Advice(
        "M17",
        "The {phase} after the first optimizer step {asked}: it is the first to have the optimizer's state "
        "(8 bytes a parameter for fp32 AdamW) beside its activations",
        "Size the run for its second step: use an 8-bit or paged optimizer (M12, 2 bytes a parameter in "
        "place of 8), shard the state over ranks (M9), or checkpoint the largest blocks (M7).",
        "Size the run for its second step: checkpoint the largest blocks (M7), use an optimizer with less "
        "state (it changes convergence), or shard the state over machines (M9).",
    ),
    "evaluation with gradients": Advice(
        "M15",
        "Evaluation {asked} with gradients enabled: activations are kept for a backward that never comes",
        "Run evaluation under torch.no_grad() or torch.inference_mode(), and keep reduced results (argmax, "
        "a running sum) in place of outputs.",
    ),
    "evaluation without gradients": Advice(
        "M15",
        "Evaluation {asked} although it keeps no activations: its batch is larger than training's, or "
        "results of earlier batches are kept",
        "Keep reduced results (argmax, a running sum, or at least .cpu()) in place of outputs; use the batch "
        "size of training for evaluation.",
        "Keep reduced results (argmax, a running sum) in place of outputs; use training's batch size for "
        "evaluation.",
    ),
    "evaluation": Advice(
        "M15",
        "Evaluation {asked}: gradients are enabled, its batch is larger than training's, or results of "
        "earlier batches are kept",
        "Run evaluation under torch.no_grad() or torch.inference_mode(); keep reduced results (argmax, a "
        "running sum) in place of outputs; use training's batch size for evaluation.",
    ),
    "longest batch": Advice(
        "M16",
        "The {phase} {asked} for the largest batch so far: activations grow with the batch",
        "Cap the length, or bucket batches by length or tokens, and size the run by running its largest "
        "batch first; then checkpoint the largest blocks (M7).",
    ),
    "later optimizer step": Advice(
        "M20",
        "The optimizer step {asked} although an earlier one fitted: something alive has grown since, this "
        "step creates state that earlier ones did not, or free memory is in more pieces",
        "Compare allocated at the end of each step: if it rises, a leak led here; if not, look for "
        "parameters or optimizers that join later; fused=True or foreach=False spares temporaries as large "
        "as the weights.",
        "Compare memory in use at the end of each step: if it rises, a leak led here; if not, look for "
        "parameters or optimizers that join later.",
    ),
    "growth": Advice(
        "M20",
        "The {phase} {asked} although a batch at least as large had fitted before: something alive has grown "
        "since, or free memory is in more pieces",
        "Compare allocated with reserved at the same point of each step: where allocated rises, find what "
        "keeps it and detach() what is stored; where only reserved rises, turn on expandable segments (M8).",
        "Compare memory in use at the same point of each step: where it rises, find what keeps it and "
        "detach() what is stored.",
    ),
    "unmeasured": Advice(
        "M19",
        "The {phase} {asked} although earlier ones had fitted: this batch is larger, something alive has "
        "grown since, or free memory is in more pieces",
        "Compare memory in use at the same point of each step, and the sizes of the batches: where memory "
        "rises, find what keeps it and detach() what is stored; where this batch was the largest, cap or "
        "bucket lengths (M16).",
    ),
}

_OPTIMIZER_STATE: Final = "optimizer state"
_SHOWN_HOLDERS: Final = 3


def describe(
    error_text: str,
    moment: Moment,
    fields: OomFields,
    holders: Sequence[tuple[str, int]],
    limit_source: str | None,
    *,
    factored: str | None = None,
) -> Finding:
    """Make the finding of an out-of-memory error. A leak that led to it is a finding of its own.

    Its `step` is the number of completed optimizer steps, its `bytes` what the failing call asked for.

    Args:
        error_text: the message with its class in front, as the last line of a traceback prints it.
        moment: what the program was doing.
        fields: what `read_message` or the observer told.
        holders: the largest live owners at that instant, with their bytes; empty where none were counted.
        limit_source: what sets the limit that was hit, in words (`cgroup memory.max, 8.0 GiB`).
        factored: the request as a product, from `factor_request`.
    """
    device = fields.device or moment.device
    cause = cause_of(error_text, moment, device, holders)
    advice = ADVICE[cause]
    fix = advice.fix_on_cpu if device == "cpu" and advice.fix_on_cpu is not None else advice.fix
    proofs = list(_proofs(error_text, fields, device))
    evidence = [
        _when(moment),
        _where(error_text, device),
        *_arithmetic(fields, device),
        *(proof.fact for proof in proofs),
        *_circumstances(moment),
        *_alive(holders),
    ]
    if factored is not None:
        evidence.append(f"the request may be {factored}")
    if limit_source is not None:
        evidence.append(f"the limit: {limit_source}")
    return Finding(
        kind="out_of_memory",
        device=device,
        bytes=fields.requested,
        mechanism=_mechanism(advice, moment, fields, holders),
        fix=" ".join([*(proof.first for proof in proofs if proof.first), fix]),
        playbook=advice.entry,
        phase=moment.phase,
        step=moment.step,
        evidence=evidence,
    )


def cause_of(error_text: str, moment: Moment, device: str, holders: Sequence[tuple[str, int]] = ()) -> Cause:
    """Tell by the moment why memory ran out just then; the first rule that holds.

    The first of each kind sets a new peak: gradients exist from the first backward on, the optimizer's state
    from the first step on. What fitted there and fails later has grown, or is larger.
    """
    if device == DEVICE_HOST:
        return _host_cause(error_text)
    if moment.phase == "setup":
        return "setup on the host" if device == "cpu" else "setup"
    if moment.phase == "evaluation":
        return _evaluation_cause(moment)
    if moment.phase == "optimizer":
        return "first optimizer step" if moment.step == 0 else "later optimizer step"
    if moment.step == 0 and moment.backwards == 0:
        return "first forward" if moment.phase == "forward" else "first backward"
    if moment.step == 0 and moment.backwards == 1:
        return "second micro-batch"
    if moment.step == 1 and moment.microbatch <= 1 and _has_optimizer_state(holders):
        return "after the first step"
    if moment.longest_batch is None:
        return "unmeasured"
    return "longest batch" if moment.longest_batch else "growth"


def _host_cause(text: str) -> Cause:
    if _SHARED_MEMORY.search(text):
        return "shared memory"
    return "worker" if _WORKER.search(text) else "host"


def _evaluation_cause(moment: Moment) -> Cause:
    if moment.grad_enabled is None:
        return "evaluation"
    return "evaluation with gradients" if moment.grad_enabled else "evaluation without gradients"


def _has_optimizer_state(holders: Sequence[tuple[str, int]]) -> bool:
    """Whether optimizer state is among the owners; taken to be where none were counted."""
    return not holders or any(owner == _OPTIMIZER_STATE and nbytes > 0 for owner, nbytes in holders)


def _mechanism(advice: Advice, moment: Moment, fields: OomFields, holders: Sequence[tuple[str, int]]) -> str:
    asked = "asked for memory" if fields.requested is None else f"asked for {size(fields.requested)}"
    shown = [f"{owner} {size(nbytes)}" for owner, nbytes in holders[:_SHOWN_HOLDERS]]
    filled = f"; most of what was alive: {', '.join(shown)}" if shown else ""
    return f"{advice.why.format(phase=moment.phase, asked=asked)}{filled}."


# Evidence


def _when(moment: Moment) -> str:
    steps = f"{moment.step:,} optimizer step{'s' * (moment.step != 1)}"
    backwards = f"{moment.backwards:,} backward{'s' * (moment.backwards != 1)}"
    return f"died in the {moment.phase}, after {steps} and {backwards}"


def _where(text: str, device: str) -> str:
    if device == "cpu":
        return "a host allocation failed (a CPU tensor): GPU advice does not help"
    if device == DEVICE_HOST:
        return "a host allocation failed: GPU advice does not help"
    if re.search(r"_\w*ALLOC(ATION)?_FAILED|Cuda failure|Failed to CUDA", text):
        return f"an allocation by a library failed on {device}: it needs room outside of torch's allocator"
    if re.search(r"(CUDA|HIP)( driver)? error: out of memory", text):
        return (
            "the message has no sizes, so the call that failed was hardly the caching allocator's: pinned "
            "host memory, a new context, a captured graph or a library"
        )
    return f"an allocation on {device} failed, not one of the host"


def _arithmetic(fields: OomFields, device: str) -> Iterator[str]:
    """The figures of the message, and their sums."""
    if fields.requested is not None and fields.free is not None:
        gap = fields.requested - fields.free
        verdict = f"{size(gap)} short" if gap > 0 else "the free memory covers it"
        yield f"asked {size(fields.requested)}, free on {device} {size(fields.free)}: {verdict}"
    elif fields.requested is not None:
        yield f"asked {size(fields.requested)}"
    parts = {
        "allocated": fields.allocated,
        "reserved but unallocated": fields.reserved_unallocated,
        "free": fields.free,
    }
    known = [f"{size(nbytes)} {name}" for name, nbytes in parts.items() if nbytes is not None]
    if fields.outside is not None and fields.outside >= _SUM_ERROR:
        known.append(f"{size(fields.outside)} outside this process's allocator")
        yield f"{' + '.join(known)} = {size(fields.total)}"
    elif fields.total is not None:
        yield f"{device} has {size(fields.total)}" + (f": {', '.join(known)}" if known else "")


def _circumstances(moment: Moment) -> Iterator[str]:
    if moment.phase == "evaluation" and moment.grad_enabled is not None:
        yield f"gradients were {'enabled' if moment.grad_enabled else 'disabled'}"
    if moment.input_elements is None or not moment.largest_input_before:
        return
    times = moment.input_elements / moment.largest_input_before
    yield (
        f"the batch in work has {moment.input_elements:,} elements, the largest before it "
        f"{moment.largest_input_before:,} ({times:.2f} times)"
    )


def _alive(holders: Sequence[tuple[str, int]]) -> Iterator[str]:
    if holders:
        yield "alive at that instant: " + ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in holders)


@dataclass(frozen=True, slots=True)
class NumbersPolicy:
    """When the figures of a message prove a cause of their own, whatever the moment.

    Attributes:
        absurd: a request of this many bytes is no size but garbage (64 TiB).
        full: free memory by which a request may be covered on a device that is full all the same: full
            cards still report up to 26 MiB free.
        capped_share: a cap below this share of the device counts as one.
        cap_reached: share of the cap that reserved plus request reach when the cap refused.
        baseline: what one process has outside its allocator (context, libraries) without being remarkable.
        outside_share: share of the device outside the allocator, beyond the baseline, that is remarkable.
        holes_share, holes: reserved but unallocated memory counts as large from the smaller of the two on.
    """

    absurd: int = 2**46
    full: int = 64 * _MIB
    capped_share: float = 0.98
    cap_reached: float = 0.995
    baseline: int = _GIB
    outside_share: float = 0.20
    holes_share: float = 0.02
    holes: int = _GIB


POLICY: Final = NumbersPolicy()


@dataclass(frozen=True, slots=True)
class _Proof:
    """What the figures prove, and what therefore comes before all other advice (empty for nothing)."""

    fact: str
    first: str


def _proofs(text: str, fields: OomFields, device: str, policy: NumbersPolicy = POLICY) -> Iterator[_Proof]:
    """What the figures alone prove, at most one thing; nothing where the device is plainly full."""
    requested, total, free = fields.requested, fields.total, fields.free
    if (requested is not None and requested >= policy.absurd) or "more than 1EB memory" in text:
        yield _Proof(
            "no machine has that much: a length or an index became this size",
            "Find the length or the index that became this size.",
        )
        return
    if requested is None or total is None:
        return
    if fields.allocated is not None and fields.allocated > total:
        over = size(fields.allocated - total)
        yield _Proof(f"allocated exceeds the device by {over}: the driver has spilled to system memory", "")
    elif requested > total:
        yield _Proof(f"the request alone exceeds the device's {size(total)}", "")
    elif fields.reserved is not None and free is not None:
        yield from _proof_of_full(fields, requested, total, free, fields.reserved, device, policy)


def _proof_of_full(
    fields: OomFields,
    requested: int,
    total: int,
    free: int,
    reserved: int,
    device: str,
    policy: NumbersPolicy,
) -> Iterator[_Proof]:
    allowed, outside, holes = fields.allowed, fields.outside, fields.reserved_unallocated or 0
    if (
        allowed is not None
        and allowed < policy.capped_share * total
        and reserved + requested > policy.cap_reached * allowed
    ):
        yield _Proof(
            f"{size(reserved)} reserved + {size(requested)} asked exceed the cap of {size(allowed)} that was "
            f"set for this process, on a device of {size(total)}",
            "Raise or remove the cap (torch.cuda.set_per_process_memory_fraction) if the rest of the device "
            "is yours.",
        )
    elif free - requested >= policy.full:
        yield _Proof(
            "the driver refused although enough was free",
            "Look for what makes the driver refuse (a limit of a MIG slice or of single allocations, the "
            "driver's version) before you shrink the model.",
        )
    elif outside is not None and (
        outside > reserved or outside - policy.baseline >= policy.outside_share * total
    ):
        yield _Proof(
            f"{size(outside)} of {size(total)} are other processes', or contexts and libraries",
            f"Free the device first: nvidia-smi names who else is on {device}.",
        )
    elif requested <= holes and holes >= min(policy.holes_share * total, policy.holes):
        yield _Proof(
            f"{size(holes)} are reserved but free, in pieces that are each too small for {size(requested)}",
            "Turn on expandable segments first (M8, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), "
            "unless they are on.",
        )
