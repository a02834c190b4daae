"""The finding of a program that died of memory: the position, the figures, and the advice that follows."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from memtriage.diagnose.out_of_memory import cause_of, describe
from memtriage.messages.errors import read_message
from memtriage.messages.grammar.message import OomFields
from memtriage.model.findings import Finding
from memtriage.model.position import TrainingPhase, TrainingPosition
from memtriage.playbook.entries import PLAYBOOK
from memtriage.playbook.out_of_memory import ADVICE, Cause
from support.message_texts import ERRORS

MIB = 1024**2
GIB = 1024**3

FULL, HOLES, SPILLED, OTHERS, CAPPED, REFUSED, ASYNC, CPU, NUMPY, WORKER, SHM, BARE, CUBLAS = (
    ERRORS[name]
    for name in (
        "full",
        "holes",
        "spilled",
        "others",
        "capped",
        "refused",
        "async",
        "cpu",
        "numpy",
        "worker",
        "shm",
        "bare",
        "cublas",
    )
)


def at(
    phase: TrainingPhase,
    step: int = 0,
    microbatch: int = 0,
    backwards: int = 0,
    elements: int | None = None,
    largest: int | None = None,
    *,
    grad_enabled: bool | None = None,
) -> TrainingPosition:
    """Where training stood; `elements` of the batch in work, after one of `largest`."""
    return TrainingPosition(
        phase=phase, step=step, microbatch=microbatch, backwards=backwards, grad_enabled=grad_enabled,
        batch_elements=elements, largest_batch=largest,
    )  # fmt: skip


LATE = at("forward", 40, 0, 40)
POSITIONS = [
    pytest.param(at("setup"), "cuda:0", "setup", "M4", id="setup"),
    pytest.param(at("setup"), "cpu", "setup on the host", "M3", id="setup-cpu"),
    pytest.param(at("forward"), "cuda:0", "first forward", "M4", id="first-forward"),
    pytest.param(at("forward"), "cpu", "first forward", "M4", id="first-forward-cpu"),
    pytest.param(at("backward"), "cuda:0", "first backward", "M14", id="first-backward"),
    pytest.param(at("forward", 0, 1, 1), "cuda:0", "second micro-batch", "M14", id="accumulation"),
    pytest.param(at("optimizer", 0, 1, 1), "cuda:0", "first optimizer step", "M17", id="first-step"),
    pytest.param(at("optimizer", 0, 4, 4), "cpu", "first optimizer step", "M17", id="first-step-cpu"),
    pytest.param(at("forward", 1, 0, 1), "cuda:0", "after the first step", "M17", id="second-forward"),
    pytest.param(at("backward", 1, 0, 1), "cuda:0", "after the first step", "M17", id="second-backward"),
    pytest.param(
        at("forward", 1, 0, 1, 900, 300),
        "cuda:0",
        "after the first step",
        "M17",
        id="second-and-longer",
    ),
    pytest.param(at("evaluation", 7, 0, 7), "cuda:0", "evaluation", "M15", id="evaluation"),
    pytest.param(
        at("evaluation", 7, 0, 7, grad_enabled=True),
        "cuda:0",
        "evaluation with gradients",
        "M15",
        id="evaluation-records",
    ),
    pytest.param(
        at("evaluation", 0, grad_enabled=False),
        "cpu",
        "evaluation without gradients",
        "M15",
        id="evaluation-before-training",
    ),
    pytest.param(
        replace(LATE, batch_elements=9, largest_batch=8), "cuda:0", "longest batch", "M16", id="longest"
    ),
    pytest.param(
        replace(LATE, batch_elements=8, largest_batch=8), "cuda:0", "growth", "M21", id="not-longer"
    ),
    pytest.param(LATE, "cuda:0", "unmeasured", "M19", id="sizes-unknown"),
    pytest.param(replace(LATE, phase="optimizer"), "cuda:0", "later optimizer step", "M21", id="later-step"),
    pytest.param(
        at("backward", 0, 900, 900, 64, 64),
        "cuda:0",
        "growth",
        "M21",
        id="micro-batches-without-steps",
    ),
    pytest.param(at("forward", 5, 0, 5), "host", "host", "M3", id="host"),
]


@pytest.mark.parametrize(("position", "device", "cause", "entry"), POSITIONS)
def test_the_position_decides(position: TrainingPosition, device: str, cause: Cause, entry: str) -> None:
    assert cause_of("", position, device) == cause
    finding = describe("", position, device, OomFields(), [], None)
    assert finding.playbook == entry
    assert (finding.kind, finding.device, finding.phase) == ("out_of_memory", device, position.phase)
    assert finding.step == position.step
    assert finding.bytes is None


def test_second_step_without_optimizer_state_is_ordinary() -> None:
    position = at("forward", 1, 0, 1, 64, 64)
    assert (
        cause_of("", position, "cuda:0", [("parameter", GIB), ("optimizer state", 2 * GIB)])
        == "after the first step"
    )
    assert cause_of("", position, "cuda:0", [("parameter", GIB), ("variable", 70 * GIB)]) == "growth"


def test_every_cause_is_reached_and_names_an_entry() -> None:
    reached = {cause_of("", position, device) for position, device, *_ in (case.values for case in POSITIONS)}
    reached |= {cause_of(text, LATE, "host") for text in (SHM, WORKER)}
    assert reached == set(ADVICE) == set(get_args(Cause))
    for advice in ADVICE.values():
        assert set(re.findall(r"\bM\d+\b", advice.fix)) | {advice.entry} <= PLAYBOOK.keys()


SHRINKS_FIRST = re.compile(r"^[^.;]*(smaller|reduce|lower)[^.;]*batch", re.IGNORECASE)


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_smaller_batch_comes_first_only_where_it_does_not_fit(cause: Cause) -> None:
    advice = ADVICE[cause]
    for fix in (advice.fix, advice.fix_on_cpu or ""):
        assert (SHRINKS_FIRST.match(fix) is not None) == (cause == "first forward" and fix != "")


@pytest.mark.parametrize("cause", get_args(Cause))
def test_advice_for_the_cpu_names_no_settings_of_the_gpu(cause: Cause) -> None:
    if cause in ("setup", "host", "worker", "shared memory"):
        return
    fix = ADVICE[cause].fix_on_cpu or ADVICE[cause].fix
    assert not re.search(r"expandable|foreach|CUDA|nvidia|8-bit|\.cpu\(\)", fix)


# The finding


def found_for(text: str, position: TrainingPosition = LATE, device: str = "cuda:0", **more: Any) -> Finding:
    return describe(
        text, position, device, read_message(text), more.pop("holders", []), more.pop("limit", None), **more
    )


def test_the_finding_of_a_full_card_in_the_first_backward() -> None:
    holders = [("saved for backward", 60 * GIB), ("parameter", 10 * GIB), ("buffer", GIB), ("variable", MIB)]
    position = at("backward")
    diagnosis = found_for(
        FULL, position, device="cuda:1", holders=holders, factored="1.96 GiB = 8 x 9 x 4 bytes (a x b)"
    )
    assert diagnosis.device == "cuda:0", "what the message says goes before what was guessed"
    assert diagnosis.bytes == 2104533975
    assert diagnosis.playbook == "M14"
    assert diagnosis.mechanism == (
        "The first backward asked for 2.0 GiB: gradients come on top of every activation that the forward "
        "saved; most of what was alive: saved for backward 60.0 GiB, parameter 10.0 GiB, buffer 1.0 GiB."
    )
    assert diagnosis.fix is not None and diagnosis.fix.startswith("Checkpoint")
    assert diagnosis.evidence == [
        "died in the backward, after 0 optimizer steps and 0 backwards",
        "an allocation on cuda:0 failed, not one of the host",
        "requested 1.96 GiB; 1.08 GiB free: 901.12 MiB short",
        "75.31 GiB allocated + 1.83 GiB in holes (reserved but unallocated) + 1.08 GiB free + 983.04 MiB "
        "outside this process's allocator = 79.18 GiB, the device",
        "live bytes fill 95% of the device; closing every hole would leave 972.80 MiB, 1.2% of it",
        "alive at that instant: saved for backward 60.0 GiB, parameter 10.0 GiB, buffer 1.0 GiB, "
        "variable 1.0 MiB",
        "the request may be 1.96 GiB = 8 x 9 x 4 bytes (a x b)",
    ]


def test_the_finding_of_a_cpu_tensor() -> None:
    diagnosis = found_for(CPU, at("forward"), device="host", limit="cgroup memory.max, 8.0 GiB")
    assert (diagnosis.device, diagnosis.bytes, diagnosis.playbook) == ("cpu", 116813856768, "M4")
    assert diagnosis.evidence[1:] == [
        "a host allocation failed (a CPU tensor): GPU advice does not help",
        "requested 108.79 GiB",
        "the limit: cgroup memory.max, 8.0 GiB",
    ]


@pytest.mark.parametrize(
    ("text", "entry", "first"),
    [
        (SHM, "M3", "Give /dev/shm more room"),
        (WORKER, "M3", "Use fewer DataLoader workers"),
        ("MemoryError", "M3", "Hold less in host memory"),
        (NUMPY, "M3", "Find the length or the index"),
    ],
)
def test_failures_of_the_host_get_advice_for_the_host(text: str, entry: str, first: str) -> None:
    diagnosis = found_for(text, replace(LATE, phase="backward"))
    assert (diagnosis.device, diagnosis.playbook) == ("host", entry)
    assert diagnosis.fix is not None and diagnosis.fix.startswith(first)
    assert "a host allocation failed: GPU advice does not help" in diagnosis.evidence


@pytest.mark.parametrize(
    ("text", "first", "fact"),
    [
        pytest.param(HOLES, "Turn on expandable segments first", "2.30 GiB is free in holes", id="holes"),
        pytest.param(OTHERS, "Free the device first", "13.17 GiB outside the allocator are 82%", id="others"),
        pytest.param(CAPPED, "Raise or remove the cap", "exceed the cap of 1.20 GiB", id="cap"),
        pytest.param(
            REFUSED,
            "Look for what makes the driver refuse",
            "the driver refused though memory was free",
            id="refused",
        ),
        pytest.param(SPILLED, "Compare", "5.67 GiB have spilled to system memory", id="spilled"),
        pytest.param(
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "Find the length or the index",
            "no machine has that much",
            id="1EB",
        ),
        pytest.param(FULL, "Compare", "901.12 MiB short", id="plainly-full"),
    ],
)
def test_what_the_figures_prove_comes_first(text: str, first: str, fact: str) -> None:
    diagnosis = found_for(text)
    assert diagnosis.fix is not None and diagnosis.fix.startswith(first)
    assert any(fact in line for line in diagnosis.evidence)


def test_a_request_larger_than_the_device_is_said_so() -> None:
    text = FULL.replace("Tried to allocate 1.96 GiB", "Tried to allocate 90.00 GiB")
    assert any("the request alone exceeds the device" in line for line in found_for(text).evidence)


def test_messages_without_sizes_say_who_may_have_asked() -> None:
    assert any("pinned host memory" in line for line in found_for(BARE).evidence)
    assert any("by a library failed on cuda:0" in line for line in found_for(CUBLAS).evidence)


def test_the_longest_batch_is_shown_with_both_sizes() -> None:
    diagnosis = found_for(FULL, replace(LATE, batch_elements=65536, largest_batch=8192))
    assert diagnosis.playbook == "M16"
    assert (
        "the batch in work has 65,536 elements, the largest before it 8,192 (8.00 times)"
        in diagnosis.evidence
    )


@pytest.mark.parametrize(("enabled", "word"), [(True, "enabled"), (False, "disabled")])
def test_evaluation_says_whether_gradients_were_on(enabled: bool, word: str) -> None:
    diagnosis = found_for(FULL, at("evaluation", 3, 0, 3, grad_enabled=enabled))
    assert f"gradients were {word}" in diagnosis.evidence
    assert diagnosis.fix is not None
    assert ("no_grad" in diagnosis.fix) == enabled


@settings(deadline=None)
@given(
    st.builds(
        TrainingPosition,
        phase=st.sampled_from(get_args(TrainingPhase)),
        step=st.integers(0, 3),
        microbatch=st.integers(0, 3),
        backwards=st.integers(0, 3),
        batch_elements=st.none() | st.integers(0, 100),
        largest_batch=st.none() | st.integers(0, 100),
        grad_enabled=st.none() | st.booleans(),
    ),
    st.sampled_from(["cpu", "host", "cuda:3"]),
    st.sampled_from([FULL, CPU, NUMPY, SHM, BARE, CUBLAS, ASYNC, ""]),
)
def test_every_position_gets_a_whole_finding(position: TrainingPosition, device: str, text: str) -> None:
    diagnosis = found_for(text, position, device)
    assert diagnosis.playbook in PLAYBOOK
    assert (
        diagnosis.mechanism is not None
        and diagnosis.mechanism.endswith(".")
        and "{" not in diagnosis.mechanism
    )
    assert diagnosis.fix is not None and diagnosis.fix.endswith(".")
    assert all(diagnosis.evidence)


def leak(device: str = "cuda:0", **rate: int) -> Finding:
    return Finding(kind="leak", device=device, holder="train.losses[*]", fix="append loss.detach()", **rate)


FITTED = {
    "growth": replace(LATE, batch_elements=300, largest_batch=900),
    "unmeasured": LATE,
    "later optimizer step": replace(LATE, phase="optimizer"),
}


@pytest.mark.parametrize("cause", FITTED)
@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ({"bytes_per_step": 30 * MIB}, "30.0 MiB per step over 40 steps is 1.2 GiB by now"),
        ({"bytes_per_microbatch": 60 * MIB}, "60.0 MiB per micro-batch over 40 is 2.3 GiB by now"),
    ],
)
def test_a_leak_that_led_there_is_named_and_its_cure_is_the_fix(
    cause: Cause, rate: dict[str, int], said: str
) -> None:
    holders = [("autograd context", 3 * GIB)]
    fields = OomFields(device="cuda:0", requested=GIB)
    leaks = [leak(bytes_per_step=1), leak(**rate)]
    died = describe(FULL, FITTED[cause], "cuda:0", fields, holders, None, leaks=leaks)
    assert cause_of(FULL, FITTED[cause], "cuda:0", holders) == cause
    assert died.mechanism is not None
    assert re.search(rf"fitted(?: before)?: a leak of {said}; most of what was alive: auto", died.mechanism)
    assert died.fix == "Fix the leak of train.losses[*]: append loss.detach()"
    assert died.playbook == "M21"
    bare = describe(FULL, FITTED[cause], "cuda:0", fields, [], None, leaks=leaks)
    assert bare.mechanism is not None
    assert bare.mechanism.endswith(f": a leak of {said}.")


@pytest.mark.parametrize(
    ("position", "leaks"),
    [
        pytest.param(LATE, [], id="no-leak"),
        pytest.param(LATE, [leak(bytes_per_step=20 * MIB)], id="less-than-was-asked-for"),
        pytest.param(LATE, [leak("cpu", bytes_per_step=GIB)], id="elsewhere"),
        pytest.param(replace(LATE, step=0, backwards=0), [leak(bytes_per_step=GIB)], id="first-forward"),
        pytest.param(
            replace(LATE, batch_elements=900, largest_batch=300),
            [leak(bytes_per_step=GIB)],
            id="longest-batch",
        ),
    ],
)
def test_a_leak_that_did_not_lead_there_changes_nothing(
    position: TrainingPosition, leaks: list[Finding]
) -> None:
    fields = OomFields(device="cuda:0", requested=GIB)
    assert describe(FULL, position, "cuda:0", fields, [], None, leaks=leaks) == describe(
        FULL, position, "cuda:0", fields, [], None
    )
