import io
import re
import sys
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from rich.console import Console

from memtriage.diagnose.ranks.merge import RunContext
from memtriage.model.findings import Finding, FindingKind, Projection, Verdict
from memtriage.model.judged import DetectionLimit, Judged
from memtriage.model.ledger import LedgerRow
from memtriage.model.rank_groups import RankDifference, RankGroup, RankGroups, RankOutlier, RankSpan
from memtriage.model.report import RankCount
from memtriage.report.run.terminal import console_for, render

MiB = 1024**2
GiB = 1024**3


def shown(report, context=None, *, width=None, **options):
    """The report as a file (no width) or as a terminal of that width shows it."""
    if width is None:
        stream = io.StringIO()
        render(report, console_for(stream), context)
        return stream.getvalue()
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False, **options
    )
    render(report, console, context)
    return console.file.getvalue()


def unwrapped(text):
    return re.sub(r"\s+", "", text)


def test_the_verdict_comes_first(make_report, leak):
    context = RunContext(argv=["train.py", "--lr", "3"], duration_s=92.0, runs_out_in=[196])
    first, second, *_ = shown(make_report(leak()), context).splitlines()
    assert first == "LEAK: 164.0 MiB per step on cuda:0, out of memory in 196 steps"
    assert second == "train.py --lr 3 · 41 steps · 1 min 32 s"


def test_a_size_says_the_step_of_its_census(make_report, leak):
    finding = leak()
    finding.bytes_step = 30
    assert "size at step 30" in shown(make_report(finding))


def test_a_program_without_steps_has_none_in_its_report(make_report, leak):
    finding = leak()
    finding.bytes_per_step, finding.bytes_per_second, finding.step, finding.phase = None, 7, 0, None
    text = shown(make_report(finding))
    assert "size" in text and "at step 0" not in text.replace("ledger at step 0", "")


def test_a_finding_tells_all_that_is_known(make_report, leak):
    text = shown(make_report(leak()))
    for value in (
        leak().holder,
        *leak().also_held_by,
        leak().stored_at,
        leak().allocated_at,
        leak().mechanism,
        leak().fix,
        *leak().evidence,
        "size at step 41     6.6 GiB · 41.0 MiB per micro-batch",
        "detected            at step 41, in forward",
        "M21 · Leaks: something keeps what a step makes · memtriage explain M21",
    ):
        assert value in text


def test_labels_take_as_much_room_as_those_that_are_shown(make_report, leak):
    finding = leak()
    assert f"\n  kept alive by       {finding.holder}\n" in shown(make_report(finding))
    finding.also_held_by = []
    assert f"\n  kept alive by    {finding.holder}\n" in shown(make_report(finding))


@pytest.mark.parametrize("width", [200, 100, 60, 40])
def test_holder_and_site_are_whole_on_any_terminal(make_report, leak, width):
    text = shown(make_report(leak()), width=width)
    for value in (leak().holder, *leak().also_held_by, leak().allocated_at):
        assert unwrapped(value) in unwrapped(text)
    assert max(map(len, text.splitlines())) <= min(width, 120)


