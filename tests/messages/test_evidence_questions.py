"""What a diagnosis leaves open, how to find it out, and when the message's own advice is no help."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memtriage import explain
from memtriage.messages.case import Case
from memtriage.messages.evidence import settle, stale_advice
from memtriage.messages.grammar.message import Message
from memtriage.model.explanation import Field, Label
from support.message_cases import GIB, device_case, failed, sizes_case, text_case
from support.message_texts import TEXTS

OUTSIDE: Label = "other_process_or_outside_allocator"
OPEN = replace(device_case("does_not_fit"), labels=("does_not_fit", "fragmentation"))


@pytest.mark.parametrize(
    ("case", "command"),
    [
        (OPEN, "memtriage run train.py"),
        (replace(OPEN, traits={"generates"}), "nvidia-smi"),
        (replace(OPEN, serving=True), "nvidia-smi"),
        (replace(OPEN, message=failed("single")), "grep -n -B5"),
        (device_case(OUTSIDE), "nvidia-smi"),
        (device_case(OUTSIDE, "hip-v2"), "rocm-smi"),
        (sizes_case(OUTSIDE, "xpu-v2", device="xpu:0"), "xpu-smi"),
        (sizes_case(OUTSIDE, "npu-v2", device="npu:3"), "npu-smi"),
        (sizes_case(OUTSIDE, "mps", device="mps"), "footprint"),
        (sizes_case("unknown", "allocation", "failed", "tpu"), "tpu-info"),
        (sizes_case("unknown", "allocation", "failed", "host"), "ps aux"),
        (sizes_case("allocator_limit", "mps", device="mps"), "PYTORCH_MPS_HIGH_WATERMARK_RATIO"),
        (device_case("allocator_limit"), "gpu_memory_utilization"),
        (
            device_case("driver_refused_though_free"),
            f"torch.empty({2 * GIB}, dtype=torch.uint8, device='cuda:0')",
        ),
        (sizes_case("driver_refused_though_free", "allocation", device="cuda:0"), "nvidia-smi"),
        (text_case("unknown", "cuda-runtime"), "CUDA_LAUNCH_BLOCKING=1"),
        (device_case("absurd_request"), "CUDA_LAUNCH_BLOCKING=1"),
        (sizes_case("absurd_request", "cpu-alloc", device="cpu"), "faulthandler"),
        (text_case("host_memory_limit", "slurm", job="77"), "sacct -j 77 "),
        (text_case("host_memory_limit", "slurm"), "sacct -j JOBID "),
        (text_case("killed_unproven", "launcher", "killed"), "memory.events"),
        (text_case("shared_memory_exhausted", "shm"), "df -h /dev/shm"),
    ],
)
def test_what_would_settle_it(case: Case, command: str) -> None:
    question = settle(case)
    assert question is not None and command in question.command


@pytest.mark.parametrize("label", ["does_not_fit", "fragmentation", "private_pools", "informational"])
def test_what_is_proven_needs_no_question(label: Label) -> None:
    assert settle(device_case(label)) is None


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_open_in_any_text_has_a_question(name: str) -> None:
    explanation = explain(TEXTS[name])
    if explanation.diagnosis == "unknown":
        assert explanation.settle is not None
    if explanation.settle is not None:
        assert explanation.settle.fact and "{" not in explanation.settle.command.replace("{print", "")


HINT = "PYTORCH_ALLOC_CONF=expandable_segments:True"


def advised(hint: str, *labels: Label, expandable: bool = False, **fields: Field) -> Case:
    message = Message("cuda-v2", fields=fields, facts={"hint": hint})
    return Case(message, labels, expandable=expandable)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case(Message("cuda-v2"), ("does_not_fit",)), None),
        (advised("empty_cache", "fragmentation"), "empty_cache() cannot help"),
        (advised("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "allocator_limit", "does_not_fit"), "frees nothing"),
        (advised("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0", "allocator_limit"), None),
        (advised(HINT, "fragmentation"), None),
        (advised(HINT, "fragmentation", expandable=True), "already on"),
        (advised("max_split_size_mb", "fragmentation", expandable=True), "older advice"),
        (
            advised(HINT, "does_not_fit", reserved_unallocated=GIB, requested=2 * GIB),
            "1024.00 MiB in holes, 2.00 GiB asked: ",
        ),
        (advised(HINT, "does_not_fit", requested=GIB), "its figures do not support it"),
    ],
)
def test_when_the_message_s_own_advice_is_no_help(case: Case, told: str | None) -> None:
    advice = stale_advice(case)
    assert (advice is None) == (told is None)
    assert told is None or told in (advice or "")
