"""What a diagnosis rests on: the sums of the figures, and the comparison or the words that decide."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtriage import explain
from memtriage.messages.case import Case
from memtriage.messages.evidence import evidence, proof, sums
from memtriage.messages.forms import FORMS
from memtriage.messages.grammar.message import SIZE, Message, OomFields, as_printed, to_bytes
from memtriage.messages.judge import judge_figures
from memtriage.model.explanation import Label
from support.message_cases import GIB, MIB, device_case, sizes_case, text_case
from support.message_texts import TEXTS

FIGURE = re.compile(SIZE)


def printed(sentence: str) -> list[int]:
    """The sizes in a sentence, in order."""
    return [to_bytes(*size) or 0 for size in FIGURE.findall(sentence.replace(" ", ""))]


BYTES = st.integers(0, 60 * GIB)


@given(requested=BYTES, free=BYTES, allocated=BYTES, holes=BYTES, rest=BYTES)
def test_the_parts_of_the_device_are_its_size(
    requested: int, free: int, allocated: int, holes: int, rest: int
) -> None:
    total = free + allocated + holes + rest
    figures = OomFields("cuda:0", requested, total, free, allocated, holes)
    asked, parts = sums("does_not_fit", figures)
    *shares, device = printed(parts)
    error = 6 * MIB * len(shares) + (64 * MIB if len(shares) == 3 else 0)
    assert abs(sum(shares) - device) <= error and abs(device - total) <= 6 * MIB
    want, have, *short = printed(asked)
    assert abs(want - requested) <= 6 * MIB and abs(have - free) <= 6 * MIB
    assert bool(short) == (requested > free)


@given(requested=BYTES, free=BYTES, allocated=BYTES, holes=BYTES, rest=BYTES)
def test_every_judgment_of_figures_is_proved(
    requested: int, free: int, allocated: int, holes: int, rest: int
) -> None:
    figures = OomFields("cuda:0", requested, free + allocated + holes + rest, free, allocated, holes)
    label = judge_figures(figures)[0]
    sentences = list(proof(label, figures))
    assert len(sentences) == (label != "driver_refused_though_free")
    assert all("-" not in sentence.replace("-up", "") for sentence in sentences), "nothing is negative"


def test_a_headline_is_not_refuted_by_its_figures() -> None:
    case = device_case("does_not_fit", free=GIB, allocated=77 * GIB, reserved_unallocated=GIB - MIB)
    (closing,) = [sentence for sentence in evidence(case) if "every hole" in sentence]
    assert closing.endswith(f"exceeds it by {as_printed(MIB)}")
    assert f"to fit with 5 % of the device to spare, free {as_printed(GIB + 4 * GIB)}" in evidence(case)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (device_case("absurd_request", requested=2**50), "no machine has that much"),
        (device_case("system_memory_fallback", allocated=90 * GIB), "10.00 GiB have spilled"),
        (device_case("does_not_fit", requested=81 * GIB), "the request alone exceeds the device"),
        (device_case("private_pools", private_pools=3 * GIB, allocated=70 * GIB), "67.00 GiB is live"),
        (device_case("allocator_limit", allowed=40 * GIB, allocated=39 * GIB), "the cap of 40.00 GiB"),
        (device_case("does_not_fit", requested=2 * MIB), "any tensor of up to 1 MiB"),
        (device_case("does_not_fit", reserved_unallocated=None), "not in the text: reserved unallocated"),
        (
            device_case("does_not_fit", processes=[{"pid": 7, "in_use": 3 * GIB}], this_process=GIB),
            "other processes have 3.00 GiB on the device: pid 7 (3.00 GiB)",
        ),
        (sizes_case("host_alloc_failed", "cpu-alloc", requested=GIB), "requested 1024.00 MiB (exactly)"),
        (
            sizes_case(
                "allocator_limit", "mps", allocated=GIB, other=GIB, requested=GIB, max_allowed=2 * GIB
            ),
            "= 3.00 GiB, over the limit of 2.00 GiB",
        ),
        (
            sizes_case("does_not_fit", "allocation", "failed", used=9 * GIB, total=8 * GIB),
            "1024.00 MiB too much",
        ),
        (
            sizes_case("unknown", "allocation", "failed", "cuda:0"),
            "neither what was free nor what used the rest",
        ),
        (sizes_case("does_not_fit", "allocation", "single", max_buffer=GIB), "have 1024.00 MiB at most"),
        (sizes_case("host_alloc_failed", "allocation", "failed"), "the request is for host memory"),
        (sizes_case("host_memory_limit", "ray", node_used=9 * GIB, node_total=10 * GIB), "of 10.00 GiB"),
        (sizes_case("host_memory_limit", "kernel-oom", anon_rss=3 * GIB), "3.00 GiB of its own"),
        (text_case("host_memory_limit", "kernel-oom", "cgroup", comm="python"), "a cgroup was at its limit"),
        (
            sizes_case(
                "other_process_or_outside_allocator",
                "vllm",
                "startup",
                free=5 * GIB,
                total=8 * GIB,
                desired=7 * GIB,
            ),
            "3.00 GiB is in use by other processes",
        ),
    ],
)
def test_what_decides_is_told(case: Case, words: str) -> None:
    assert any(words in sentence for sentence in evidence(case))


def test_every_form_says_why() -> None:
    """A form that proves a label says so in words, unless a sentence is made from its figures."""
    silent = {key for key, form in FORMS.items() if not form.why}
    assert {family for family, _ in silent} == {"kernel-oom", "vllm"}
    for family, form in FORMS:
        labels = FORMS[family, form].labels
        assert labels and set(labels) <= set(get_args(Label))
        if (family, form) not in silent:
            told = evidence(Case(Message(family, form), labels))
            assert FORMS[family, form].why in told


@pytest.mark.parametrize("name", TEXTS)
def test_laws_of_the_evidence_of_any_text(name: str) -> None:
    told = explain(TEXTS[name]).evidence
    assert told and all(told) and len(set(told)) == len(told)
    assert not any("None" in sentence or "{" in sentence for sentence in told if "form: " not in sentence)
