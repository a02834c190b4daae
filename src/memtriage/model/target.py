"""What a command is to trace."""

from __future__ import annotations

from typing import Any, Final

import msgspec

BATCH_NAMES: Final = (
    "micro_batch",
    "micro_batch_size",
    "microbatch",
    "microbatch_size",
    "per_device_train_batch_size",
    "batch_size",
    "batch",
    "bs",
)
LENGTH_NAMES: Final = (
    "seq",
    "seq_len",
    "seq_length",
    "sequence_length",
    "length",
    "max_length",
    "max_seq_length",
    "context_length",
    "block_size",
)
"""What programs call the samples of a micro-batch, and the length of a sample, in order of preference."""


SIZES: Final = {"batch": 8, "seq": 2048}
"""Of a Hugging Face configuration, unless the user gives others."""


class TraceTarget(msgspec.Struct, kw_only=True):
    """A program; exactly one of `name`, `module` and `hf_config` is given.

    Attributes:
        name: `FILE.py:FUNCTION` for a build function, else the path of a script.
        module: dotted name of a module that is run as `python -m` runs it.
        arguments: of the script or module, without its name.
        inference: whether a script or module is said never to train.
        hf_config: the file or folder of a Hugging Face configuration.
        training: how such a model is trained: keyword arguments of `predict.hf.TrainingArguments`.
    """

    name: str | None = None
    module: str | None = None
    arguments: list[str] = []
    inference: bool = False
    hf_config: str | None = None
    training: dict[str, Any] = {}
