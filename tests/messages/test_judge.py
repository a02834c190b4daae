"""Each rule on figures, in its order, and each rule for messages of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtriage.messages.explain import explain
from memtriage.messages.grammar.message import Message, OomFields
from memtriage.messages.judge import judge, judge_figures
from memtriage.model.explanation import Label
from support.message_cases import GIB, MIB, failed

OTHERS = "other_process_or_outside_allocator"

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 "
    "has a total capacity of "
    "79.18 GiB of which 1.08 GiB is free. Of the allocated memory 77.31 GiB is allocated by PyTorch, and "
    "83.28 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("text", "diagnosis"),
    [
        ("Used 1.50G of 7.98G hbm, the rest ran out of memory", "unknown"),
        ("MemoryError: std::bad_alloc: CUDA error at: a.hpp:68: cudaErrorMemoryAllocation", "unknown"),
        (
            "MemoryError: std::bad_alloc: out_of_memory: RMM failure: Maximum pool size exceeded",
            "allocator_limit",
        ),
        # The program does not go on.
        ("failed to allocate 512 MiB\nreduce the batch size and try again", "unknown"),
        ("failed to allocate 512 MiB on the GPU: use the CPU", "unknown"),
        ("resource_tracker: There appear to be 4 leaked semaphore objects to clean up", "informational"),
        ("Not enough memory to handle 4096 prefill tokens.", "does_not_fit"),
        ("    self.pid = os.fork()\nOSError: [Errno 12] Cannot allocate memory", "host_alloc_failed"),
        ("Error while attaching to shared memory segment /dev/shm/nccl-a1 (size 4096)", "not_memory"),
        ("Your session crashed after using all available RAM.", "host_memory_limit"),
        ("the pod was oom-killed", "host_memory_limit"),
        ("CUDA error: device-side assert triggered", "not_memory"),
        ("OSError: [Errno 28] No space left on device: 'last.ckpt'", "not_memory"),
    ],
)
def test_the_diagnosis(text: str, diagnosis: str) -> None:
    found = explain(text)
    assert found.diagnosis == diagnosis
    assert found.evidence
    assert bool(found.fixes) == (diagnosis not in ("informational", "not_memory"))


METAL = (
    "MPS backend out of memory (MPS allocated: {own} GB, other allocations: {others} GB, "
    "max allowed: 9.07 GB). Tried to allocate 512.00 MB on private pool."
)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        # On Metal: the limit, unless others have more.
        (METAL.format(own="8.00", others="1.00"), ["allocator_limit", "does_not_fit"]),
        (METAL.format(own="4.00", others="4.00"), ["allocator_limit", "does_not_fit"]),
        (METAL.format(own="4.00", others="5.00"), [OTHERS, "allocator_limit"]),
        (
            METAL.format(own="8.00", others="1.00").replace(", max allowed: 9.07 GB", ""),
            ["does_not_fit", "allocator_limit"],
        ),
        ("Invalid buffer size: 48.00 GB", ["does_not_fit", "driver_refused_though_free", "allocator_limit"]),
    ],
)
def test_what_is_proven_and_what_is_not_ruled_out(text: str, labels: list[str]) -> None:
    found = explain(text)
    assert [found.diagnosis, *found.also_possible] == labels


CUT = {"requested": 2 * GIB, "total": 80 * GIB, "free": GIB}
ONE_BUFFER: tuple[Label, ...] = ("does_not_fit", "driver_refused_though_free", "allocator_limit")
UNTOLD: tuple[Label, ...] = ("unknown", "does_not_fit", "other_process_or_outside_allocator")


@pytest.mark.parametrize(
    ("message", "labels"),
    [
        # A text that ends inside of the allocated bytes: as GiB they fill the device, or prove nothing.
        (Message("cuda-v2", fields=CUT, facts={"allocated_cut": "68"}), ("does_not_fit", "unknown")),
        (Message("cuda-v2", fields=CUT, facts={"allocated_cut": "80"}), ("does_not_fit", "unknown")),
        (Message("cuda-v2", fields={**CUT, "free": 2 * GIB}, facts={"allocated_cut": "70"}), UNTOLD),
        (Message("cuda-v2", fields={"total": 80 * GIB}, facts={"allocated_cut": "70"}), UNTOLD),
        # Of any runtime
        (failed("survived", requested=9, total=8), ("informational",)),
        (failed(requested=9, total=8), ("does_not_fit",)),
        (failed(used=9, total=8), ("does_not_fit",)),
        (failed(requested=8, allowed=8), UNTOLD),
        (failed(requested=8, allowed=8, allocated=1), ("allocator_limit", "does_not_fit")),
        (failed("single", requested=9), ONE_BUFFER),
        (failed("single", requested=9, max_buffer=8), ONE_BUFFER),
        (failed("single", requested=8, max_buffer=8), ("unknown", "does_not_fit")),
        (failed(device="host", requested=8), ("host_alloc_failed",)),
        (failed(device="host", requested=8, free=8), ("host_alloc_failed",)),
        (failed(device="host", requested=8, free=7), ("does_not_fit", "host_alloc_failed")),
        (failed(requested=8, free=7), ("does_not_fit", "unknown")),
        (failed(requested=8, free=8), UNTOLD),
        (failed(requested=8, free=8 + 64 * MIB), ("driver_refused_though_free", "unknown")),
        (
            Message("allocation", form="failed", fields={"total": 8}, facts={"shape_bytes": 9}),
            ("does_not_fit",),
        ),
        (Message("allocation", form="failed", facts={"shape_bytes": 2**46}), ("absurd_request",)),
        (Message("npu-v2", fields=CUT | {"allocated": 78 * GIB}), ("does_not_fit",)),
        # By the words alone
        (Message("tensorrt", form="tactic"), ("informational",)),
        (Message("cuda-v2", facts={"absurd": "more than 1EB"}), ("absurd_request",)),
        (Message("python-alloc", fields={"requested": 2**46}), ("absurd_request",)),
        (Message("not-memory", form="disk"), ("not_memory",)),
        (Message("not-memory", form="no space"), ("not_memory", "shared_memory_exhausted")),
        (Message("aftermath", form="peer lost"), ()),
        (Message("mps", missing=("allocated",)), ("allocator_limit", "does_not_fit")),
        (Message("mps"), ("does_not_fit", "allocator_limit")),
    ],
)
def test_what_a_message_proves(message: Message, labels: tuple[Label, ...]) -> None:
    assert judge(message) == labels


# No text that speaks of memory gets a confident "unknown"


@pytest.mark.parametrize(
    "text",
    [
        "gizmo: out of memory",
        "error: Insufficient Memory (00000008:FrobErrorOutOfMemory)",
        "thread 3: device memory exhausted",
        "显存不足",
        "peak memory of the step: see the chart",
        "the allocator gave up",
        "CUDA error: invalid argument in tensor.pin_memory()",
    ],
)
def test_words_about_memory_in_no_known_form(text: str) -> None:
    diagnosis = explain(f"step 1\n{text}\nstep 2")
    assert diagnosis.diagnosis == "unknown"
    assert diagnosis.confidence <= 0.3
    assert text in diagnosis.evidence[0] and "line 2" in diagnosis.evidence[0]
    assert diagnosis.settle is not None
    if "memory" in text:  # in a long log only lines with that word are looked at
        diagnosis = explain("\n".join(["step done"] * 30_000 + [text] + ["step done"] * 10_000))
        assert (diagnosis.diagnosis, diagnosis.confidence) == ("unknown", 0.3)
        assert "line 30,001" in diagnosis.evidence[0]


def test_a_mention_gives_way_to_a_failure_and_not_to_a_report() -> None:
    report = "MA 1.00 GB Max_MA 2.00 GB CA 3.00 GB Max_CA 4 GB"
    assert explain(f"gizmo: out of memory\n{FULL}").diagnosis == "does_not_fit"
    assert explain(f"{report}\ngizmo: out of memory").diagnosis == "unknown"
    assert explain(report).diagnosis == "informational"


# Figures


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        # Two prints of one size are one message.
        (
            "allocating 144817.04 MiB on device 0: out of memory\n"
            "failed to allocate buffer of size 151851674624",
            {"requested": 151851672535},
        ),
        (
            "Out of memory allocating 8 MiB (allocated so far: 60 MiB, limit set to: 64 MiB)",
            {"requested": 8 << 20, "allocated": 60 << 20, "allowed": 64 << 20},
        ),
        # Figures of other lines are not taken.
        ("cache holds 12.00 GiB\nfailed to allocate 1.00 GiB\n3.00 GiB are free", {"requested": 1 << 30}),
    ],
)
def test_the_figures_of_a_text(text: str, fields: dict[str, int]) -> None:
    diagnosis = explain(text)
    assert diagnosis.fields == fields
    assert [event.count for event in diagnosis.events] == [1]


# Sentences and advice


def advice(text: str) -> str:
    return " ".join(fix.action for fix in explain(text).fixes)


@pytest.mark.parametrize(
    "text",
    [
        "Failed to allocate memory for requested buffer of size 939524096",
        "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total "
        "capacity; 10.24 GiB already "
        "allocated; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch)",
        "failed to allocate memory for requested buffer of size 9223372036854775296",
    ],
)
def test_no_settings_of_cuda_for_other_devices_and_libraries(text: str) -> None:
    diagnosis = explain(text)
    told = f"{advice(text)} {diagnosis.settle.command if diagnosis.settle else ''}"
    assert "CUDA" not in told and "torch." not in told


def test_what_sends_sigterm() -> None:
    (told,) = explain("failed (exitcode: -15) local_rank: 0 (pid: 7)").evidence
    assert "earlyoom" in told and "no out-of-memory killer" not in told


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            "unable to mmap 400 bytes from file </torch_7_8_9>: Cannot allocate memory (12)",
            "vm.max_map_count",
        ),
        ("unable to mmap 23802932552 bytes from file <a.safetensors>: Cannot allocate memory (12)", "swap"),
        (
            '  File "popen_fork.py", line 66, in _launch\nOSError: [Errno 12] Cannot allocate memory',
            "forkserver",
        ),
        ("OSError: [Errno 12] Cannot allocate memory", "find what holds the memory"),
        ("OSError: [WinError 1455] the paging file is too small", "page file"),
        ("[1] Killed process 7 (cc1plus) total-vm:9kB, anon-rss:8kB\nninja: build stopped", "MAX_JOBS"),
        (
            "Memory on the node (IP: 1, ID: 2) where the task (memory used=0.05GB) was "
            "running was 219.41GB / "
            "230.40GB (0.95), which exceeds the memory usage threshold of 0.95",
            "find what holds the memory",
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12 "
            "(Cannot allocate memory)",
            "find what holds the memory",
        ),
    ],
)
def test_the_first_advice_for_the_host(text: str, first: str) -> None:
    diagnosis = explain(text)
    assert first in diagnosis.fixes[0].action
    assert not any("that tensor in pieces" in fix.action for fix in diagnosis.fixes)


def test_a_build_has_no_workers() -> None:
    assert "DataLoader" not in advice(
        "nvcc fatal\n[9.0] Memory cgroup out of memory: Killed process 7 (python)"
    )


# What cannot cover the shortfall does not come first


def oom(asked: str, free: str, live: str, holes: str, processes: str = "") -> str:
    return (
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 22.30 GiB of which "
        f"{free} is free. {processes}Of the allocated memory {live} is allocated by PyTorch, and {holes} is "
        "reserved by PyTorch but unallocated."
    )


def test_other_processes_with_enough_come_before_holes() -> None:
    others = "Process 1 has 248.00 MiB memory in use. Process 2 has 248.00 MiB memory in use. "
    diagnosis = explain(
        oom(
            "1.71 GiB",
            "1.52 GiB",
            "19.55 GiB",
            "244.94 MiB",
            others + "Process 3 has 20.28 GiB memory in use. ",
        )
    )
    assert [fix.playbook for fix in diagnosis.fixes[:2]] == ["M3", "M5"]
    assert diagnosis.fixes[0].saves_bytes == 496 << 20


def test_others_are_no_answer_where_all_they_have_would_not_do() -> None:
    diagnosis = explain(oom("12.00 GiB", "100.00 MiB", "18.00 GiB", "100.00 MiB"))
    assert (diagnosis.diagnosis, diagnosis.also_possible) == ("does_not_fit", [])
    assert "M3" not in [fix.playbook for fix in diagnosis.fixes]


# Figures of a device

CARD = OomFields(
    requested=2 * GIB, total=80 * GIB, free=GIB, allocated=78 * GIB, reserved_unallocated=256 * MIB
)
"""A card that is plainly full."""
SMALL_MARGIN = {"free": 4 * GIB, "allocated": 68 * GIB, "allowed": 80 * GIB}
HOLES_AND_FREE = {"allocated": 67 * GIB, "reserved_unallocated": 10 * GIB, "free": 3 * GIB}
OTHERS_HAVE = {"reserved_unallocated": GIB, "free": GIB}


RULES: dict[str, tuple[dict[str, int | None], tuple[str, ...]]] = {
    "full": ({}, ("does_not_fit",)),
    "absurd": ({"requested": 2**46}, ("absurd_request",)),
    "spilled": ({"allocated": 81 * GIB}, ("system_memory_fallback", "does_not_fit")),
    "larger than the card": ({"requested": 81 * GIB}, ("does_not_fit",)),
    "cap": ({"allowed": 78 * GIB}, ("allocator_limit",)),
    "cap not reached": ({"allowed": 40 * GIB, "allocated": 20 * GIB}, (OTHERS,)),
    "free unknown": ({"free": None}, ("unknown", "does_not_fit", OTHERS)),
    "allocated unknown": ({"allocated": None}, ("unknown", "does_not_fit", OTHERS)),
    "total unknown": ({"total": None}, ("unknown", "does_not_fit", OTHERS)),
    "refused": ({"free": 4 * GIB, "allocated": 70 * GIB}, ("driver_refused_though_free", OTHERS)),
    "parked in graph pools": ({"private_pools": 3 * GIB}, ("private_pools", "does_not_fit")),
    "below live": ({"allocated": 67 * GIB, "reserved_unallocated": 11 * GIB}, ("fragmentation",)),
    "mostly live": (
        {"allocated": 68 * GIB, "reserved_unallocated": 10 * GIB},
        ("fragmentation", "does_not_fit"),
    ),
    "holes and free together": (
        {"allocated": 60 * GIB, "reserved_unallocated": 10 * GIB, "free": 9 * GIB, "requested": 12 * GIB},
        ("fragmentation", "does_not_fit"),
    ),
    "room at 60 percent": (
        {"free": None, "reserved_unallocated": 4 * GIB, "allocated": 40 * GIB, "requested": 4 * GIB},
        ("driver_refused_though_free", OTHERS, "unknown"),
    ),
    "large holes": (
        {"allocated": 60 * GIB, "reserved_unallocated": GIB, "requested": GIB, "free": 0},
        (OTHERS, "fragmentation"),
    ),
    "compaction leaves 5 percent": (HOLES_AND_FREE | {"requested": 9 * GIB}, ("fragmentation",)),
    "near the cap": (
        SMALL_MARGIN | {"reserved_unallocated": 6 * GIB + 1},
        ("driver_refused_though_free", "allocator_limit", "fragmentation"),
    ),
    "others cannot be ruled out": (
        OTHERS_HAVE | {"allocated": 73 * GIB, "requested": 3 * GIB},
        ("does_not_fit", OTHERS),
    ),
}


@pytest.mark.parametrize(("change", "labels"), RULES.values(), ids=RULES)
def test_each_rule_on_figures_decides(change: dict[str, int | None], labels: tuple[str, ...]) -> None:
    assert judge_figures(replace(CARD, **change)) == labels


def test_holes_that_were_cut_off_matter_only_where_they_decide() -> None:
    full = replace(CARD, reserved_unallocated=None)
    assert judge_figures(full)[0] == "does_not_fit"
    open_question = replace(full, allocated=40 * GIB)
    assert judge_figures(open_question) == ("unknown", "fragmentation", OTHERS)


AMOUNT = st.none() | st.integers(0, 2**47)


@settings(deadline=None)
@given(st.builds(OomFields, st.none(), AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT))
def test_any_figures_get_one_to_three_different_labels(fields: OomFields) -> None:
    labels = judge_figures(fields)
    assert 1 <= len(labels) <= 3
    assert len(set(labels)) == len(labels)


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_a_request_that_free_memory_covers_never_does_not_fit(
    asked: int, free: int, live: int, holes: int
) -> None:
    fields = OomFields(
        requested=asked * MIB,
        total=(asked + free + live + holes + 128) * MIB,
        free=(asked + 64 + free) * MIB,
        allocated=live * MIB,
        reserved_unallocated=holes * MIB,
    )
    assert judge_figures(fields)[0] == "driver_refused_though_free"
