"""The script ran out of memory: what the error says, when it happened, and what to do about it.

Pure functions of texts and numbers. In the first backward, the first optimizer step, evaluation, or on the
longest batch, the same error has different causes and fixes: `describe` decides by the position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from memtriage.messages.evidence import proof, sums
from memtriage.messages.grammar.message import OomFields
from memtriage.messages.judge import judge_figures
from memtriage.model.explanation import Label
from memtriage.model.findings import DEVICE_HOST, GROWING, Finding
from memtriage.model.position import TrainingPosition
from memtriage.model.units import size
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.out_of_memory import ADVICE, FIRST, Advice, Cause

_SHARED_MEMORY: Final = re.compile(r"bus error|shared memory|</torch_\w+>", re.IGNORECASE)
_WORKER: Final = re.compile(r"\bDataLoader worker\b|\bencountered in worker\b")

_OPTIMIZER_STATE: Final = "optimizer state"
_SHOWN_HOLDERS: Final = 3


def describe(
    error_text: str,
    position: TrainingPosition,
    device: str,
    fields: OomFields,
    holders: Sequence[tuple[str, int]],
    limit_source: str | None,
    *,
    factored: str | None = None,
    leaks: Sequence[Finding] = (),
) -> Finding:
    """Make the finding of an out-of-memory error. It names a leak that led to it, which has its own finding.

    Its `step` is the number of completed optimizer steps, its `bytes` what the failing call requested.

    Args:
        error_text: the class and the message, as in the last line of a traceback.
        position: where training stood, and what the program was doing.
        device: what ran out, as far as known without the message.
        fields: from `read_message` or the observer.
        holders: the largest live owners at that instant, with their bytes; empty if none were counted.
        limit_source: what sets the limit that was hit, in words (`cgroup memory.max, 8.0 GiB`).
        factored: the request as a product, from `factor_request`.
        leaks: findings of leaks in the process.
    """
    device = fields.device or device
    cause = cause_of(error_text, position, device, holders)
    advice = ADVICE[cause]
    fix = advice.fix_on_cpu if device == "cpu" and advice.fix_on_cpu is not None else advice.fix
    label = _label(error_text, fields)
    if label in FIRST:
        fix = f"{FIRST[label].format(device=device)} {fix}"
    leaked = None if advice.suspects is None else _leaked(leaks, fields.requested, position, device)
    evidence = [
        _when(position),
        _where(error_text, device),
        *sums(label, fields),
        *(proof(label, fields) if label != "unknown" else ()),
        *_circumstances(position),
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
        mechanism=_mechanism(advice, position, fields, holders, leaked),
        fix=fix if leaked is None else leaked.cure,
        playbook=advice.entry if leaked is None else LEAKS,
        phase=position.phase,
        step=position.step,
        evidence=evidence,
    )


def cause_of(
    error_text: str, position: TrainingPosition, device: str, holders: Sequence[tuple[str, int]] = ()
) -> Cause:
    """Infer from the position why memory ran out just then; the first rule that applies decides.

    The first backward and the first step each set a new peak: they make the gradients and the optimizer's
    state. If they fitted and a later one fails, memory has grown, or a batch is larger.
    """
    if device == DEVICE_HOST:
        return _host_cause(error_text)
    if position.phase == "setup":
        return "setup on the host" if device == "cpu" else "setup"
    if position.phase == "evaluation":
        return _evaluation_cause(position)
    if position.phase == "optimizer":
        return "first optimizer step" if position.step == 0 else "later optimizer step"
    if position.step == 0 and position.backwards == 0:
        return "first forward" if position.phase == "forward" else "first backward"
    if position.step == 0 and position.backwards == 1:
        return "second micro-batch"
    if position.step == 1 and position.into_step <= 1 and _has_optimizer_state(holders):
        return "after the first step"
    if position.longest_batch is None:
        return "unmeasured"
    return "longest batch" if position.longest_batch else "growth"


def _host_cause(text: str) -> Cause:
    if _SHARED_MEMORY.search(text):
        return "shared memory"
    return "worker" if _WORKER.search(text) else "host"


def _evaluation_cause(position: TrainingPosition) -> Cause:
    if position.grad_enabled is None:
        return "evaluation"
    return "evaluation with gradients" if position.grad_enabled else "evaluation without gradients"


def _has_optimizer_state(holders: Sequence[tuple[str, int]]) -> bool:
    """Whether optimizer state is among the owners; assumed if none were counted."""
    return not holders or any(owner == _OPTIMIZER_STATE and nbytes > 0 for owner, nbytes in holders)


def _mechanism(
    advice: Advice,
    position: TrainingPosition,
    fields: OomFields,
    holders: Sequence[tuple[str, int]],
    leaked: _Leaked | None,
) -> str:
    asked = "asked for memory" if fields.requested is None else f"asked for {size(fields.requested)}"
    because = advice.suspects if leaked is None else str(leaked)
    shown = [f"{owner} {size(nbytes)}" for owner, nbytes in holders[:_SHOWN_HOLDERS]]
    filled = f"; most of what was alive: {', '.join(shown)}" if shown else ""
    why = advice.why.format(phase=position.phase, asked=asked)
    return f"{why}{f': {because}' if because else ''}{filled}."


@dataclass(frozen=True, slots=True)
class _Leaked:
    """How much a leak has added.

    Attributes:
        leak: its finding.
        rate: bytes for each of `times`.
        times: number of steps; of micro-batches if growth per step is not known.
        over: `times` in words.
    """

    leak: Finding
    rate: int
    times: int
    over: str

    @classmethod
    def of(cls, leak: Finding, position: TrainingPosition) -> _Leaked:
        if leak.bytes_per_step is not None:
            return cls(leak, leak.bytes_per_step, position.step, f"step over {position.step:,} steps")
        over = f"micro-batch over {position.backwards:,}"
        return cls(leak, leak.bytes_per_microbatch or 0, position.backwards, over)

    @property
    def nbytes(self) -> int:
        return self.rate * self.times

    def __str__(self) -> str:
        return f"a leak of {size(self.rate)} per {self.over} is {size(self.nbytes)} by now"

    @property
    def cure(self) -> str:
        held = f"Fix the leak of {self.leak.holder or 'something without a holder'}"
        return f"{held}: {self.leak.fix}" if self.leak.fix else f"{held}."


def _leaked(
    leaks: Sequence[Finding], asked: int | None, position: TrainingPosition, device: str
) -> _Leaked | None:
    """The largest leak, if the request would have fitted without it."""
    on_device = [
        _Leaked.of(leak, position) for leak in leaks if leak.kind in GROWING and leak.device == device
    ]
    largest = max(on_device, key=attrgetter("nbytes"), default=None)
    return largest if largest is not None and asked is not None and largest.nbytes >= asked else None


# Evidence


def _when(position: TrainingPosition) -> str:
    steps = f"{position.step:,} optimizer step{'s' * (position.step != 1)}"
    backwards = f"{position.backwards:,} backward{'s' * (position.backwards != 1)}"
    return f"died in the {position.phase}, after {steps} and {backwards}"


def _where(text: str, device: str) -> str:
    if device == "cpu":
        return "a host allocation failed (a CPU tensor): GPU advice does not help"
    if device == DEVICE_HOST:
        return "a host allocation failed: GPU advice does not help"
    if re.search(r"_\w*ALLOC(ATION)?_FAILED|Cuda failure|Failed to CUDA", text):
        return f"an allocation by a library failed on {device}: it needs room outside of torch's allocator"
    if re.search(r"(CUDA|HIP)( driver)? error: out of memory", text):
        return (
            "the message has no sizes, so the failed call was probably not the caching allocator's: pinned "
            "host memory, a new context, a captured graph or a library"
        )
    return f"an allocation on {device} failed, not one of the host"


def _circumstances(position: TrainingPosition) -> Iterator[str]:
    if position.phase == "evaluation" and position.grad_enabled is not None:
        yield f"gradients were {'enabled' if position.grad_enabled else 'disabled'}"
    if position.batch_elements is None or not position.largest_batch:
        return
    times = position.batch_elements / position.largest_batch
    yield (
        f"the batch in work has {position.batch_elements:,} elements, the largest before it "
        f"{position.largest_batch:,} ({times:.2f} times)"
    )


def _alive(holders: Sequence[tuple[str, int]]) -> Iterator[str]:
    if holders:
        yield "alive at that instant: " + ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in holders)


# What the figures prove, independent of the position


def _label(text: str, fields: OomFields) -> Label:
    return "absurd_request" if "more than 1EB memory" in text else judge_figures(fields)[0]
