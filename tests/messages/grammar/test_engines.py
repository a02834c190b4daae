"""Inference engines at their start and when their cache is full, and lines that only report memory."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        # vLLM
        (
            "ValueError: «No available memory for the cache blocks». Try increasing",
            Message("vllm", form="blocks"),
        ),
        (
            "ValueError: «Free memory on device (10.51/79.11 GiB) on startup is less than "
            "desired GPU memory utilization (0.9, 71.2 GiB)».",
            Message(
                "vllm",
                form="startup",
                fields={"free": 11285026570, "total": 84943715697, "desired": 76450417869},
            ),
        ),
        (
            "«Free memory on device cuda:1 (10.51/79.11 GiB) on startup is less than desired GPU "
            "memory utilization (0.95, 71.2 GiB)».",
            Message(
                "vllm",
                form="startup",
                fields={"free": 11285026570, "total": 84943715697, "desired": 76450417869},
            ),
        ),
        (
            "To serve at least one request with the models's max seq len (131072), («16.00 GiB "
            "KV cache is needed, which is larger than the available KV cache memory (9.50 GiB)».",
            Message("vllm", form="length", fields={"kv_needed": 17179869184, "kv_available": 10200547328}),
        ),
        (
            "The model's «max seq len (131072) is larger than the maximum number of tokens that "
            "can be stored in KV cache (65536)».",
            Message("vllm", form="length", facts={"max_seq_len": 131072, "kv_tokens": 65536}),
        ),
        (
            "«model weights take 13.00GiB; non_torch_memory takes 512.00MiB; PyTorch activation "
            "peak memory takes 1.50GiB; the rest of the memory reserved for KV Cache is "
            "56.00GiB».",
            Message(
                "vllm",
                form="breakdown",
                fields={
                    "weights": 13958643712,
                    "non_torch": 536870912,
                    "activation_peak": 1610612736,
                    "kv_cache": 60129542144,
                },
                ran_out=False,
            ),
        ),
        # Other engines
        (
            "«Not enough memory. Please try to increase --mem-fraction»-static.",
            Message("engine", form="share"),
        ),
        ("«Not enough memory to handle 4096 prefill tokens».", Message("engine", form="batch")),
        ("«Decode out of memory.» Try to lower your batch size.", Message("engine", form="pool")),
        ("«no space left for only one request»", Message("engine", form="pool")),
        ("RMM failure: «Maximum pool size exceeded»", Message("engine", form="pool")),
        (
            "Sequence group 3 is «preempted by PreemptionMode».SWAP mode",
            Message("engine", form="preempted", ran_out=False),
        ),
        ("«KV cache pool is full. Retract requests».", Message("engine", form="preempted", ran_out=False)),
        (
            "«failed to find free space in the KV cache, retrying» with smaller batch",
            Message("engine", form="preempted", ran_out=False),
        ),
        (
            "«Free memory on device (78.51/79.11 GiB) on startup.»",
            Message("engine", form="report", ran_out=False),
        ),
        # DeepSpeed
        (
            "«MA 1.00 GB Max_MA 2.00 GB CA 3.00 GB Max_CA 4 GB»",
            Message(
                "deepspeed-mem",
                fields={"MA": 1073741824, "Max_MA": 2147483648, "CA": 3221225472, "Max_CA": 4294967296},
                ran_out=False,
            ),
        ),
        (
            "After initializing optimizer states\n«MA 1 GB Max_MA 1 GB CA 1 GB Max_CA 1 GB»",
            Message(
                "deepspeed-mem", fields=dict.fromkeys(("MA", "Max_MA", "CA", "Max_CA"), 2**30), ran_out=False
            ),
        ),
    ],
)
def test_what_a_message_says(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected
