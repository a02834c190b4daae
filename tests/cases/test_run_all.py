"""`make cases`: which parts run on which machine, what a failure leaves, and what pages are written."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

CASES = Path(__file__).parents[2] / "cases"
OWN = ("run_all", "measuring", "tables")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(CASES))
    yield importlib.import_module("run_all")
    for name in OWN:
        sys.modules.pop(name, None)


def runnable(cases: ModuleType, **has: object) -> set[str]:
    machine = replace(cases.Machine(0, transformer_engine=False, deepspeed=None), **has)
    return {str(part) for part in cases.PARTS if part.unable(machine) is None}


def test_every_part_has_its_script_and_every_case_a_part(cases: ModuleType) -> None:
    for part in cases.PARTS:
        assert (CASES / part.case / part.command[0]).exists()
    assert {part.case for part in cases.PARTS} == {path.parent.name for path in CASES.glob("*/README.md")}


def test_what_runs_follows_from_what_the_machine_has(cases: ModuleType) -> None:
    cpu = {"loss_retention/cpu", "fused_attention_ctx/cpu", "fp8_refit/simulate", "playbook/cpu"}
    assert runnable(cases) == cpu
    assert runnable(cases, deepspeed="") == cpu | {"deepspeed_zero2_offload/cpu"}
    one = runnable(cases, gpus=1)
    assert {"loss_retention/gpu", "fused_attention_ctx/cpu", "fp8_refit/segments", "playbook/gpu"} <= one
    both = runnable(cases, gpus=2, transformer_engine=True, deepspeed="")
    assert {"fused_attention_ctx/gpu", "fused_attention_ctx/fsdp", "fp8_refit/trials"} <= both
    assert not both & {"loss_retention/cpu", "fused_attention_ctx/cpu", "playbook/cpu"}


@pytest.fixture
def small(cases: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Two cases of a line each, and one that fails."""
    monkeypatch.setattr(cases, "CASES", tmp_path)
    monkeypatch.setattr(sys.modules["tables"], "CASES", tmp_path)
    body = "import json, sys; json.dump({'n': 7}, open(sys.argv[sys.argv.index('--out') + 1], 'w'))\n"
    for name, text in (
        ("good", body),
        ("bad", "raise SystemExit(3)\n"),
        ("slow", "import time; time.sleep(60)\n"),
    ):
        (tmp_path / name / "results").mkdir(parents=True)
        (tmp_path / name / "measure.py").write_text(text)
        (tmp_path / name / "results" / "cpu.json").write_text('{"n": 1}')
        (tmp_path / name / "page.py").write_text(
            "def blocks(results):\n    return {'cpu': str(results['cpu']['n'])}\n"
        )
        (tmp_path / name / "README.md").write_text("<!-- cpu -->\n1\n<!-- /cpu -->\n")
    parts = [
        cases.Part(name, "cpu", ("measure.py",), "cpu.json", unable, limit)
        for name, unable, limit in (
            ("good", cases.anywhere, 60), ("bad", cases.anywhere, 60), ("slow", cases.anywhere, 0.5),
            ("far", cases.gpu, 60),
        )
    ]  # fmt: skip
    monkeypatch.setattr(cases, "PARTS", tuple(parts))
    monkeypatch.setattr(cases, "this_machine", lambda: cases.Machine(0, False, None))
    return cases


def test_a_failure_leaves_former_results_and_the_rest_goes_on(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    assert small.main() == 1
    printed = capsys.readouterr().out
    assert "failed: 2\n  bad/cpu: exit status 3\n  slow/cpu: not done after 0 s" in printed
    assert "left out: 1\n  far/cpu: needs a GPU" in printed and "ran: 1\n  good/cpu" in printed
    read = {
        name: json.loads((tmp_path / name / "results" / "cpu.json").read_text()) for name in ("good", "bad")
    }
    assert read == {"good": {"n": 7}, "bad": {"n": 1}}
    assert (tmp_path / "good" / "README.md").read_text() == "<!-- cpu -->\n7\n<!-- /cpu -->\n"


def test_with_out_the_pages_stay_and_list_runs_nothing(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    assert small.main() == 0
    assert "[1/4] good/cpu: would run" in capsys.readouterr().out
    there = tmp_path / "there"
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--out", str(there), "--only", "good"])
    assert small.main() == 0
    assert json.loads((there / "good" / "cpu.json").read_text()) == {"n": 7}
    assert (tmp_path / "good" / "README.md").read_text() == "<!-- cpu -->\n1\n<!-- /cpu -->\n"
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--only", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        small.main()
    assert "no such case: nowhere; there are" in capsys.readouterr().err
