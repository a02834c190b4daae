"""The cases' pages: generated tables agree with the results beside them, and every page has the same form."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

CASES = Path(__file__).parents[2] / "cases"
HEADINGS = ["Symptom", "What memtriage said", "Cure", "Proof"]
NAMES = sorted(path.parent.name for path in CASES.glob("*/page.py"))
LARGEST = 100_000


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    sys.path.insert(0, str(CASES))
    yield importlib.import_module("tables")
    sys.path.remove(str(CASES))
    sys.modules.pop("tables", None)


def test_every_case_has_a_page(tables: ModuleType) -> None:
    assert {"fp8_refit", "deepspeed_zero2_offload", "fused_attention_ctx", "loss_retention"} <= set(NAMES)
    assert tables.cases() == NAMES


@pytest.mark.parametrize("case", NAMES)
def test_a_pages_tables_are_what_its_results_say(tables: ModuleType, case: str) -> None:
    assert tables.rendered(case) == (CASES / case / "README.md").read_text(), (
        f"python cases/tables.py {case} writes the page anew"
    )


@pytest.mark.parametrize("case", NAMES)
def test_a_page_has_the_headings_of_all(case: str) -> None:
    text = re.sub(r"```.*?```", "", (CASES / case / "README.md").read_text(), flags=re.DOTALL)
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [heading for heading in headings if heading in HEADINGS] == HEADINGS
    assert re.match(r"# .+\n", text)


@pytest.mark.parametrize("case", NAMES)
def test_results_are_small_and_say_when_and_on_what(case: str) -> None:
    files = sorted((CASES / case / "results").glob("*.json"))
    assert files
    for file in files:
        assert file.stat().st_size < LARGEST, file
        about = json.loads(file.read_text())["about"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
        assert about["device"] and "torch" in about["versions"]


def test_a_block_without_a_maker_is_an_error(
    tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "CASES", tmp_path)
    folder = tmp_path / "one"
    (folder / "results").mkdir(parents=True)
    (folder / "results" / "cpu.json").write_text('{"n": 3}')
    (folder / "page.py").write_text("def blocks(results):\n    return {'cpu': str(results['cpu']['n'])}\n")
    page = folder / "README.md"
    page.write_text("# One\n<!-- cpu -->\nold\n<!-- /cpu -->\nrest\n")
    assert tables.update("one") and not tables.update("one")
    assert page.read_text() == "# One\n<!-- cpu -->\n3\n<!-- /cpu -->\nrest\n"
    page.write_text("# One\n<!-- gpu -->\n<!-- /gpu -->\n")
    with pytest.raises(ValueError, match=r"has blocks \['gpu'\], page.py makes \['cpu'\]"):
        tables.rendered("one")