def test_a_file_has_no_color_no_trailing_space_and_whole_paths(make_report, leak, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    text = shown(make_report(leak()))
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert leak().holder in text


def test_a_file_is_as_wide_as_columns_says_and_has_colors_if_forced(make_report, leak, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # of another test
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    narrow = shown(make_report(leak()))
    monkeypatch.delenv("COLUMNS")
    assert max(map(len, narrow.splitlines())) < max(map(len, shown(make_report(leak())).splitlines()))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in shown(make_report(leak()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown(make_report(leak()))


def test_memory_kept_by_malloc_does_not_choose_the_chart(make_report):
    wasted = Finding(kind="malloc_retention", device="host", bytes=500 * MiB)
    assert "resident on host" not in shown(make_report(wasted))


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


def test_a_terminal_has_colors_unless_they_are_refused(make_report, leak, monkeypatch):
    def escapes():
        console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
        render(make_report(leak()), console)
        return set(re.findall(r"\x1b\[[0-9;]*m", console.file.getvalue()))

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert any("31" in code for code in escapes())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("3" in code for code in escapes())


def test_a_stream_of_ascii_gets_ascii(make_report, leak):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    render(make_report(leak(holder="modèle.cache[*]")), console_for(stream))
    stream.flush()
    text = buffer.getvalue().decode("ascii")
    assert r"mod\xe8le.cache[*]" in text
    assert "#" in text


def test_names_cannot_move_the_cursor_or_make_markup(make_report, leak):
    text = shown(make_report(leak(holder="d['\x1b[2Jx\r\n'] [bold]y[/bold] :smile:")))
    assert r"d['\x1b[2Jx\r\n'] [bold]y[/bold] :smile:" in text


def test_the_same_finding_on_many_ranks_is_told_once(make_report, leak):
    findings = [leak(rank, device=f"cuda:{rank}", bytes_per_step=(164 + rank) * MiB) for rank in range(7)]
    text = shown(make_report(*findings, ranks=8))
    assert text.count("kept alive by       train") == 1
    assert "leak on cuda:0-6, 7 of 8 ranks (0-6)   164.0 MiB to 170.0 MiB per step" in text
    assert "41 steps · 8 of 8 ranks" in text


def test_a_leak_on_one_rank_names_it(make_report, leak):
    assert "leak on cuda:0, rank 1 only" in shown(make_report(leak(1), ranks=2))


def test_different_causes_are_told_apart(make_report, leak):
    text = shown(make_report(leak(0), leak(1, holder="other[*]"), leak(0), ranks=2))
    assert [line[:1] for line in text.splitlines() if re.match(r"\d  ", line)] == ["1", "2", "3"]


def test_differing_ranks_are_one_block_with_all_evidence(make_report):
    findings = [
        Finding(kind="rank_differs", device="cuda:0", rank=rank, evidence=[f"evidence of {rank}"])
        for rank in range(8)
    ]
    text = shown(make_report(*findings, verdict="clean", ranks=20))
    assert text.count("  rank differs on") == 1
    assert "- rank 5: evidence of 5" in text
    assert "- and 2 more ranks" in text


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


def test_verdict_lines(make_report, leak):
    def line(report, context=None):
        return shown(report, context).splitlines()[0]

    died = Finding(kind="out_of_memory", device="cuda:3", bytes=2 * GiB, step=41, phase="backward")
    residue = Finding(kind="residue", device="cuda:0", bytes=3 * GiB)
    limit = Finding(kind="host_limit", device="host")
    assert line(make_report(verdict="clean")) == "CLEAN: no leak, residue or fragmentation found in 41 steps"
    assert line(make_report(limit, verdict="clean")).endswith("; host memory at its limit")
    assert line(make_report(leak(), leak(holder="x"))).endswith("; 1 more leak below")
    assert line(make_report(leak(bytes_per_step=None))) == "LEAK: 41.0 MiB per micro-batch on cuda:0"
    assert line(make_report(leak(), died, verdict="out_of_memory")) == (
        "OUT OF MEMORY: cuda:3 at step 41, in backward: 2.0 GiB asked for; leaking 164.0 MiB per step"
    )
    assert line(make_report(residue, verdict="residue")) == "RESIDUE: 3.0 GiB not released on cuda:0"
    assert line(make_report(limit, verdict="killed")) == (
        "KILLED: the process is gone without writing an end, after 41 steps; host memory was at its limit"
    )
    assert line(make_report(verdict="killed", ranks=8), RunContext(killed=[1, 2])) == (
        "KILLED: 2 of 8 ranks are gone without writing an end, after 41 steps"
    )
    assert line(make_report(verdict="error")) == "ERROR: memtriage could not judge this run"


def limit(nbytes, per="step", scale="step", points=310):
    return Judged(scale=scale, points=points, detection_limit=DetectionLimit(nbytes, per))


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        ({"cpu": limit(1434)}, "no growth above 1.4 KiB per step on cpu in 312 steps"),
        (
            {"cpu": limit(1434), "cuda:0": limit(512)},
            "no growth above 1.4 KiB per step on cpu and 512 B per step on cuda:0 in 312 steps",
        ),
        (
            {"cpu": limit(900)} | {f"cuda:{index}": limit(512) for index in range(3)},
            "no growth above 900 B per step on cpu and 512 B per step on cuda:0-2 in 312 steps",
        ),
        ({"cpu": limit(2048, "second", "time")}, "no growth above 2.0 KiB per second on cpu in 1 min 04 s"),
        (
            {"cpu": limit(2048, "step", "microbatch")},
            "no growth above 2.0 KiB per step on cpu in 310 backwards",
        ),
    ],
)
def test_clean_says_what_it_rests_on(make_report, judged, expected):
    report = make_report(verdict="clean", steps=312, judged=judged)
    text = shown(report, RunContext(duration_s=64.0))
    assert text.splitlines()[0] == f"CLEAN: {expected}"


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        ({"cpu": Judged(reason="too short: 3 steps")}, "too short: 3 steps"),
        ({}, "growth could not be judged"),
        ({"cpu": limit(512), "cuda:0": Judged(reason="no counter")}, "cuda:0: no counter"),
    ],
)
def test_not_judged_says_why(make_report, judged, expected):
    text = shown(make_report(verdict="not_judged", judged=judged))
    assert text.splitlines()[0] == f"NOT JUDGED: {expected}"


