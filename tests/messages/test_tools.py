"""Messages of tools beside PyTorch: serving, launchers, schedulers, other runtimes; the wording of a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from memtriage import explain

MESSAGES: Final[list[dict[str, Any]]] = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "oom_messages_tools.jsonl").read_text().splitlines()
]
TEXTS: Final = {message["id"]: message["text"] for message in MESSAGES}
OF_TRAINING: Final = ("micro-batch", "cross-entropy", "optimizer", "checkpointing")


@pytest.mark.parametrize("message", MESSAGES, ids=[message["id"] for message in MESSAGES])
def test_the_diagnosis_is_one_that_the_text_allows(message: dict[str, Any]) -> None:
    diagnosis = explain(message["text"])
    assert diagnosis.diagnosis in message["accept"]
    advice = " ".join(fix.action for fix in diagnosis.fixes)
    assert any(word in advice for word in OF_TRAINING) == message["training"]


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


def test_what_ray_only_suspects_is_not_proven() -> None:
    diagnosis = explain(TEXTS["ray-actor"])
    assert diagnosis.confidence < 0.9
    assert diagnosis.settle is not None


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


def test_a_second_killed_process_is_an_event_of_its_own() -> None:
    line = "Killed process {} (python) total-vm:9kB, anon-rss:8kB, file-rss:0kB, shmem-rss:0kB"
    diagnosis = explain("\n".join(f"Memory cgroup out of memory: {line.format(pid)}" for pid in (7, 8)))
    assert [event.role for event in diagnosis.events] == ["cause", "followed"]


def test_free_memory_that_the_text_does_not_name_is_not_called_zero() -> None:
    sentences = " ".join(explain(TEXTS["xpu-without-free"]).evidence)
    assert "0 bytes free" not in sentences
    assert "14.90 GiB allocated + 2.00 GiB requested exceed the device by 1.34 GiB" in sentences


def test_a_container_is_not_asked_about_at_the_scheduler() -> None:
    for name in ("container-limit", "docker-inspect"):
        diagnosis = explain(TEXTS[name])
        assert diagnosis.settle is not None and "docker inspect" in diagnosis.settle.command


def test_a_shortage_of_the_host_is_not_treated_on_the_device() -> None:
    actions = " ".join(fix.action for fix in explain(TEXTS["ollama-host-buffer"]).fixes)
    assert "host memory" in actions
    assert "on the device" not in actions
