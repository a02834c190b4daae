"""The page of a run, as a browser without any network shows it, and how large it can get."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from memtriage.diagnose.ranks.merge import context, merge
from memtriage.model.findings import Finding
from memtriage.report.html.shell import LARGEST
from memtriage.report.run.page import html
from memtriage.store.reader import RankRecord, RunRecord
from memtriage.store.records import End
from support.chromium import Chromium
from support.page_data import data_in
from support.runs import GIB, MIB, gpu_rank, leak, run

_GROWTH = 164 * MIB
_DEATH = "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2.00 GiB."


def page_of(recorded: RunRecord) -> str:
    report = merge(recorded)
    return html(recorded, report, context(recorded, report))


def data_of(recorded: RunRecord) -> dict[str, Any]:
    return data_in(page_of(recorded))


def leaking() -> RunRecord:
    return run(gpu_rank(growth=_GROWTH, findings=(leak(),), own_mark="after refit"), notes=("a note",))


def dying_rank(rank: int, world_size: int) -> RankRecord:
    """A rank that leaks until its GPU is full."""
    device = f"cuda:{rank}"
    out = Finding(
        kind="out_of_memory", device=device, rank=rank, bytes=2 * GIB, phase="forward", step=30, playbook="M1"
    )
    return gpu_rank(
        rank,
        world_size,
        steps=30,
        growth=1800 * MIB,
        findings=(leak(rank=rank, device=device), out),
        end=End(verdict="out_of_memory", steps=30, exception=_DEATH, exit_code=1, time_s=120.0),
    )


# What a browser shows


def test_a_leak_is_told_and_drawn_and_nothing_is_loaded(chromium: Chromium) -> None:
    visit = chromium.visit(
        page_of(leaking()),
        """
        const ink = inked(document.querySelector(".chart canvas"));
        const has = (name) => ink.has(page.color(name).match(/[0-9]+/g).join());
        const canvases = () => [...document.querySelectorAll(".chart canvas")];
        const press = (card, text) =>
            [...card.querySelectorAll(".choice button")].find((one) => one.textContent === text).click();
        const gpu = card("Memory of cuda:0");
        const texts = (list) => [...list].map((one) => one.innerText.replace(/\\s+/g, " "));
        const legend = () =>
            [...gpu.querySelectorAll(".legend li:not([hidden]) button")].map((one) => one.textContent);
        const where = () => gpu.querySelector(".tools .quiet.number").textContent;
        const out = {
            ready: document.documentElement.dataset.ready,
            loaded: performance.getEntriesByType("resource").map((one) => one.name),
            headings: texts(document.querySelectorAll("h1, h2, h3")),
            verdict: document.querySelector(".verdict").innerText,
            finding: document.querySelector(".finding").innerText,
            ran: card("What was run").innerText,
            notes: card("Notes").innerText,
            colors: ["hue-1", "wash-1", "releasable"].filter(has),
            legend: legend(),
            where: where(),
            rows: texts(document.querySelector(".ledger tbody").rows),
            bar: document.querySelector(".stack").children.length,
            light: ground(),
        };
        press(gpu, "every mark");
        out.every = [legend(), where()];
        press(gpu, "allocated");
        out.one = legend();
        press(gpu, "from 0");
        out.drawn = canvases().length;
        document.querySelector("[data-choice=dark]").click();
        out.dark = ground();
        return out;""",
    )
    result = visit.result
    assert visit.console == []
    assert result["loaded"] == []
    assert result["ready"] == "true"
    assert result["headings"] == [
        "train.py",
        "leak on cuda:0",
        "Memory of cuda:0 over the run",
        "Host memory over the run",
        "Where the memory is",
        "cuda:0 34.6 GiB in use",
        "host 5.8 GiB in use",
        "What was run",
        "Notes",
    ]
    assert re.split(r"\s*\n\s*", result["verdict"])[-1].endswith("on cuda:0, out of memory in 339 steps")
    finding = leak()
    for words in (
        "164.0 MiB per step",
        finding.holder,
        *finding.also_held_by,
        finding.stored_at,
        finding.allocated_at,
        finding.mechanism,
        "Store loss.detach() or loss.item() instead of the loss.",
        *finding.evidence,
        "6.6 GiB · 82.0 MiB per micro-batch",
        "in 339 steps, at step 380",
        "detected\nin forward",
        "M21 · Leaks: something keeps what a step makes · memtriage explain M21",
    ):
        assert words in result["finding"]
    for words in (
        "/home/user/train.py --lr 3e-4",
        "3.12.3",
        "2.9.1+cu128",
        "2023-11-14 22:13:20 UTC",
        "79.0 GiB",
    ):
        assert words in result["ran"]
    assert "a note" in result["notes"]
    assert result["colors"] == ["hue-1", "wash-1", "releasable"]
    assert result["legend"] == ["allocated24.6 GiB", "reserved33.4 GiB"]
    assert result["where"] == "at the peak: step 41 · time 2.7 min"
    assert result["every"][0][0] == "allocated32.4 GiB"
    assert result["every"][1].endswith("mark backward")
    assert result["one"] == ["allocated32.4 GiB"]
    assert result["rows"][0] == "requested · optimizer state 2 storages a parameter 12.0 GiB 34.7 %"
    assert result["rows"][-1] == "others, each below 1 % 124.0 MiB 0.4 %"
    assert result["bar"] == 8
    assert result["drawn"] == 2
    assert max(result["dark"]) < 64 < 192 < min(result["light"])


def test_the_rank_that_differs_stands_out_and_each_can_be_chosen(chromium: Chromium) -> None:
    ranks = [gpu_rank(number, 4) for number in range(3)]
    visit = chromium.visit(
        page_of(run(*ranks, dying_rank(3, 4))),
        """
        const gpu = card("Memory of cuda:0-3");
        const legend = (place) => [...place.querySelectorAll(".legend li:not([hidden]) button")].map((one) =>
            [one.textContent, one.querySelector(".swatch").style.borderTopColor]);
        const choose = (place, label, value) => {
            const select = place.querySelector(`select[aria-label="${label}"]`);
            select.value = value;
            select.dispatchEvent(new Event("change"));
        };
        const out = {
            wide: wide(),
            scroll: document.documentElement.scrollWidth,
            together: legend(gpu),
            host: legend(card("Host memory")).map(([name]) => name),
            ended: card("How it ended").querySelector("pre").textContent,
            ranks: [...card("Ranks").querySelector("tbody").rows].map((row) =>
                row.innerText.replace(/\\s+/g, " ")),
        };
        choose(gpu, "ranks", "3");
        out.alone = legend(gpu);
        const ledger = card("Where the memory is");
        const total = () => ledger.querySelector("h3").textContent;
        out.totals = [total()];
        choose(ledger, "ledger of", "1");
        out.totals.push(total());
        return out;""",
        width=400,
        dark=True,
    )
    result = visit.result
    assert visit.console == []
    assert result["wide"] == []
    assert result["scroll"] <= 400
    assert result["together"][0] == ["rank 3 · out of memory, leak70.7 GiB", "var(--bad)"]
    assert [name for name, _ in result["together"]][1:] == [f"rank {number}18.0 GiB" for number in range(3)]
    assert "var(--bad)" not in [color for _, color in result["together"]][1:]
    # it is the GPU's memory in which it differs
    assert result["host"] == [f"rank {number}5.0 GiB" for number in (3, 0, 1, 2)]
    assert result["ended"] == _DEATH
    assert result["ranks"][0].startswith("rank 3 out of memory, leak torch.OutOfMemoryError")
    assert [name for name, _ in result["alone"]] == ["allocated70.7 GiB", "reserved78.0 GiB"]
    assert result["totals"][0].startswith("cuda:3") and result["totals"][1].startswith("cuda:0")


def test_a_run_of_which_little_is_known_is_still_a_page(chromium: Chromium) -> None:
    rank = RankRecord(Path("rank-00000.jsonl"), alive=False)
    visit = chromium.visit(page_of(run(rank)), "return document.getElementById('content').innerText")
    assert visit.console == []
    assert "the process is gone without writing an end" in visit.result
    assert "n/a" in visit.result


# What it is given


def test_a_clean_run_has_no_findings_and_names_its_own_marks() -> None:
    data = data_of(run(gpu_rank(own_mark="after refit")))
    assert (data["verdict"]["level"], data["findings"], data["ended"]) == ("good", [], None)
    assert data["ranks"] is None
    gpu = data["charts"][0]
    assert [gpu["names"][own] for own in gpu["own"]] == ["after refit"]


def test_the_words_are_those_of_the_terminal() -> None:
    data = data_of(run(gpu_rank(0, 2), dying_rank(1, 2)))
    assert data["facts"] == "41 steps · 2 min 44 s · 2 of 2 ranks"
    assert data["verdict"]["word"] == "out of memory"
    assert (
        data["verdict"]["text"]
        == "cuda:1 at step 30, in forward: 2.0 GiB asked for; leaking 164.0 MiB per step"
    )
    assert [finding["words"] for finding in data["findings"]][:2] == [
        "out of memory on cuda:1, rank 1 only",  # what ended the run comes first
        "leak on cuda:1, rank 1 only",
    ]


def test_a_killed_rank_is_named() -> None:
    dead = gpu_rank(1, 2)
    dead.end, dead.alive = None, False
    data = data_of(run(gpu_rank(0, 2), dead))
    assert data["verdict"]["word"] == "killed"
    assert [(row["rank"], row["end"], row["label"]) for row in data["ranks"]["rows"]] == [
        (0, "ended", None),
        (1, "killed", "killed"),
    ]
    assert ["ranks killed", "1"] in data["run"]


# How large it can get


def test_thousands_of_ranks_fit_and_the_one_that_differs_is_drawn() -> None:
    ranks = [gpu_rank(number, 4096, steps=16) for number in range(4096)]
    ranks[2977] = gpu_rank(
        2977, 4096, steps=16, growth=_GROWTH, findings=(leak(rank=2977, device="cuda:2977"),)
    )
    page = page_of(run(*ranks))
    assert len(page.encode()) < LARGEST
    data = data_in(page)
    gpu = data["charts"][0]
    assert gpu["lanes"][0]["rank"] == 2977 and "leak" in gpu["lanes"][0]["label"]
    assert gpu["band"]["ranks"] == 4096
    assert data["ledgers"][0]["rank"].startswith("rank 2977")
    assert 2977 in [row["rank"] for row in data["ranks"]["rows"]]


def test_many_long_lanes_fit() -> None:
    # Sizes without a common unit and beyond 4 GiB are the longest columns.
    ranks = [gpu_rank(number, 12, steps=3000, growth=999_983, host_limit=None) for number in range(12)]
    for rank in ranks:
        for place, mark in enumerate(rank.marks):
            mark.host_rss = 2**40 + place * 7919 * 2**20 + place % 3
    page = page_of(run(*ranks))
    assert LARGEST / 4 < len(page.encode()) < LARGEST
    assert all(lane["left_out"] for chart in data_in(page)["charts"] for lane in chart["lanes"])


def test_thousands_of_findings_and_notes_fit() -> None:
    long = "x" * 20_000
    findings = tuple(
        leak(holder=f"{number} {long}", also_held_by=[long] * 50, mechanism=long, evidence=[long] * 50)
        for number in range(1000)
    )
    rank = gpu_rank(findings=findings, end=End(verdict="leak", exception=long * 10))
    rank.notes = [f"{number} {long}" for number in range(1000)]
    page = page_of(run(rank))
    assert len(page.encode()) < LARGEST
    assert data_in(page)["more"] == "and 960 more findings: `memtriage report` lists them all"
