"""The script ran out of memory: what the error says, when it happened, and what to do about it.

Pure functions of texts and numbers. In the first backward, the first optimizer step, evaluation, or on the
longest batch, the same error has different causes and fixes: `describe` decides by the position.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final

from memtriage.messages.evidence import proof, sums
from memtriage.messages.grammar.message import OomFields
from memtriage.messages.judge import judge_figures
from memtriage.model.explanation import Label
from memtriage.model.findings import DEVICE_HOST, GROWING, Finding
from memtriage.model.position import TrainingPosition
from memtriage.model.units import count, size
from memtriage.playbook.entries import LEAKS
from memtriage.playbook.out_of_memory import ADVICE, FIRST, Cause

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
        factored: the request as a product, from `factor`.
        leaks: findings of leaks in the process.
    """
    device = fields.device or device
    cause = cause_of(error_text, position, device, holders)
    advice = ADVICE[cause]
    fix = advice.fix_on_cpu if device == "cpu" and advice.fix_on_cpu is not None else advice.fix
    label: Label = "absurd_request" if "more than 1EB memory" in error_text else judge_figures(fields)[0]
    if label in FIRST:
        fix = f"{FIRST[label].format(device=device)} {fix}"
    because = advice.suspects
    leaked = None if because is None else _leaked(leaks, fields.requested, position, device)
    if leaked is not None:
        _, because, leak = leaked
        held = f"Fix the leak of {leak.holder or 'something without a holder'}"
        fix = f"{held}: {leak.fix}" if leak.fix else f"{held}."
    asked = "asked for memory" if fields.requested is None else f"asked for {size(fields.requested)}"
    shown = ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in holders[:_SHOWN_HOLDERS])
    why = advice.why.format(phase=position.phase, asked=asked) + (f": {because}" if because else "")
    evidence = [
        f"died in the {position.phase}, after {count(position.step, 'optimizer step')} and "
        f"{count(position.backwards, 'backward')}",
        _where(error_text, device),
        *sums(label, fields),
        *(proof(label, fields) if label != "unknown" else ()),
        *_circumstances(position),
    ]
    if holders:
        alive = ", ".join(f"{owner} {size(nbytes)}" for owner, nbytes in holders)
        evidence.append(f"alive at that instant: {alive}")
    if factored is not None:
        evidence.append(f"the request may be {factored}")
    if limit_source is not None:
        evidence.append(f"the limit: {limit_source}")
    return Finding(
        kind="out_of_memory",
        device=device,
        bytes=fields.requested,
        mechanism=why + (f"; most of what was alive: {shown}" if shown else "") + ".",
        fix=fix,
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
        if re.search(r"(?i)bus error|shared memory|</torch_\w+>", error_text):
            return "shared memory"
        return "worker" if re.search(r"\b(?:DataLoader|encountered in) worker\b", error_text) else "host"
    if position.phase == "setup":
        return "setup on the host" if device == "cpu" else "setup"
    if position.phase == "evaluation":
        if position.grad_enabled is None:
            return "evaluation"
        return "evaluation with gradients" if position.grad_enabled else "evaluation without gradients"
    if position.phase == "optimizer":
        return "first optimizer step" if position.step == 0 else "later optimizer step"
    if position.step == 0 and position.backwards == 0:
        return "first forward" if position.phase == "forward" else "first backward"
    if position.step == 0 and position.backwards == 1:
        return "second micro-batch"
    # Assumed if no owners were counted.
    has_state = not holders or any(owner == "optimizer state" and nbytes > 0 for owner, nbytes in holders)
    if position.step == 1 and position.into_step <= 1 and has_state:
        return "after the first step"
    if position.longest_batch is None:
        return "unmeasured"
    return "longest batch" if position.longest_batch else "growth"


def _leaked(
    leaks: Sequence[Finding], asked: int | None, position: TrainingPosition, device: str
) -> tuple[int, str, Finding] | None:
    """What the largest leak has added by now, and the leak, if the request would have fitted without it."""
    sums: list[tuple[int, str, Finding]] = []
    for leak in leaks:
        if leak.kind in GROWING and leak.device == device:
            rate, times, each = leak.bytes_per_step, position.step, "step"
            if rate is None:
                rate, times, each = leak.bytes_per_microbatch or 0, position.backwards, "micro-batch"
            over = f" over {times:,} steps" if each == "step" else f" over {times:,}"
            added = f"a leak of {size(rate)} per {each}{over} is {size(rate * times)} by now"
            sums.append((rate * times, added, leak))
    largest = max(sums, key=itemgetter(0), default=None)
    return None if largest is None or asked is None or largest[0] < asked else largest


# Evidence


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
