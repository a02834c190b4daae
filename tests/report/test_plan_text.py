import pytest

from memtriage.model.plan import Cheaper, LargestSize, Maximum, PassedOver, Plan, PlannedPeak, PlanStep
from memtriage.report.plan_text import render, render_maximum
from support.printed import printed

GIB = 1 << 30


def peak(needs):
    return PlannedPeak(
        allocated=needs - 2 * GIB,
        reserved=needs,
        needs=needs,
        phase="backward",
        by_owner={"activation": 3 * GIB, "parameter": GIB},
    )


def made(**changes):
    step = PlanStep(
        rung="8-bit optimizer",
        playbook="M12",
        action="8-bit AdamW",
        saves=2 * GIB,
        after=peak(6 * GIB),
        slowdown=None,
        speed="about none (M12)",
        maths="approximate",
        maths_note="moments are rounded",
        simulated_by="states of 8 bits",
        code={"torch": "first line\nsecond line", "lightning": "another"},
    )
    given = {
        "budget": 7 * GIB,
        "margin": 0.05,
        "fits": True,
        "short_by": 0,
        "outside_allocator": GIB,
        "before": peak(8 * GIB),
        "after": peak(6 * GIB),
        "steps": [step],
        "next_cheaper": Cheaper(actions=[], needs=8 * GIB, over_budget=GIB),
        "passed_over": [
            PassedOver(rung="shard", playbook="M9", outcome="no help", why="one GPU", saves=None),
            PassedOver(rung="bf16", playbook="M6", outcome="not needed", why="it fits", saves=GIB),
        ],
        "traces": 3,
        "seconds": 1.5,
        "notes": ["something was assumed"],
    }
    return Plan(**{**given, **changes})


def shown(plan, width=100):
    return printed(render, plan, width=width)


def test_a_plan_goes_from_the_answer_to_the_reasons():
    text = shown(made())
    order = [
        "FITS: with 1 change",
        "needs 8.0 GiB as it is",
        "6.0 GiB with the changes (peak in backward)",
        "1. 8-bit AdamW",
        "needs 6.0 GiB · saves 2.0 GiB · M12",
        "result: approximate; moments are rounded",
        "simulated: states of 8 bits",
        "torch:",
        "first line",
        "second line",
        "Lightning:",
        "Next cheaper",
        "the program as it is: needs 8.0 GiB",
        "no help: one GPU",
        "not needed: it fits (1.0 GiB when it was tried)",
        "something was assumed",
    ]
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_what_does_not_fit_says_by_how_much_and_what_remains():
    text = shown(made(fits=False, short_by=GIB // 2, next_cheaper=None))
    assert text.startswith("DOES NOT FIT: 512.0 MiB short, even with every change")
    assert "what remains at the peak: activation 3.0 GiB, parameter 1.0 GiB" in text
    assert "Next cheaper" not in text


def test_a_script_that_does_not_fit_is_not_said_to_have_had_every_change():
    text = shown(made(fits=False, short_by=GIB // 2, next_cheaper=None, settings_only=True))
    assert text.startswith("DOES NOT FIT: 512.0 MiB short, only allocator settings were tried:")
    assert "every change" not in text


def test_changes_passed_over_for_the_same_reason_share_a_line():
    same = [
        PassedOver(rung=rung, playbook="M13", outcome="not needed", why="it fits", saves=None)
        for rung in ("LoRA", "QLoRA")
    ]
    assert "  LoRA, QLoRA: not needed: it fits\n" in shown(made(passed_over=same))


def test_what_fits_as_it_is():
    text = shown(made(steps=[], next_cheaper=None, passed_over=[], notes=[]))
    assert text.startswith("FITS: as it is")
    assert "with the changes" not in text
    assert "Changes" not in text and "Passed over" not in text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [LargestSize(batch=12, seq=None, needs=5 * GIB, next=13, next_needs=9 * GIB)],
            ["FITS: batch 12: needs 5.0 GiB of 8.0 GiB",
             "      batch 13 needs 9.0 GiB, 3.0 GiB too much; 25% stays free"],
        ),
        ([LargestSize(batch=2, seq=512, needs=6 * GIB, next=None, next_needs=None)],
         ["FITS: batch 2, seq 512: needs 6.0 GiB of 8.0 GiB"]),
        ([], ["DOES NOT FIT: the smallest size that was tried needs 7.0 GiB of 8.0 GiB"]),
    ],
)  # fmt: skip
def test_the_largest_sizes_are_beside_the_next_larger_ones_and_what_the_search_took(found, said):
    maximum = Maximum(
        budget=8 * GIB, margin=0.25, maximize=["batch"], found=found, least_needs=7 * GIB, traces=5,
        seconds=2.0, notes=[],
    )  # fmt: skip
    assert printed(render_maximum, maximum).splitlines() == [*said, "5 traces in 2.0 s"]
