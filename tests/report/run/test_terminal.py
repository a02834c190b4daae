import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.findings import Finding, FindingKind, Verdict
from memtriage.model.ledger import LedgerRow
from memtriage.model.marks import Mark
from memtriage.model.rank_groups import RankDifference, RankGroup, RankGroups, RankOutlier, RankSpan
from memtriage.model.report import RankCount
from memtriage.report.run.terminal import render
from support.printed import printed

MiB = 1024**2
GiB = 1024**3


def shown(report, context=None, *, width=None):
    """The report as a file (no width) or as a terminal of that width shows it."""
    return printed(render, report, context, width=width or 100, terminal=width is not None)


def unwrapped(text):
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("width", [200, 100, 60, 40])
def test_holder_and_site_are_whole_on_any_terminal(make_report, leak, width):
    text = shown(make_report(leak()), width=width)
    for value in (leak().holder, *leak().also_held_by, leak().allocated_at):
        assert unwrapped(value) in unwrapped(text)
    assert max(map(len, text.splitlines())) <= min(width, 120)


def test_without_a_finding_the_course_of_the_first_device_of_the_ledger_is_drawn(make_report):
    report = make_report(verdict="clean")
    report.ledger = {"job": [], "host": [], "cuda:1": [], "cuda:0": []}
    for mark in report.marks:
        mark.device, mark.host_rss = ("cuda:1" if mark.step % 2 else "cuda:0"), 7 * GiB
    text = shown(report)
    assert "allocated on cuda:1  at the end of each step, 1 to 41" in text
    report.ledger = {"job": [], "host": []}
    report.marks = report.marks[1:]
    assert "allocated on cuda:0" in shown(report)


@pytest.mark.parametrize("verdict", get_args(Verdict))
@pytest.mark.parametrize("width", [40, 100, None])
def test_every_verdict_has_its_line_even_with_nothing_known(make_report, verdict, width):
    report = make_report(verdict=verdict, steps=0, ledger={}, marks=[])
    text = shown(report, width=width)
    assert text.splitlines()[0].partition(":")[0] in {
        "CLEAN",
        "LEAK",
        "RESIDUE",
        "FRAGMENTATION",
        "OUT OF MEMORY",
        "KILLED",
        "NOT JUDGED",
        "ERROR",
    }


@pytest.mark.parametrize("kind", get_args(FindingKind))
def test_every_kind_has_its_block_even_with_nothing_known(make_report, kind):
    text = shown(make_report(Finding(kind=kind, device="host"), verdict="clean"))
    assert "\n1  " in text
    assert "None" not in text


def test_the_exception_is_told(make_report):
    report = make_report(
        verdict="out_of_memory", exception="torch.OutOfMemoryError: CUDA out of memory.\nTried"
    )
    assert "ended by      torch.OutOfMemoryError: CUDA out of memory. Tried" in shown(report)


def test_the_ledger_shows_rows_sums_and_shares(make_report):
    text = shown(make_report(verdict="clean", ledger_steps={"cuda:0": 1234}))
    assert "cuda:0  4.6 GiB in use, ledger at step 1,234\n" in text
    assert "host  1023.0 MiB in use\n" in text
    assert re.search(r"requested · parameter +3\.0 GiB +█{6}[▉-▏] +65\.1%", text)
    assert re.search(r"requested · saved for backward +1\.0 GiB .*losses\[\*\]", text)
    assert re.search(r"unexplained +-1\.0 MiB +-0\.1%", text)  # alone below 1 %, nothing to fold it with


def test_a_detail_that_does_not_fit_beside_its_row_stands_below(make_report):
    detail = " ".join(["largest kept alive by"] + ["some.name"] * 9)
    rows = [
        LedgerRow(row="libraries", bytes=GiB, detail=detail),
        LedgerRow(row="stacks", bytes=0, detail="short"),
    ]
    lines = shown(make_report(verdict="clean", ledger={"host": rows}, marks=[])).splitlines()
    libraries = next(index for index, line in enumerate(lines) if "libraries" in line)
    assert lines[libraries].endswith("100.0%")
    below = lines[libraries + 1 : libraries + 3]
    assert all(line.startswith("      ") for line in below)
    assert " ".join(line.strip() for line in below) == detail
    assert lines[libraries + 3].endswith("0.0%  short")