def test_headline_without_leak_names_what_needs_action(make_report):
    findings = [
        Finding(kind="worker_copy_on_write", device="host", bytes=500 * MiB),
        Finding(kind="malloc_retention", device="host", bytes=1229 * MiB),
    ]
    text = shown(make_report(*findings, verdict="clean", judged={"cpu": limit(512)}), width=120)
    assert " ".join(text.splitlines()[:2]) == (
        "CLEAN: no growth above 512 B per step on cpu in 41 steps; workers un-share memory: 500.0 MiB; "
        "memory kept by malloc: 1.2 GiB"
    )


def test_a_batch_that_will_not_fit_is_in_the_headline_and_is_no_death(make_report, leak):
    full = Projection(device="cuda:0", limit=80 * GiB, step=8412)
    ahead = Finding(
        kind="out_of_memory", device="cuda:0", bytes=92 * GiB, certainty="suspected", projection=full
    )
    text = shown(make_report(ahead, verdict="clean", judged={"cpu": limit(512)}), width=120)
    assert text.splitlines()[0].endswith("in 41 steps; cuda:0 will be full at step 8,412")
    assert "suspected out of memory on cuda:0   92.0 GiB" in text
    assert re.search(r"to confirm +run a step with this batch first", text)
    unknown = msgspec.structs.replace(ahead, projection=msgspec.structs.replace(full, step=None))
    text = shown(make_report(unknown, verdict="clean"), width=120)
    assert text.splitlines()[0].endswith("in 41 steps; cuda:0 will be full at the longest batch")
    died = Finding(kind="out_of_memory", device="cuda:1", bytes=GiB, step=41)
    text = shown(make_report(ahead, died, verdict="out_of_memory"))
    assert text.splitlines()[0] == "OUT OF MEMORY: cuda:1 at step 41: 1.0 GiB asked for"


def test_clean_notes_what_awaits_the_collector(make_report):
    awaits = "6.0 MiB in garbage cycles of Fold awaited the collector at step 19"
    judged = {"cpu": msgspec.structs.replace(limit(512), note=awaits)}
    text = shown(make_report(verdict="clean", judged=judged), width=120)
    assert " ".join(text.splitlines()[:2]) == (
        f"CLEAN: no growth above 512 B per step on cpu in 41 steps; {awaits}"
    )


def test_a_suspicion_is_no_leak_and_says_what_would_settle_it(make_report, leak):
    suspected = leak(certainty="suspected", holder="run.log[*]")
    text = shown(make_report(suspected, verdict="not_judged", judged={"cuda:0": limit(512)}))
    assert text.splitlines()[0] == (
        "NOT JUDGED: suspected growth of 164.0 MiB per step on cuda:0; run longer to confirm"
    )
    assert "suspected leak on cuda:0   164.0 MiB per step" in text
    assert re.search(r"to confirm +run longer", text)
    assert "to confirm" not in shown(make_report(leak(certainty="proven")))
    both = shown(make_report(leak(), suspected))
    assert both.splitlines()[0].startswith("LEAK: 164.0 MiB per step on cuda:0")
    assert "more leak" not in both.splitlines()[0]


