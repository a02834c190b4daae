"""Read the size of the current batch from the local variables of the functions that train.

Hooks do not see shapes (global module hooks break compiled graphs). But the batch is a local variable of a
function that calls the model or `backward`, nearly always with one of a few names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice
from types import FrameType, TracebackType
from typing import Any

from memtriage.observe.classes import name_of, stored
from memtriage.observe.frames import frame_locals
from memtriage.observe.objects import tuple_items
from memtriage.observe.tensors import plain, undisturbed

_NAMES = re.compile(
    r"^(x|xs|y|inputs?|input_ids|labels|targets?|batch|micro_?batch|data|examples?|samples?|images?|img|imgs|"
    r"tokens?|ids|src|tgt|seqs?|sequences?|features?|pixel_values|model_inputs|waveforms?|audio)$"
)
_DEPTH = 12


def batch_elements(frames: Iterator[FrameType]) -> int | None:
    """Elements of the largest input tensor among the variables of some frames; None if there is none.

    Only tensors without a gradient count, in a variable with a usual name for a batch, or one level inside a
    dict, list or tuple with such a name.
    """
    kind = _tensor_class()
    if kind is None:
        return None
    largest: int | None = None
    with undisturbed():
        for frame in frames:
            for _, value in frame_locals(frame, _NAMES.match) or list(_module_variables(frame)):
                for tensor in map(plain, _tensors(value, kind)):
                    if tensor.grad_fn is None and not tensor.requires_grad:
                        elements = tensor.numel()
                        largest = elements if largest is None else max(largest, elements)
    return largest


def batch_shapes(frames: Sequence[FrameType]) -> dict[str, int]:
    """Sizes that may be factors of a failed request: the input's dimensions, and the model's sizes.

    Names are `batch`, `sequence` (the first two dimensions of the largest input) and, from a variable named
    `config` or a model's `.config`, `vocabulary`, `hidden` and `heads`.
    """
    kind = _tensor_class()
    if kind is None:
        return {}
    sizes: dict[str, int] = {}
    largest = 0
    with undisturbed():
        for frame in frames:
            for name, value in frame_locals(frame):
                if _NAMES.match(name):
                    for tensor in map(plain, _tensors(value, kind)):
                        if tensor.dim() >= 2 and tensor.numel() > largest:
                            largest = tensor.numel()
                            sizes.update(batch=tensor.shape[0], sequence=tensor.shape[1])
                config = value if name == "config" else stored(value, "config")
                for label, attributes in _CONFIG_SIZES:
                    for attribute in attributes:
                        size = stored(config, attribute)
                        if type(size) is int:
                            sizes.setdefault(label, size)
    return sizes


_CONFIG_SIZES = (
    ("vocabulary", ("vocab_size",)),
    ("hidden", ("hidden_size", "n_embd", "d_model")),
    ("heads", ("num_attention_heads", "n_head")),
)


def caller_frames(skip: int, *, depth: int | None = _DEPTH) -> Iterator[FrameType]:
    """Frames of the calling thread, innermost first, without the first `skip` and without torch's own.

    Args:
        skip: number of innermost frames to leave out.
        depth: number of frames to look at, including torch's own; None for all. Inside a deep model, many
            frames may be between the current one and the one that has the batch.
    """
    frame: FrameType | None = sys._getframe(skip + 1)
    for _ in count() if depth is None else range(depth):
        if frame is None:
            return
        if "/torch/" not in frame.f_code.co_filename:
            yield frame
        frame = frame.f_back


def running_functions() -> list[tuple[str, str, int]]:
    """(file, function, line) of every function that the calling thread runs, innermost first."""
    functions = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        functions.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return functions


def traceback_frames(trace: TracebackType | None) -> list[FrameType]:
    """Frames of a traceback, innermost first."""
    frames = []
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _module_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    if frame.f_code.co_name == "<module>":
        for name, value in list(dict.items(frame.f_globals)):
            if type(name) is str and _NAMES.match(name):
                yield name, value


def _tensor_class() -> type | None:
    """Return `torch.Tensor`; None while the program has replaced the module `torch`."""
    tensor_class: type | None = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class


def _tensors(value: Any, kind: type) -> Iterator[Any]:
    if issubclass(type(value), kind):
        yield value
        return
    inner = stored(value, "data") if name_of(type(value)) == "BatchEncoding" else value
    if issubclass(type(inner), dict):
        candidates = list(dict.values(inner))[:32]
    elif issubclass(type(inner), list):
        candidates = list(islice(list.__iter__(inner), 32))
    elif issubclass(type(inner), tuple):
        candidates = tuple_items(inner)[:32]
    else:
        return
    yield from (item for item in candidates if issubclass(type(item), kind))