def test_a_long_name_wraps_beside_its_figures(make_report):
    rows = [
        LedgerRow(row="memory of other processes on this device", owner="communication buffer", bytes=GiB)
    ]
    lines = shown(make_report(verdict="clean", ledger={"cuda:0": rows}, marks=[]), width=40).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("  memory"))
    assert lines[at].rstrip().endswith("1.0 GiB") and lines[at + 1].startswith("    ")
    name = " ".join(line.split("  1.0")[0].strip() for line in lines[at : at + 3])
    assert name == "memory of other processes on this device · communication buffer"


def test_an_empty_ledger_has_no_shares(make_report):
    rows = [LedgerRow(row="malloc in use", bytes=0), LedgerRow(row="stacks", bytes=0)]
    text = shown(make_report(verdict="clean", ledger={"host": rows}, marks=[]), width=80)
    assert re.search(r"malloc in use +0 B +0\.0%", text)


def test_the_course_is_drawn_and_a_flat_one_told(make_report):
    assert "█" in shown(make_report(verdict="clean", ledger={}))
    flat = make_report(verdict="clean", ledger={})
    for mark in flat.marks:
        mark.allocated = GiB
    assert "at the end of each step, 1 to 41\n  1.0 GiB, flat" in shown(flat)
    for mark in flat.marks:
        mark.step = 0
    assert "1.0 s to 41 s after the start\n  1.0 GiB, flat" in shown(flat)


def test_the_course_of_what_grows_is_drawn_though_it_looks_flat(make_report, leak):
    report = make_report(leak())
    for mark in report.marks:
        mark.allocated = GiB
    assert "flat" not in shown(report)


def test_notes_and_missing_ranks(make_report):
    report = make_report(verdict="clean", ranks=2)
    report.ranks = RankCount(seen=2, of=5)
    text = shown(report, RunContext(missing=[2, 3, 4], notes=["something was cut"]))
    assert "- no record of ranks 2-4" in text
    assert "- something was cut" in text


# --- whole reports ------------------------------------------------------------------------------------------


@pytest.fixture
def rich(make_report, leak):
    """A job of 64 ranks with something in every block of its report."""
    usual = {"allocated": RankSpan(low=GiB, usual=GiB, high=2 * GiB)}

    def more(rank):
        return RankDifference(figure="allocated", value=(3 + rank) * GiB, usual=GiB, spread=MiB, peers=43)

    grouped = RankGroups(
        step=40, mark="step", device="cuda",
        groups=[RankGroup(ranks=[*range(20, 64)], figures=usual)],
        outliers=[
            RankOutlier(rank=rank, group=0, killed=rank == 3, last_step=40 - rank, differs=[more(rank)])
            for rank in range(20)
        ],
    )  # fmt: skip
    findings = [
        leak(rank=3, certainty="proven"),
        Finding(kind="rank_differs", device="cuda:0", rank=5, bytes=GiB, evidence=["rank 5 has 3.0 GiB"]),
        Finding(
            kind="leak", device="cpu", rank=3, bytes=GiB, bytes_per_step=MiB, certainty="suspected",
            mechanism="a list grows",
        ),
        Finding(kind="residue", device="cuda:1", rank=2, bytes=5 * MiB, holder="cache", phase="evaluation"),
        Finding(kind="malloc_retention", device="host", rank=0, bytes=700 * MiB, fix="trim"),
    ]  # fmt: skip
    report = make_report(*findings, ranks=64, exception="RuntimeError: its\nown words", rank_groups=grouped)
    report.ledger_steps = {"cuda:0": 40}
    for mark in report.marks:
        mark.rank = 3
    context = RunContext(
        argv=["train.py", "--lr", "3"], duration_s=92.0, runs_out_in=[196, None, 2000, None, None],
        notes=["a note of some length, " * 6], ledger_rank=3,
    )  # fmt: skip
    return report, context


@pytest.mark.parametrize("width", [200, 90, 59, 40])
def test_the_report_of_a_large_job_fits(rich, width):
    lines = shown(*rich, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("kind", "drawn"),
    [("leak", "cpu"), ("residue", "cpu"), ("rank_differs", "cpu"), ("malloc_retention", "cuda:0")],
)
def test_whose_course_is_drawn(make_report, kind, drawn):
    report = make_report(Finding(kind=kind, device="cpu", bytes=MiB), verdict="not_judged")
    report.marks = [
        msgspec.structs.replace(mark, device=device, allocated=number * GiB)
        for device in ("cuda:0", "cpu")
        for number, mark in enumerate(report.marks, 1)
    ]
    assert f" on {drawn}  at the end of each step, " in shown(report)


