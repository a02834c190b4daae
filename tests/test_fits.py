"""The table of batches that fit: sizes derived from two traces, resuming, and the committed page."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not all(map(find_spec, ("trl", "peft", "bitsandbytes"))):  # which must not be imported before a trace
    pytest.skip("trl, peft and bitsandbytes are needed", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import fits  # noqa: E402
import fits_page  # noqa: E402
from support.chromium import Chromium, find  # noqa: E402
from support.llama import HIDDEN, IN_LAYERS, LLAMA, NORMS, WORDS  # noqa: E402

TINY = {**LLAMA, "max_position_embeddings": 32768, "tie_word_embeddings": True}
PARAMETERS = IN_LAYERS + WORDS * HIDDEN + NORMS


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(fits.MODELS, "tiny", {"kind": "dense", "parameters": PARAMETERS, "config": TINY})
    return "tiny"


@pytest.mark.parametrize("way", ["LoRA", "full, AdamW, checkpointing"])
def test_a_derived_peak_is_that_of_a_trace_of_its_own(way: str, tiny: str) -> None:
    traces = [fits.traced(tiny, way, *point) for point in fits.TRACED]
    pair = fits.TracedPair(fits.TRACED, traces)
    assert [pair.at(*point) for point in fits.TRACED] == traces
    derived = fits.peak_of(pair.at(3, 4096))
    traced = fits.peak_of(fits.traced(tiny, way, 3, 4096))
    assert derived.allocated == pytest.approx(traced.allocated, rel=0.001)
    assert derived.needs == pytest.approx(traced.needs, abs=4 << 20)
    for owner in ("parameter", "gradient", "optimizer state"):
        assert derived.by_owner.get(owner) == traced.by_owner.get(owner)


def test_partners_are_found_across_turns_of_a_loop() -> None:
    before, turn, after = list(range(100)), [*range(200, 240)], list(range(300, 400))
    short, long = [*before, *turn, *after], [*before, *turn, *turn, *turn, *after]
    partners = fits.aligned(short, long)
    assert [short[at] for at in partners if at is not None] == short
    assert partners.count(None) == 2 * len(turn)
    assert fits.aligned(long, short)[-len(after) :] == [*range(len(long) - len(after), len(long))]
    with pytest.raises(ValueError, match="differ from block 100 and 100 on"):
        fits.aligned(short, [*before, *range(1000, 9000)])


def test_partners_are_found_where_each_short_turn_has_one_more() -> None:
    turns = [[(layer, part) for part in range(14)] for layer in range(32)]
    short = [part for turn in turns for part in turn]
    long = [part for turn in turns for part in (*turn[:9], "buffer", *turn[9:])]
    partners = fits.aligned(short, long)
    assert [None if at is None else short[at] for at in partners] == [
        None if part == "buffer" else part for part in long
    ]


def test_another_run_does_what_is_missing(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def rows(model: str, way: str) -> list[dict[str, Any]]:
        asked.append((model, way))
        return [{"model": model, "way": way, "length": None, "least": 1, "cells": []}]

    monkeypatch.setattr(fits, "rows", rows)
    file = tmp_path / "fits.jsonl"
    fits.generate(file, [tiny])
    assert [way for _, way in asked] == list(fits.WAYS)
    whole = file.read_text()
    last = whole.splitlines()[-1]
    file.write_text(whole.removesuffix(last + "\n") + last[:10])  # killed while it wrote
    asked.clear()
    fits.generate(file, [tiny])
    assert asked == [(tiny, list(fits.WAYS)[-1])]
    assert file.read_text() == whole
    file.write_text(whole.replace(json.loads(whole.splitlines()[0])["versions"]["trl"], "0.1"))
    with pytest.raises(SystemExit, match="move it away"):
        fits.generate(file, [tiny])


def test_a_check_is_done_once_per_batch(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cards for which one sample does not fit are checked by one trace."""
    monkeypatch.setattr(fits, "CHECKED", 1.0)
    monkeypatch.setattr(fits, "WAYS", {"LoRA": fits.WAYS["LoRA"]})
    line = {"model": tiny, "way": "LoRA", "length": 2048, "least": 10**6, "cells": []}
    monkeypatch.setattr(fits, "rows", lambda model, way: [line])
    file = tmp_path / "fits.jsonl"
    fits.generate(file, [tiny])
    checks = [each for each in fits.read_results(file) if "derived" in each]
    assert len(checks) == len(fits.CARDS)
    assert {each["batch"] for each in checks} == {1}
    before = file.read_text()
    monkeypatch.setattr(fits, "traced", None)
    fits.generate(file, [tiny])
    assert file.read_text() == before


def test_the_committed_page_is_what_the_command_writes() -> None:
    assert fits.PAGE.read_text(encoding="utf-8") == fits_page.committed().markdown()


def test_the_committed_results_are_small_and_of_at_most_200_traces() -> None:
    assert fits.RESULTS.stat().st_size < 300_000
    lines = [line for line in fits.read_results(fits.RESULTS) if line.get("length") is not None]
    traced = {(line["model"], line["way"]) for line in lines if "cells" in line}
    assert 0 < len(traced) * len(fits.TRACED) <= 200


def test_what_a_cell_is_made_of_is_what_it_needs() -> None:
    """Owners and what is outside the allocator; the allocator's unused memory is the rest."""
    head, *lines = fits.read_results(fits.RESULTS)
    for line in lines:
        for card, _, needs, _, *owners, beyond in line.get("cells", ()):
            assert sum(owners) + head["outside"] <= needs + 1 <= head["cards"][card] + 1 <= beyond + 1


def test_the_page_as_a_browser_shows_it(tmp_path: Path) -> None:
    """All cells of a model, and those that a search and a filter leave."""
    table = fits_page.committed()
    name = next(line["model"] for line in table.lines if "cells" in line)
    of_model = [line for line in table.lines if "cells" in line and line["model"] == name]
    cards = table.lines[0]["cards"]
    card = next(reversed(cards))
    expected = {
        f"{line['way']}, {line['length']:,}": next(
            (str(cell[1]) for cell in line["cells"] if cell[0] == card), "none"
        )
        for line in of_model
        if line["length"] is not None and "LoRA" in line["way"]
    }
    script = f"""
        const set = (label, value) => {{
            const field = document.querySelector(`[aria-label="${{label}}"]`);
            field.value = value;
            field.dispatchEvent(new Event(field.tagName === "SELECT" ? "change" : "input"));
        }};
        const texts = () => [...document.querySelectorAll("tbody tr")].map((row) =>
            [...row.cells].map((cell) => cell.textContent));
        set("model", {json.dumps(name)});
        set("card", {json.dumps(card)});
        set("tokens", "any");
        set("search", "lora");
        return {{
            found: Object.fromEntries(texts().map((row) => [`${{row[2]}}, ${{row[3]}}`, row[5]])),
            bars: [...document.querySelectorAll(".stack")].every((bar) => bar.clientWidth > 100),
            wide: document.documentElement.scrollWidth <= innerWidth,
        }};
    """
    chromium = Chromium(find(), tmp_path)
    for width, dark in ((1280, False), (400, True)):
        visit = chromium.visit(table.html(), script, width=width, dark=dark)
        assert visit.console == []
        assert visit.result == {"found": expected, "bars": True, "wide": True}
