"""The ranks of a run, compared, on its page: lines, and a dot for each rank."""

from __future__ import annotations

from memtriage.diagnose.ranks.merge import context, merge
from memtriage.model.rank_groups import RankFigures, RankGroups, RankOutlier
from memtriage.report.run.page import html
from memtriage.report.run.ranks import compared_ranks
from memtriage.store.reader import RankRecord
from support.chromium import Chromium
from support.page_data import unpack
from support.runs import GIB, MIB, gpu_rank, run


def ranks() -> list[RankRecord]:
    records = [gpu_rank(number, 24, steps=12) for number in range(24)]
    for record in records[16:]:  # the last stage has the head
        for mark in record.marks:
            if mark.device != "cpu":
                mark.allocated = (mark.allocated or 0) + 4 * GIB
    for mark in records[5].marks:
        if mark.device != "cpu" and mark.reserved:
            mark.reserved += 9 * GIB
    return records


def test_columns_of_all_ranks_with_their_groups() -> None:
    report = merge(run(*ranks()))
    data = compared_ranks(report)
    assert data is not None
    plot = data["plot"]
    assert unpack(plot["ranks"]) == list(range(24))
    assert unpack(plot["groups"]) == [1] * 5 + [0] + [1] * 10 + [2] * 8
    columns = {figure["key"]: figure for figure in plot["figures"]}
    assert list(columns) == ["allocated", "reserved"]  # what is the same on every rank needs no plot
    assert unpack(columns["allocated"]["values"]) == [18 * GIB] * 16 + [22 * GIB] * 8
    assert plot["chosen"] == "reserved"
    assert plot["outliers"] == [{"rank": 5, "what": "+9.0 GiB reserved"}]
    assert [line["stands_out"] for line in data["lines"]] == [False, False, True]


def test_one_rank_has_nothing_to_compare() -> None:
    assert compared_ranks(merge(run(gpu_rank()))) is None


def test_of_very_many_ranks_those_that_stand_out_are_kept() -> None:
    report = merge(run(*(gpu_rank(number, 24, steps=6) for number in range(24))))
    report.rank_groups = RankGroups(
        figures=[
            RankFigures(rank=number, base=GIB, allocated=GIB + number * MIB // 64) for number in range(20_000)
        ],
        outliers=[RankOutlier(rank=19_999, last_step=6, killed=True)],
    )
    data = compared_ranks(report)
    assert data is not None
    shown = unpack(data["plot"]["ranks"])
    assert len(shown) <= 4097 and 19_999 in shown


def test_a_browser_draws_groups_and_outliers_and_tells_a_rank(chromium: Chromium) -> None:
    recorded = run(*ranks())
    report = merge(recorded)
    visit = chromium.visit(
        html(recorded, report, context(recorded, report)),
        """
        const place = card("How the ranks compare");
        const canvas = place.querySelector("canvas");
        const has = (name, seen) => seen.has(page.color(name).match(/[0-9]+/g).join());
        const drawn = inked(canvas);
        const out = {
            lines: [...place.querySelectorAll("li")].map((one) => one.textContent),
            label: canvas.getAttribute("aria-label"),
            colors: ["hue-1", "hue-2", "bad"].map((name) => has(name, drawn)),
        };
        // Along the canvas from the left: the rank that stands out is told.
        const tip = place.querySelector(".tip");
        const box = canvas.getBoundingClientRect();
        out.told = [];
        for (let x = 0; x < box.width; x += 4)
            for (let y = 0; y < box.height; y += 4) {
                canvas.dispatchEvent(new PointerEvent("pointermove",
                    { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
                if (!tip.hidden) out.told.push(tip.textContent);
            }
        const buttons = [...place.querySelectorAll(".choice button")];
        buttons.find((one) => one.textContent === "allocated").click();
        out.allocated = canvas.getAttribute("aria-label");
        return out;""",
        width=1200,
    )
    assert visit.console == []
    result = visit.result
    assert result["lines"][2] == "rank 5: +9.0 GiB reserved"
    assert result["label"] == "reserved of 24 ranks"
    assert result["colors"] == [True, True, True]
    assert "rank 5: 36.0 GiB+9.0 GiB reserved" in result["told"]
    assert {told.partition(":")[0] for told in result["told"]} == {f"rank {number}" for number in range(24)}
    assert result["allocated"] == "allocated of 24 ranks"