@pytest.mark.parametrize(
    ("names", "course"),
    [
        (["step", "step", "x"], "at the end of each step"),
        (["step", "backward", "backward"], "at the end of each backward"),
        (["step", "backward", "x"], "at each mark, which is a reading of the counters"),
        (["step"], None),
    ],
)
def test_the_marks_of_a_course(make_report, names, course):
    report = make_report(verdict="clean", findings=[], steps=len(names))
    report.marks = [
        msgspec.structs.replace(mark, name=name) for mark, name in zip(report.marks, names, strict=True)
    ]
    text = shown(report)
    assert ("allocated on" in text) == (course is not None)
    assert course is None or course in text


def brief(make_report, *findings, **changes):
    report = make_report(*findings)
    for name, value in changes.items():
        setattr(report, name, value)
    return printed(render, report, None, record=Path("some/run"))


def test_a_report_fits_on_a_screen_and_says_where_the_rest_is(make_report, leak):
    finding = leak()
    finding.evidence = [f"measurement {number}" for number in range(9)]
    rows = [LedgerRow(row=f"row {number}", bytes=(20 - number) * MiB, detail="long") for number in range(15)]
    text = brief(make_report, *[leak(holder=f"names[{n}]") for n in range(8)], ledger={"cuda:0": rows})
    assert len(text.splitlines()) <= 30
    one = brief(make_report, finding, ledger={"cuda:0": rows, "host": rows})
    assert len(one.splitlines()) <= 30
    assert one.rstrip().endswith("memtriage report some/run --full")
    for value in (finding.holder, finding.stored_at, finding.allocated_at, finding.fix, "measurement 0"):
        assert value in one
    assert "measurement 1" not in one and "long" not in one and "\nhost" not in one


def test_the_largest_rows_of_a_ledger_and_the_others_sum_to_it(make_report, leak):
    sizes = [3, 900, 4, 700, 500, 1, 800, 600, 400]
    rows = [LedgerRow(row=f"row {size}", bytes=size * MiB) for size in sizes]
    text = brief(make_report, leak(), ledger={"cuda:0": rows})
    assert re.findall(r"row (\d+)", text) == ["900", "700", "500", "800", "600"]
    assert f"{sum(sizes) - 900 - 700 - 500 - 800 - 600:.1f} MiB" in text


def test_the_ledger_of_the_job_is_shown_if_a_worker_grows(make_report, leak):
    finding = leak()
    finding.device, finding.process = "host", "worker 0 of train_loader"
    rows = [LedgerRow(row="rank 0", bytes=MiB)]
    text = brief(make_report, finding, ledger={"host": rows, "job": rows, "cuda:0": rows})
    assert [line.split()[0] for line in text.splitlines() if "in use" in line] == ["job"]


@pytest.mark.parametrize("process", ["2 workers of loader", "worker 1 of loader"])
def test_the_chart_is_of_the_processes_that_grow(make_report, leak, process):
    finding = leak()
    finding.device, finding.process = "host", process
    marks = [
        Mark(name="time", step=at, microbatch=0, rank=None, time_s=at, device="", allocated=at * MiB)
        for at in (100, 200, 300)
    ]
    courses = {"workers of loader": marks, "worker 1 of loader": marks}
    text = shown(make_report(finding), RunContext(courses=courses, runs_out_in=[None]))
    heading = text.index(f"anonymous memory of {process}  over time, 100 to 300")
    assert re.findall(r"(\S+ MiB) │", text[heading:]) == ["300.0 MiB", "100.0 MiB"]


def test_of_several_findings_the_first_is_told_and_of_the_second_what_to_do(make_report, leak):
    text = brief(make_report, *[leak(holder=f"names[{number}]") for number in range(3)])
    first, second = re.split(r"^[12]  ", text, flags=re.MULTILINE)[1:]
    assert "  why" in first and "  evidence" not in text
    assert re.findall(r"^  ([a-z][a-z ]*?)  ", second.split("\n\n")[0], re.MULTILINE) == [
        "kept alive by", "stored at", "fix",
    ]  # fmt: skip
    assert "and 1 more finding" in second
