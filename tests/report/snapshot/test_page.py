"""The page of a snapshot, as a browser without any network shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from memtriage.model.blocks import Block
from memtriage.model.recording import OWNERS, Events, Lives, Recording, SiteRow, Stack, Timeline
from memtriage.model.units import size
from memtriage.report.html.shell import LARGEST
from memtriage.report.snapshot.page import html
from support.chromium import Chromium
from support.page_data import data_in
from support.recordings import MIB, Tape, recording, stack, training

_LEAK = 3 * MIB


@pytest.fixture(scope="module")
def leaking() -> Recording:
    first, stacks = training(leak=_LEAK)
    second, _ = training(device="cuda:1")
    return recording(first, second, stacks=stacks, path="runs/leaking.pickle.gz")


def test_everything_is_told_and_drawn_and_nothing_is_loaded(chromium: Chromium, leaking: Recording) -> None:
    visit = chromium.visit(
        html(leaking),
        """
        const rgb = (name) => page.color(name).match(/[0-9]+/g).join();
        return {
            set: {...document.documentElement.dataset},
            loaded: performance.getEntriesByType("resource").map((one) => one.name),
            chart: [...inked(document.querySelector(".chart canvas"))].filter((one) =>
                [rgb("hue-1"), rgb("hue-2"), rgb("hue-9"), rgb("stranded")].includes(one)).length,
            map: [...inked(document.querySelector(".map canvas"))].filter((one) =>
                [rgb("hue-1"), rgb("hue-9"), rgb("stranded")].includes(one)).length,
            ground: ground(),
            headings: [...document.querySelectorAll("h1, h2, h3")].map((one) => one.textContent),
            verdict: document.querySelector(".verdict").textContent,
            finding: document.querySelector(".finding").innerText,
        };""",
    )
    result = visit.result
    assert visit.console == []
    assert result["loaded"] == []
    assert min(result["ground"]) > 192  # light, as the system is
    assert result["set"]["ready"] == "true"
    assert (result["set"]["charts"], result["set"]["maps"]) == ("1", "1")
    assert int(result["set"]["points"]) == len(leaking.devices[0].events)
    # weights, activations, the leak and what it strands, each in its own color
    assert result["chart"] == 4
    assert result["map"] == 3
    assert result["headings"] == [
        "leaking.pickle.gz",
        "leak",
        "Memory over the recording",
        "What was alive",
        "Segments at the snapshot",
        "What strands memory",
        "Allocation sites",
    ]
    assert result["verdict"].startswith("leak3.0 MiB per step at train.py:12 in log")
    for words in (
        "3.0 MiB per step",
        "train.py:12 in log",
        "12.0 MiB",
        "a list keeps a tensor of every step",
        "append the number instead",
        "it is there after every step",
        "M21 · Leaks: something keeps what a step makes · memtriage explain M21",
    ):
        assert words in result["finding"]


def test_sites_sort_filter_and_unfold(chromium: Chromium, leaking: Recording) -> None:
    result = chromium.visit(
        html(leaking),
        """
        const sites = card("Allocation sites");
        const names = () => [...sites.querySelectorAll("tbody tr")].map((row) =>
            (row.querySelector("summary") || row.cells[0]).textContent);
        const heads = [...sites.querySelectorAll("th button")];
        const head = (text) => heads.find((one) => one.textContent === text);
        const out = { peak: names() };
        head("at the snapshot").click();
        out.end = names();
        out.sorted = head("at the snapshot").parentNode.getAttribute("aria-sort");
        head("at the snapshot").click();
        out.rising = names();
        const input = sites.querySelector("input");
        input.value = "MODEL.py forward";
        input.dispatchEvent(new Event("input"));
        out.filtered = names();
        out.caption = sites.querySelector("caption").textContent;
        out.stack = sites.querySelector("details").textContent;
        return out;""",
    ).result
    weights, forward, log = "model.py:10 in __init__", "model.py:20 in forward", "train.py:12 in log"
    assert result["peak"] == [weights, forward, log]
    assert result["end"] == [weights, log, forward]
    assert result["sorted"] == "descending"
    assert result["rising"] == [forward, log, weights]
    assert result["filtered"] == [forward]
    assert result["caption"] == "1 site, 2 filtered out"
    assert "train.py:9 in main" in result["stack"]


def test_the_chart_zooms_and_reads_values(chromium: Chromium, leaking: Recording) -> None:
    events = len(leaking.devices[0].events)
    result = chromium.visit(
        html(leaking),
        """
        const board = document.querySelector(".chart");
        const button = (label) => document.querySelector(`button[aria-label="${label}"]`);
        const key = (name) => board.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
        const out = { atRest: button("zoom out").disabled };
        button("zoom in").click();
        out.closer = board.dataset.span.split("-").map(Number);
        key("ArrowRight");
        out.later = board.dataset.span.split("-").map(Number);
        key("0");
        out.whole = board.dataset.span;
        out.values = Object.fromEntries([...board.nextSibling.querySelectorAll("button")].map((one) =>
            [one.childNodes[1].textContent, one.querySelector(".amount").textContent]));
        const choices = [...document.querySelectorAll(".choice button")];
        const time = choices.find((one) => one.textContent === "time");
        time.click();
        out.pressed = time.getAttribute("aria-pressed");
        out.drawn = document.querySelectorAll(".chart canvas").length;
        return out;""",
    ).result
    peak = leaking.devices[0].peak
    assert result["atRest"] is True
    low, high = result["closer"]
    assert 0 < low < high < events - 1
    assert result["later"][0] > low and result["later"][1] - result["later"][0] == high - low
    assert result["whole"] == ""
    assert result["values"]["allocated"] == size(peak.allocated)
    assert result["values"]["reserved"] == size(peak.reserved)
    assert result["values"]["parameter"] == "24.0 MiB"
    assert result["pressed"] == "true"
    assert result["drawn"] == 1


def test_a_crowded_chart_shows_the_highest_instant_of_each_column(chromium: Chromium) -> None:
    device, stacks = training(45)
    result = chromium.visit(
        html(recording(device, stacks=stacks)),
        """
        const board = document.querySelector(".chart");
        const over = document.querySelector(".u-over");
        const at = over.getBoundingClientRect();
        const move = (x) => over.dispatchEvent(
            new MouseEvent("mousemove", { clientX: at.left + x, clientY: at.top + 9, bubbles: true }));
        const entries = () => [...board.nextSibling.children].filter((one) => !one.hidden);
        const legend = () => Object.fromEntries(entries().map((one) =>
            [one.textContent.replace(/[0-9].*/, ""), one.querySelector(".amount").textContent]));
        const out = { crowded: board.dataset.crowded, note: !board.parentNode.querySelector("p").hidden };
        over.dispatchEvent(new MouseEvent("mouseenter", { clientX: at.left + 100, clientY: at.top + 9 }));
        out.columns = [];
        for (let x = 20; x < at.width - 4; x += 20) {
            move(x);
            out.columns.push(legend());
        }
        for (let again = 0; again < 3; again += 1) document.querySelector("[aria-label='zoom in']").click();
        out.zoomed = board.dataset.crowded;
        out.left = !board.parentNode.querySelector("p").hidden;
        return out;""",
        width=400,
    ).result
    assert (result["crowded"], result["note"]) == ("true", True)
    assert (result["zoomed"], result["left"]) == ("false", False)
    allocated = {size(value) for value in device.timeline.allocated.tolist()}
    seen = {(column["allocated"], column["lowest allocated"]) for column in result["columns"]}
    assert {value for pair in seen for value in pair} <= allocated
    assert any(highest != lowest for highest, lowest in seen)


def test_a_block_under_the_pointer_tells_what_it_is(chromium: Chromium, leaking: Recording) -> None:
    result = chromium.visit(
        html(leaking),
        """
        const canvas = document.querySelector(".map canvas");
        const tip = canvas.nextSibling;
        const at = canvas.getBoundingClientRect();
        const move = (x, y) => canvas.dispatchEvent(
            new PointerEvent("pointermove", { clientX: at.left + x, clientY: at.top + y }));
        const out = {};
        out.hidden = tip.hidden;
        move(at.width - 1, 3);
        out.beyond = tip.hidden;
        for (let x = 1; x < at.width && !/parameter/.test(tip.textContent); x += 2) {
            for (let y = 3; y < at.height && !/parameter/.test(tip.textContent); y += 10) move(x, y);
        }
        out.block = tip.innerText;
        canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        out.spoken = document.querySelector(".spoken").textContent;
        const legend = canvas.closest(".card").querySelector("ul.legend");
        const entries = () => [...legend.children].map((one) => one.textContent);
        out.legend = { owner: entries() };
        const choices = [...document.querySelectorAll(".choice button")];
        for (const name of ["site", "state"]) {
            choices.find((one) => one.textContent === `by ${name}`).click();
            out.legend[name] = entries();
        }
        return out;""",
    ).result
    assert result["hidden"] is True
    assert result["block"].splitlines() == [
        "24.0 MiB in use · parameter",
        "model.py:10 in __init__",
        "24.0 MiB asked for",
        "in a segment of 32.0 MiB at 0x10000000000, 8.0 MiB of it stranded",
    ]
    stranded = leaking.devices[0].end.stranded
    assert result["legend"] == {
        "owner": [f"stranded{size(stranded)}", "parameter24.0 MiB", "variable12.0 MiB"],
        "site": [
            f"stranded{size(stranded)}",
            "model.py:10 in __init__24.0 MiB",
            "train.py:12 in log12.0 MiB",
        ],
        "state": [f"stranded{size(stranded)}", "in use36.0 MiB"],
    }
    assert result["spoken"].startswith("8.0 MiB stranded, in a segment of 32.0 MiB")


def test_each_device_has_its_tab(chromium: Chromium, leaking: Recording) -> None:
    result = chromium.visit(
        html(leaking),
        """
        const tabs = [...document.querySelectorAll("[role=tab]")];
        const shown = () => [...document.querySelectorAll("[role=tabpanel]")].map((one) => !one.hidden);
        const out = { names: tabs.map((one) => one.textContent), first: shown() };
        tabs[0].dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
        out.second = shown();
        out.selected = tabs.map((one) => one.getAttribute("aria-selected"));
        out.verdict = document.querySelectorAll(".verdict")[1].textContent;
        out.charts = document.documentElement.dataset.charts;
        return out;""",
    ).result
    assert result["names"] == ["cuda:0", "cuda:1"]
    assert result["first"] == [True, False]
    assert result["second"] == [False, True]
    assert result["selected"] == ["false", "true"]
    assert result["verdict"].startswith("cleannothing wrong found")
    assert result["charts"] == "2"


def test_the_theme_follows_the_system_the_reader_and_the_printer(
    chromium: Chromium, leaking: Recording
) -> None:
    result = chromium.visit(
        html(leaking),
        """
        const out = { system: ground() };
        document.querySelector("[data-choice=dark]").click();
        out.dark = ground();
        dispatchEvent(new Event("beforeprint"));
        out.printed = ground();
        dispatchEvent(new Event("afterprint"));
        out.after = ground();
        document.querySelector("[data-choice=light]").click();
        out.light = ground();
        return out;""",
        dark=True,
    ).result
    assert max(result["dark"]) < 64 < 192 < min(result["light"])
    assert result["system"] == result["dark"]
    assert (result["printed"], result["after"]) == (result["light"], result["dark"])


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(chromium: Chromium, leaking: Recording, width: int) -> None:
    result = chromium.visit(
        html(leaking),
        "return { inner: innerWidth, scroll: document.documentElement.scrollWidth, wide: wide() }",
        width=width,
    ).result
    assert result["inner"] == width
    assert result["scroll"] <= width
    assert result["wide"] == []


def test_a_script_from_elsewhere_is_refused(chromium: Chromium, leaking: Recording) -> None:
    visit = chromium.visit(
        html(leaking),
        """
        const added = document.createElement("script");
        added.textContent = "document.title = 'taken'";
        document.body.append(added);
        return document.title;""",
    )
    assert visit.result == "leaking.pickle.gz · memtriage"
    assert any("Content Security Policy" in line for line in visit.console)


def test_a_snapshot_without_history_shows_its_segments(chromium: Chromium) -> None:
    stacks = [stack("train.py:3 in main")]
    tape = Tape(stacks)
    tape.alloc(tape.segment(4 * MIB), MIB, "before the recording")
    device = tape.end()
    nothing = np.zeros(0, np.int64)
    bare = replace(
        device,
        events=Events(*(nothing.astype(column) for column in "lBllli")),
        timeline=Timeline(*[nothing] * 5),
        lives=replace(device.lives, born=np.asarray([-1], np.int32)),
        peak=replace(device.peak, event=-1),
    )
    visit = chromium.visit(html(recording(bare, stacks=stacks)), "return document.body.innerText")
    assert visit.console == []
    assert "No events were recorded" in visit.result
    assert "4.0 MiB in 1 segment" in visit.result


def test_the_page_of_no_device_says_so(chromium: Chromium) -> None:
    visit = chromium.visit(html(recording(stacks=[])), "return document.body.innerText")
    assert visit.console == []
    assert "no device" in visit.result


def test_an_out_of_memory_error_shows_what_was_free(chromium: Chromium) -> None:
    stacks = [stack("model.py:20 in forward")]
    tape = Tape(stacks)
    segment = tape.segment(8 * MIB, stream=7)
    tape.alloc(segment, 6 * MIB, "variable")
    tape.oom(64 * MIB, device_free=5 * MIB)
    result = chromium.visit(
        html(recording(tape.end(), stacks=stacks)),
        "return card('Out of memory').innerText",
    ).result
    for words in (
        "64.0 MiB",
        "5.0 MiB",
        "2.0 MiB in 1 free block; 0 of them are big enough",
        "kept for another stream",
    ):
        assert words in result


def test_the_figures_of_the_chart_are_those_of_the_recording(leaking: Recording) -> None:
    device = leaking.devices[0]
    chart = data_in(html(leaking))["devices"][0]["timeline"]
    names = [layer["name"] for layer in chart["layers"]]
    assert names == [
        "parameter",
        "variable",
        "saved for backward",
        "awaiting a stream",
        "stranded",
        "releasable",
    ]
    marks = {mark["label"]: mark["at"]["event"] for mark in chart["marks"]}
    assert marks["peak"] == device.peak.event == chart["peak_row"]
    assert [marks[f"step {number}"] for number in (1, 2, 3)] == list(device.steps.ends[:3])


def test_the_page_of_a_million_events_stays_small() -> None:
    assert len(html(_big()).encode("utf-8")) < LARGEST


def _big() -> Recording:
    """A million events of noise on 4 devices, 30,000 blocks alive, and more sites than a page can list."""
    random = np.random.default_rng(3)
    stacks = [
        Stack(
            f"site{number}.py:{number} in f", tuple(f"frame_{number}_{at}.py:{at} in g" for at in range(12))
        )
        for number in range(4000)
    ]
    return recording(*(_noise(random, f"cuda:{index}", len(stacks)) for index in range(4)), stacks=stacks)


def _noise(random: np.random.Generator, name: str, stacks: int) -> Any:
    events, alive = 250_000, 7500
    lives = events // 2
    tape = Tape([stack("a.py:1 in f")], device=name)
    tape.segment(alive * 1024)
    seen = tape.end()
    sites = [f"site{number}.py:{number} in f" for number in range(stacks)]
    blocks = tuple(
        Block(
            address=seen.segments[0].address + number * 1024,
            size=1024,
            requested=1000,
            state="active" if number % 3 else "free",
            site=sites[number % stacks],
        )
        for number in range(alive)
    )
    rows = tuple(
        SiteRow(site, OWNERS[number % len(OWNERS)], number, number, number, 1, 1, number, None)
        for number, site in enumerate(sites)
    )
    born = np.arange(lives, dtype=np.int32) * 2
    sizes = random.integers(1, 1 << 24, lives) * 512
    ids = np.arange(lives)
    gone = np.where(ids < alive, -1, np.minimum(born + 9, events - 1)).astype(np.int32)
    course = [random.integers(0, 1 << 27, events) * 512 for _ in range(4)]
    return replace(
        seen,
        events=Events(
            time_us=np.cumsum(random.integers(0, 1 << 20, events)),
            kind=np.zeros(events, np.uint8),
            address=np.zeros(events, np.int64),
            size=np.ones(events, np.int64),
            stream=np.zeros(events, np.int64),
            stack=np.zeros(events, np.int32),
        ),
        lives=Lives(
            born=born,
            died=gone,
            gone=gone,
            address=seen.segments[0].address + ids * 1024,
            size=sizes,
            requested=sizes,
            stream=np.zeros(lives, np.int64),
            stack=random.integers(0, stacks, lives).astype(np.int32),
            owner=(ids % len(OWNERS)).astype(np.uint8),
            pool=np.zeros(lives, np.int16),
        ),
        timeline=Timeline(*course, np.zeros(events, np.int64)),
        segments=(msgspec.structs.replace(seen.segments[0], blocks=blocks),),
        sites=rows,
    )
