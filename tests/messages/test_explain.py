"""What a text proves: the label, the first cause of a log, fixes that can help, and stale advice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.explain import explain
from memtriage.messages.judge import judge
from memtriage.model.explanation import Explanation, Label, Maths
from memtriage.playbook.entries import LADDER, PLAYBOOK
from support.message_texts import records

RECORDS = records("oom_messages")
RECORDS_2026 = records("oom_messages_2026")
"""Messages of 2025 and 2026, most of them of other libraries than PyTorch."""
DOCUMENTED = Path(__file__).parents[2] / "docs" / "explain.md"
TEXT = {record["id"]: record["text"] for record in RECORDS}
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of "
    "79.18 GiB of which 1.08 GiB is free. Of the allocated memory 77.31 GiB is allocated by PyTorch, and "
    "83.28 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
    "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
HOLES = FULL.replace("77.31 GiB", "60.00 GiB").replace("83.28 MiB", "17.00 GiB")
SMALLER_BATCH = re.compile(r"(smaller|reduce|lower|decrease)[^.,;]*batch", re.IGNORECASE)


def actions(explanation: Explanation) -> list[str]:
    return [fix.playbook for fix in explanation.fixes]


# Real messages


@pytest.mark.parametrize("record", RECORDS, ids=[record["id"] for record in RECORDS])
def test_a_real_message(record: dict[str, Any]) -> None:
    diagnosis = explain(record["text"])
    assert diagnosis.diagnosis in record["accept"]
    assert diagnosis.fields == (record.get("bytes") or {})
    assert set(diagnosis.also_possible) <= set(record["accept"])
    assert 0 < diagnosis.confidence < 1
    assert diagnosis.evidence and all(diagnosis.evidence)
    assert diagnosis.events[0].role == "cause"
    assert bool(diagnosis.fixes) == (diagnosis.diagnosis not in ("informational", "not_memory"))
    for fix in diagnosis.fixes:
        assert fix.playbook in PLAYBOOK
        assert fix.math in get_args(Maths)
        assert fix.saves_bytes is None or fix.saves_bytes > 0
    # Holes of less than 2 % of the device are no reason to put off what lowers the peak.
    holes, total = (diagnosis.fields.get(name) or 0 for name in ("reserved_unallocated", "total"))
    full = diagnosis.also_possible == ["fragmentation"] and 50 * holes < total
    if diagnosis.fixes and not (
        diagnosis.diagnosis == "does_not_fit" and (full or not diagnosis.also_possible)
    ):
        assert not SMALLER_BATCH.search(diagnosis.fixes[0].action)
    device_failed = record["family"].startswith(("cuda", "hip", "xpu", "mps"))
    if not device_failed and diagnosis.diagnosis.startswith(("host", "killed", "shared")):
        assert not any("GPU" in fix.action or "expandable" in fix.action for fix in diagnosis.fixes)


@pytest.mark.parametrize("record", RECORDS_2026, ids=[record["id"] for record in RECORDS_2026])
def test_a_real_message_of_any_library(record: dict[str, Any]) -> None:
    diagnosis = explain(record["text"])
    assert diagnosis.diagnosis in record["accept"]
    assert diagnosis.evidence and all(diagnosis.evidence)
    assert bool(diagnosis.fixes) == (diagnosis.diagnosis not in ("informational", "not_memory"))
    assert diagnosis.diagnosis != "unknown" or diagnosis.confidence <= 0.65
    assert any(event.role in ("cause", "context") for event in diagnosis.events)
    told = [size for size in diagnosis.fields.values() if isinstance(size, int)]
    for size in (record.get("bytes") or {}).values() if told else ():
        assert size in told, "each figure under whatever name"


def test_the_ladder_is_kept_in_order_of_cost() -> None:
    rungs = [name for name in actions(explain(FULL)) if name in LADDER]
    order = list(dict.fromkeys(rungs))
    assert order == [name for name in LADDER if name in order]
    assert order[0] == "M5"


# What is asked and what can help


def test_a_refusal_though_memory_is_free() -> None:
    diagnosis = explain(TEXT["oom-003"])
    assert (
        diagnosis.evidence[0]
        == "requested 12.50 MiB; 9.28 GiB free: the driver refused though memory was free"
    )
    assert diagnosis.settle is not None and "torch.empty(13107200" in diagnosis.settle.command


def test_holes_are_cured_by_expandable_segments() -> None:
    diagnosis = explain(HOLES)
    assert (diagnosis.diagnosis, diagnosis.confidence) == ("fragmentation", 0.95)
    assert (diagnosis.fixes[0].playbook, diagnosis.fixes[0].saves_bytes) == ("M8", 17 * 1024**3)
    assert diagnosis.stale_advice is None


def test_the_request_is_factored() -> None:
    diagnosis = explain(TEXT["oom-049"], {"tokens": 30688, "vocab": 151936, "hidden": 4096})
    line = "17.37 GiB = 30,688 x 151,936 x 4 bytes (tokens x vocab): fp32 logits"
    assert line in diagnosis.evidence
    assert (diagnosis.fixes[0].playbook, diagnosis.fixes[0].saves_bytes) == ("M14", 18650895483)


def test_what_this_process_has_outside_its_allocator_is_no_others() -> None:
    whole = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.18 GiB of which "
        "1.00 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the "
        "allocated memory 40.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but "
        "unallocated."
    )
    diagnosis = explain(whole)
    assert diagnosis.diagnosis == "other_process_or_outside_allocator"
    assert "M3" not in actions(diagnosis)
    assert diagnosis.fixes[0].playbook == "M18"


# Logs

TAG = "[rank{}]: {}"
WATCHDOG = "[Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)"
KERNEL = (
    "Memory cgroup out of memory: Killed process 4242 (python) total-vm:53312244kB, anon-rss:31451456kB, "
    "file-rss:74816kB, shmem-rss:12296kB"
)


def test_the_first_failure_is_the_cause_and_the_rest_follows() -> None:
    log = [f"step {i}" for i in range(400)]
    log += [TAG.format(5, FULL), *(TAG.format(rank, WATCHDOG.format(rank)) for rank in range(5))]
    log += [
        TAG.format(6, HOLES),
        "Sending process 123 closing signal SIGTERM",
        "failed (exitcode: 1) local_rank: 5",
    ]
    diagnosis = explain("\n".join(log))
    assert diagnosis.diagnosis == "does_not_fit"
    cause, *after = diagnosis.events
    assert (cause.role, cause.line, cause.ranks) == ("cause", 401, [5])
    assert {event.role for event in after} == {"followed"}
    assert "from line 402, as a consequence: collective timed out on ranks 0-4" in diagnosis.evidence
    assert "from line 407, as a consequence: fragmentation on rank 6" in diagnosis.evidence


def test_reports_of_memory_before_the_failure_are_its_context() -> None:
    diagnosis = explain(f"{TEXT['oom-179']}\n" * 3 + FULL)
    assert diagnosis.diagnosis == "does_not_fit"
    assert [event.role for event in diagnosis.events] == ["context", "cause"]


def test_a_kill_alone_is_never_called_out_of_memory() -> None:
    diagnosis = explain(TEXT["oom-167"])
    assert (diagnosis.diagnosis, diagnosis.also_possible) == ("killed_unproven", ["host_memory_limit"])
    assert diagnosis.settle is not None and "memory.events" in diagnosis.settle.command


@pytest.mark.parametrize("order", [1, -1])
def test_the_kernel_s_line_explains_a_kill(order: int) -> None:
    log = [TEXT["oom-167"], KERNEL][::order]
    diagnosis = explain("\n".join(log))
    assert diagnosis.diagnosis == "host_memory_limit"
    assert diagnosis.fields["anon_rss"] == 31451456 * 1024


BARE = "CUDA error: out of memory"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ([BARE, FULL], 2),
        ([BARE, *["step"] * 200, FULL], 1),
        ([TAG.format(1, BARE), TAG.format(2, FULL)], 1),
        ([BARE, "DefaultCPUAllocator: you tried to allocate 8 bytes"], 1),
        ([BARE, "memory allocation of 8589934592 bytes failed"], 1),
        ([BARE, BARE], 1),
    ],
)
def test_a_failure_without_figures_is_that_of_the_next_message_with_some(log: list[str], cause: int) -> None:
    events = explain("\n".join(log)).events
    assert [event.line for event in events if event.role == "cause"] == [cause]


SLURM = "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0"


@pytest.mark.parametrize(
    ("log", "roles"),
    [
        ([KERNEL, SLURM], ["cause", "same"]),
        ([KERNEL, *["step"] * 200, SLURM], ["cause", "followed"]),
        ([TAG.format(1, KERNEL), TAG.format(2, SLURM)], ["cause", "followed"]),
        ([KERNEL, KERNEL.replace("4242", "4243")], ["cause", "followed"]),
        ([KERNEL, "MemoryError"], ["cause", "followed"]),
    ],
)
def test_layers_that_report_one_kill_are_told_from_a_second_one(log: list[str], roles: list[str]) -> None:
    assert [event.role for event in explain("\n".join(log)).events] == roles


@pytest.mark.parametrize(
    ("text", "confidence", "evidence"),
    [
        ("step 1\nstep 2", 0.95, "no message about memory in 2 lines"),
        ("ValueError: 3", 0.95, "no message about memory in 1 line"),
        ("step 1\npeak memory 3", 0.3, "line 2 mentions memory, in an unknown form: peak memory 3"),
    ],
)
def test_a_text_without_a_failure_says_so(text: str, confidence: float, evidence: str) -> None:
    diagnosis = explain(text)
    assert (diagnosis.confidence, diagnosis.evidence) == (confidence, [evidence])
    assert (diagnosis.diagnosis, diagnosis.fields, diagnosis.fixes) == ("unknown", {}, [])


@pytest.mark.parametrize(
    "line", ["failed (exitcode: -15) local_rank: 1 (pid: 7)", "config: kill_signal=SIGKILL"]
)
def test_a_signal_that_ended_nothing_is_no_cause(line: str) -> None:
    assert explain(f"{line}\n{FULL}").diagnosis == "does_not_fit"


def test_a_log_of_those_who_waited_says_where_to_look() -> None:
    diagnosis = explain("\n".join(TAG.format(rank, WATCHDOG.format(rank)) for rank in (0, 1)))
    assert diagnosis.diagnosis == "unknown"
    assert diagnosis.evidence[0] == "only consequences of a failure elsewhere"
    assert diagnosis.settle is not None and "first failure" in diagnosis.settle.fact


# Laws


def test_what_is_cut_lowers_confidence() -> None:
    assert explain(TEXT["oom-053"]).confidence == pytest.approx(0.65 * 0.8)
    assert explain(TEXT["oom-079"]).confidence == 0.95, "the request alone decides"


def test_every_documented_family_is_read() -> None:
    texts = [record["text"] for record in (*RECORDS, *RECORDS_2026)]
    reached = {event.family for text in texts for event in explain(text).events}
    others = {"cuda-async", "aftermath", "notebook", "npu-v2", "mention"}
    table = DOCUMENTED.read_text().partition("| family |")[2].partition("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert reached | others == {family for row in rows for family in re.findall("`([^`]+)`", row)}


def test_labels_that_no_text_proves_are_never_first() -> None:
    first = {explain(record["text"]).diagnosis for record in RECORDS}
    assert first == set(get_args(Label)) - {"pinned_host", "eval_or_graph_retention"}


@settings(deadline=None)
@given(st.sampled_from(RECORDS), st.integers(0, 900), st.binary(max_size=60), st.integers(0, 900))
def test_any_text_is_explained(record: dict[str, Any], cut: int, noise: bytes, at: int) -> None:
    text = record["text"][:cut]
    text = text[:at] + noise.decode("utf-8", "surrogateescape") + text[at:]
    diagnosis = explain(text, {"batch": 2, "seq": 64, "vocab": 1000})
    assert diagnosis.diagnosis in get_args(Label)
    assert 0 < diagnosis.confidence < 1
    assert msgspec.json.decode(msgspec.json.encode(diagnosis), type=Explanation) == diagnosis


@settings(deadline=None)
@given(st.text())
def test_any_string_is_explained(text: str) -> None:
    assert explain(text).schema == 1


def test_a_message_without_a_rule_would_be_seen() -> None:
    """Each message that is found has labels, unless it is one of those that follow."""
    from memtriage.messages.grammar.find import find

    for record in RECORDS:
        assert all(judge(each.message) for each in find(record["text"]))