def test_what_one_rank_proves_another_may_only_suspect(make_report, leak):
    findings = [leak(0, certainty="proven"), leak(1, certainty="suspected")]
    text = shown(make_report(*findings, ranks=2))
    assert "leak on cuda:0, rank 0 only" in text
    assert "suspected leak on cuda:0, rank 1 only" in text


def test_a_rate_over_time_is_printed(make_report, leak):
    slow = leak(bytes_per_step=None, bytes_per_microbatch=None, bytes_per_second=4 * MiB)
    assert shown(make_report(slow)).splitlines()[0] == "LEAK: 4.0 MiB per second on cuda:0"


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


def test_a_ledger_of_a_program_without_steps_names_none(make_report):
    text = shown(make_report(verdict="clean", steps=0, ledger_steps={"cuda:0": 0}))
    assert "cuda:0  4.6 GiB in use\n" in text


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


@pytest.mark.parametrize(("width", "parts"), [(120, "bar detail"), (90, "bar detail"), (89, "bar"), (40, "")])
def test_a_row_has_as_much_as_its_terminal_has_room_for(make_report, width, parts):
    rows = [LedgerRow(row="libraries", bytes=3 * GiB, detail="short"), LedgerRow(row="stacks", bytes=GiB)]
    text = shown(make_report(verdict="clean", ledger={"host": rows}, marks=[]), width=width)
    line = next(line for line in text.splitlines() if "libraries" in line)
    assert (
        line.rstrip()
        == {
            "bar detail": "  libraries     3.0 GiB  ███████▌    75.0%  short",
            "bar": "  libraries     3.0 GiB  ███████▌    75.0%",
            "": "  libraries     3.0 GiB",
        }[parts]
    )


@pytest.mark.parametrize("extra", [0, 1])
def test_a_detail_is_beside_its_row_if_it_just_fits(make_report, extra):
    detail = "x" * (100 - len("  libraries     1.0 GiB  ██████████ 100.0%  ") + extra)
    rows = [LedgerRow(row="libraries", bytes=GiB, detail=detail)]
    lines = shown(make_report(verdict="clean", ledger={"host": rows}, marks=[]), width=100).splitlines()
    line = next(line for line in lines if "libraries" in line)
    assert line.rstrip().endswith("x" if extra == 0 else "%")


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


def test_rows_below_one_percent_become_one(make_report):
    rows = [LedgerRow(row="big", bytes=GiB)] + [LedgerRow(row=f"r{index}", bytes=1000) for index in range(30)]
    rows.append(LedgerRow(row="last", bytes=GiB // 98))
    text = shown(make_report(verdict="clean", ledger={"host": rows}))
    assert re.search(r"others, each below 1 % +29\.3 KiB", text)
    assert "r17" not in text and "last" in text


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


def test_a_course_without_steps_is_one_of_time(make_report):
    report = make_report(verdict="clean", steps=3)
    for number, mark in enumerate(report.marks):
        mark.step, mark.time_s = 0, number * 40.0
    assert "0 ms to 1 min 20 s after the start" in shown(report)


def brief(make_report, *findings, **changes):
    report = make_report(*findings)
    for name, value in changes.items():
        setattr(report, name, value)
    stream = io.StringIO()
    render(report, console_for(stream), None, record=Path("some/run"))
    return stream.getvalue()


def test_a_report_fits_on_a_screen_and_says_where_the_rest_is(make_report, leak):
    finding = leak()
    finding.evidence = [f"measurement {number}" for number in range(9)]
    rows = [LedgerRow(row=f"row {number}", bytes=(20 - number) * MiB, detail="long") for number in range(15)]
    text = brief(make_report, *[leak(holder=f"names[{n}]") for n in range(8)], ledger={"cuda:0": rows})
    assert len(text.splitlines()) <= 45
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
