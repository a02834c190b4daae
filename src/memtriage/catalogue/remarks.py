"""Known causes of kept memory that cannot be detected as holders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Remark:
    """One cause: its library, what keeps memory, what helps."""

    library: str
    what: str
    helps: str


REMARKS: Final[tuple[Remark, ...]] = (
    Remark(
        "TransformerEngine",
        "C++ caches (sdpa_f16_fprop_cache and its like, NormalizationPlanRegistry, HandleManager): plans and "
        "handles on the host",
        "nothing clears them; they are small",
    ),
    Remark(
        "TransformerEngine",
        "te.module.base.clear_workspace() exists in no version: a hasattr guard makes the call do nothing",
        "memtriage.clear_caches()",
    ),
    Remark(
        "TransformerEngine",
        "FSDP2: quantized copies of all layers gather, transposes live to the next forward (#2681, #2717)",
        "TransformerEngine 2.16 (#2805)",
    ),
    Remark(
        "Megatron-LM",
        "reference cycles of its DDP wrapper keep whole models (NeMo-RL #3697: 75 GiB)",
        "break the cycle; clear_caches() collects garbage",
    ),
    Remark(
        "DeepSpeed",
        "lp_params stay on the GPU when states are offloaded (DeepSpeed #7050)",
        "fixed in the framework; park what stays",
    ),
    Remark(
        "PyTorch",
        "a compiled flex-attention backward keeps about 12 GB after its first call (#177869)",
        "torch._dynamo.reset()",
    ),
)
