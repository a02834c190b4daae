"""What is seen inside a failing allocation, and the finding if the program died of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

from msgspec.structs import replace

from memtriage.diagnose.out_of_memory import describe
from memtriage.messages.errors import FrameState, is_out_of_memory, phase_from_frames, read_message
from memtriage.messages.grammar.message import OomFields
from memtriage.messages.shapes import factor
from memtriage.model.blocks import DeviceCounters
from memtriage.model.census import StorageRecord
from memtriage.model.findings import DEVICE_HOST, Finding
from memtriage.model.position import TrainingPosition
from memtriage.observe.classes import bases_of, name_of, stored
from memtriage.observe.exceptions import cause_of, summary_of, text_of, traceback_of
from memtriage.observe.inputs import batch_elements, batch_shapes, traceback_frames
from memtriage.observe.tensors import plain, undisturbed
from memtriage.process.limits import lifted_memory_limit


@dataclass(slots=True)
class FailedAllocation:
    """What the allocator's observer saw. Sizes in bytes.

    Attributes:
        device: `cuda:N`.
        requested: asked of the driver.
        limit: the process's cap if one is set, else the device's memory.
        free: free on the device.
        position: where training stood.
        counters: the allocator's counters at that instant.
        owners: live bytes by owner, largest first.
        times: how many allocations have failed so far.
    """

    device: str
    requested: int
    limit: int
    free: int
    position: TrainingPosition
    counters: DeviceCounters
    owners: list[tuple[str, int]] = field(default_factory=list)
    times: int = 1


def memory_error(exception: BaseException | None) -> BaseException | None:
    """The out-of-memory error that ended the program: the exception itself, or what it was raised from."""
    at = exception
    seen: set[int] = set()  # `raise error from error` is its own cause
    with lifted_memory_limit():  # reading a message needs some memory itself
        while at is not None and id(at) not in seen:
            seen.add(id(at))
            if is_out_of_memory(list(map(name_of, bases_of(type(at)))), text_of(at)):
                return at
            at = cause_of(at)
    return None


def device_of(error: BaseException) -> str:
    """Return the device that the error's message names, `cpu` for all of the host."""
    device = read_message(summary_of(error)).device
    return "cpu" if device in (None, DEVICE_HOST) else device


def error_frames(error: BaseException) -> list[FrameType]:
    """Frames of the error's traceback, innermost first; the error keeps their variables alive."""
    return traceback_frames(traceback_of(error))


def died_of_memory(
    error: BaseException,
    failed: FailedAllocation | None,
    position: TrainingPosition,
    owners: Sequence[tuple[str, int]],
    limit_source: str | None,
    leaks: Sequence[Finding] = (),
) -> Finding:
    """Return the finding of a program that ended because memory ran out.

    Args:
        error: the error, with its traceback.
        failed: what the allocator's observer saw last; None if none fired (the host, other libraries).
        position: where training stood when the error came to the top of the program.
        owners: live bytes by owner at the end, for a failure that no observer saw.
        limit_source: what sets the host's limit.
        leaks: the findings of leaks.
    """
    text = summary_of(error)
    fields = read_message(text)
    frames = error_frames(error)
    shapes = batch_shapes(frames)
    product = factor(fields.requested, shapes) if fields.requested else None
    factored = None if product is None else product.text
    if failed is not None and (fields.device or failed.device) == failed.device:
        if fields.requested is None:
            fields = OomFields(device=failed.device, requested=failed.requested, free=failed.free)
        return describe(
            text, failed.position, failed.device, fields, failed.owners, None, factored=factored, leaks=leaks
        )
    recorded = _recorded(frames)
    state = FrameState(training_begun=position.backwards > 0, grad_enabled=recorded)
    where = [(f.f_code.co_filename, f.f_code.co_name, f.f_lineno) for f in frames]
    position = replace(
        position,
        phase=phase_from_frames(where, state),
        grad_enabled=recorded,
        batch_elements=batch_elements(iter(frames)) if frames else position.batch_elements,
    )
    device = fields.device or DEVICE_HOST
    source = limit_source if device in (DEVICE_HOST, "cpu") else None
    return describe(text, position, device, fields, list(owners), source, factored=factored, leaks=leaks)


@undisturbed()
def _recorded(frames: Sequence[FrameType]) -> bool | None:
    """Whether the failing operations recorded a graph, inferred from the results of the innermost functions.

    When an exception is caught, its `no_grad` blocks have ended. An activation with a grad_fn means yes;
    floating-point results without one, inside a module whose parameters need gradients, mean no.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    from memtriage.observe.frames import frame_locals

    for frame in frames[:12]:
        values = [value for _, value in frame_locals(frame)]
        results = [plain(value) for value in values if issubclass(type(value), torch.Tensor)]
        if any(value.grad_fn is not None for value in results):
            return True
        modules = [value for value in values if issubclass(type(value), torch.nn.Module)]
        tables = [stored(module, "_parameters") for module in modules]
        own = [value for table in tables if issubclass(type(table), dict) for value in dict.values(table)]
        needs = any(plain(value).requires_grad for value in own if value is not None)
        if needs and any(value.is_floating_point() and not value.requires_grad for value in results):
            return None if all(value.is_leaf for value in results) and len(results) == 1 else False
    return None


def owners_of(storages: Sequence[StorageRecord], device: str) -> list[tuple[str, int]]:
    """Bytes by owner on a device, largest first."""
    total: Counter[str] = Counter()
    for record in storages:
        if record.device == device:
            total[record.owner] += record.nbytes
    return total.most_common()
