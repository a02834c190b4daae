"""What the stages of a pipeline ask each other before the first step, where there is one stage alone."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import _utils, stage

from memtriage.prediction.build import BuildError

_ADVICE: Final = (
    "one process receives a Python object from another, whose contents are not known; for a PipelineStage "
    "expected its input_args and output_args, so that stages need not ask each other for shapes"
)


def replacements() -> list[tuple[Any, str, Any]]:
    """The attributes to replace: owner, name, value."""
    return [
        *((owner, "recv_object_list", _not_received) for owner in (torch.distributed, distributed_c10d)),
        (stage.PipelineStage, "_warmup_forward_vote", _own_vote),  # torch 2.13 and newer, as the next
        (stage.PipelineStage, "_warmup_backward_result", _own_vote),
    ]


def _not_received(*args: Any, **kwargs: Any) -> Any:
    raise BuildError(_ADVICE)


def _own_vote(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Whether shapes were given, by all stages if by this one: every rank runs the same program."""
    asks = _utils.InferenceMode.needs_dynamic(self._user_meta, True)
    return torch.tensor([int(not asks)], dtype=torch.int32, device="cpu")
