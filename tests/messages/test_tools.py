"""Messages of tools beside PyTorch: serving, launchers, schedulers, other runtimes; the wording of a log."""

from __future__ import annotations

from typing import Any, Final

import pytest

from memtriage import explain
from support.message_texts import records

MESSAGES: Final = records("oom_messages_tools")
TEXTS: Final = {message["id"]: message["text"] for message in MESSAGES}
PUBLIC: Final = records("oom_messages_2026b")
"""Texts of public threads, with the answers that they allow and words that the first advice may not have."""
OF_TRAINING: Final = ("micro-batch", "cross-entropy", "optimizer", "checkpointing")


@pytest.mark.parametrize("message", MESSAGES, ids=[message["id"] for message in MESSAGES])
def test_the_diagnosis_is_one_that_the_text_allows(message: dict[str, Any]) -> None:
    diagnosis = explain(message["text"])
    assert diagnosis.diagnosis in message["accept"]
    advice = " ".join(fix.action for fix in diagnosis.fixes)
    assert any(word in advice for word in OF_TRAINING) == message["training"]


@pytest.mark.parametrize("record", PUBLIC, ids=[record["id"] for record in PUBLIC])
def test_a_public_text(record: dict[str, Any]) -> None:
    explanation = explain(record["text"])
    assert explanation.diagnosis in record["accept"]
    if explanation.fixes:
        assert not [words for words in record["not_first"] if words in explanation.fixes[0].action]


ENGINE_POOL = "[torch_memory_saver] CUresult error: 2 (out of memory) file=utils.h func=cu_mem_create line=62"
SHARED = "unable to allocate shared memory(shm) for file </torch_7_8_9>:"
NO_FIGURES = "torch.AcceleratorError: CUDA error: out of memory"


@pytest.mark.parametrize(
    ("text", "diagnosis"),
    [
        ("Ran out of memory when regular VAE decoding, retrying with tiled VAE decoding.", "informational"),
        (f"{SHARED} Resource temporarily unavailable (11)", "shared_memory_exhausted"),
        (f"{SHARED} Bad file descriptor (9)", "shared_memory_exhausted"),
        (ENGINE_POOL, "unknown"),
        (f"in resume_memory_occupation\n{ENGINE_POOL}", "other_process_or_outside_allocator"),
        ("NVRM: nvAssertOkFailedNoLog: failed: Out of memory [NV_ERR_NO_MEMORY] (0x51)", "unknown"),
        ("EngineCore: trigger received signal=SIGTERM", "not_memory"),
        (f"received signal=SIGTERM\n{NO_FIGURES}", "unknown"),
        ("train.py returned non-zero exit status -15.", "unknown"),
        ("train.py returned non-zero exit status -9.", "killed_unproven"),
        ("rank 1: exit code 143\nrank 0: exit code 137", "killed_unproven"),
    ],
)  # fmt: skip
def test_a_wording(text: str, diagnosis: str) -> None:
    explanation = explain(text)
    assert explanation.diagnosis == diagnosis
    assert explanation.confidence >= 0.5, "it is no mere mention"
    if text.startswith(("NVRM", "[torch_memory_saver]")):
        assert explanation.settle is not None and "train.py" not in explanation.settle.command


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("Training Env: NVIDIA GB10", "page cache"),
        ("EngineCore_DP0 failed", "--mem-fraction-static"),
        ("got prompt: ComfyUI", "in pieces"),
        ("jax.errors.JaxRuntimeError", "free the device"),
        ("step 1", "memtriage run"),
        ("ComfyUI\n  loss.backward()", "memtriage run"),
    ],
)
def test_without_figures_the_kind_of_program_decides(log: str, first: str) -> None:
    explanation = explain(f"{log}\n{NO_FIGURES}")
    assert first in explanation.fixes[0].action
    watched = any("memtriage run" in fix.action for fix in explanation.fixes)
    assert watched == (log.startswith(("step", "Training Env")) or "backward" in log)


def test_a_batch_of_one_is_not_made_smaller() -> None:
    for setting in ("--micro-batch-size 1", "per_device_train_batch_size=1", '"batch_size": 1,'):
        assert "micro-batch" not in " ".join(fix.action for fix in explain(f"{setting}\n{FULL}").fixes)
    for setting in ("--micro-batch-size 16", "eval_batch_size=1", "batch_size: 1.5"):
        assert "micro-batch" in " ".join(fix.action for fix in explain(f"{setting}\n{FULL}").fixes)


FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 0 "
    "bytes is free. Of the allocated memory 79.00 GiB is allocated by PyTorch, and 0 bytes is reserved by "
    "PyTorch but unallocated."
)


def test_a_request_as_large_as_all_that_lives_is_a_copy_of_the_weights() -> None:
    text = FULL.replace("2.00", "79.00")
    assert "shard" in explain(text).fixes[0].action


def test_weights_that_fill_the_card_are_not_helped_by_a_smaller_share() -> None:
    log = "(EngineCore pid=7) Model loading took {} GiB memory and 2.5 seconds\n(EngineCore pid=7) "
    assert "fewer bytes of weights" in explain(log.format("78.5") + FULL).fixes[0].action
    assert "--mem-fraction-static" in explain(log.format("30.5") + FULL).fixes[0].action


def test_an_allocator_without_expandable_segments_is_not_advised_to_use_them() -> None:
    holes = FULL.replace("0 bytes is reserved", "30.00 GiB is reserved").replace("79.00", "49.00")
    assert "expandable" in explain(holes).fixes[0].action
    lacks = f"{holes}\nUserWarning: expandable_segments not supported on this platform"
    assert not [fix for fix in explain(lacks).fixes if "expandable" in fix.action]


@pytest.mark.parametrize("name", ["wrapped", "wrapped-words", "k8s-partial", "k8s", "json-log"])
def test_figures_survive_the_form_of_the_log(name: str) -> None:
    fields = explain(TEXTS[name]).fields
    mib = 1 << 20
    assert fields["requested"] == 3 * 1024 * mib
    assert fields["reserved_unallocated"] == 800 * mib


def test_an_engine_gets_its_own_settings_first() -> None:
    for name in ("sglang-capture", "vllm-oom"):
        first, second = explain(TEXTS[name]).fixes[:2]
        assert "--mem-fraction-static" in first.action
        assert "--cuda-graph-max-bs" in second.action


def test_training_beside_an_engine_is_training() -> None:
    frames = 'File "/a/vllm/v1/worker.py", line 3, in load\nTraceback (most recent call last):\n'
    frames += '  File "/a/train.py", line 9, in step\n    loss.backward()\n'
    frames += '  File "/a/torch/_tensor.py", line 630, in backward\n'
    actions = " ".join(fix.action for fix in explain(frames + TEXTS["rocm"]).fixes)
    assert "micro-batch" in actions
    assert "--mem-fraction-static" not in actions


@pytest.mark.parametrize(
    ("name", "requested"),
    [
        ("metal-size", 12288 << 20),
        ("numpy-whole-gib", 149 << 30),
        ("ollama-host-buffer", 437_944_320),
        ("mmap-file", 1_572_864_000),
    ],
)
def test_the_size_of_the_request_is_read(name: str, requested: int) -> None:
    assert explain(TEXTS[name]).fields["requested"] == requested


@pytest.mark.parametrize("name", ["mmap-file", "slurm-twice", "torchrun-sigkill"])
def test_a_second_report_of_one_failure_is_no_further_event(name: str) -> None:
    diagnosis = explain(TEXTS[name])
    assert {event.role for event in diagnosis.events} <= {"cause", "same"}
    assert not any("followed" in sentence for sentence in diagnosis.evidence)


@pytest.mark.parametrize(
    ("name", "command"),
    [("ray-actor", ""), ("container-limit", "docker inspect"), ("docker-inspect", "docker inspect")],
)
def test_what_only_the_system_knows_is_asked_of_it(name: str, command: str) -> None:
    diagnosis = explain(TEXTS[name])
    assert diagnosis.settle is not None and command in diagnosis.settle.command
    assert diagnosis.confidence < 0.9 or command


def test_a_shortage_of_the_host_is_not_treated_on_the_device() -> None:
    actions = " ".join(fix.action for fix in explain(TEXTS["ollama-host-buffer"]).fixes)
    assert "host memory" in actions
    assert "on the device" not in actions


def test_free_memory_that_the_text_does_not_name_is_not_called_zero() -> None:
    sentences = " ".join(explain(TEXTS["xpu-without-free"]).evidence)
    assert "0 bytes free" not in sentences
    assert "14.90 GiB allocated + 2.00 GiB requested exceed the device by 1.34 GiB" in sentences
