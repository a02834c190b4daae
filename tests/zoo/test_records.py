"""Recorded runs of the zoo, judged again: what `memtriage report` says of them, in seconds.

`record.py` makes the records. The truth is that of the scripts (`truth.toml`; `public.toml` of scripts after
public reports), not what the runs printed.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.zoo.test_zoo import RATES, TRUTH, names_the_leak, within

from memtriage.diagnose.ranks.merge import merge
from memtriage.report.growth_words import judged_again
from memtriage.store.reader import read_run

ALL = TRUTH | tomllib.loads(Path(__file__).with_name("public.toml").read_text())
RECORDS = Path(__file__).parent.parent / "data" / "records"
FILES = sorted(path.relative_to(RECORDS).as_posix() for path in RECORDS.glob("*/*.jsonl.gz"))


def report(file: str) -> dict[str, Any]:
    run = read_run([RECORDS / file])
    run.ranks = [judged_again(rank) for rank in run.ranks]
    return msgspec.to_builtins(merge(run))


def truth_of(file: str) -> dict[str, Any]:
    return ALL[file.split(".")[0] + ".py"]


@pytest.mark.parametrize("file", FILES)
def test_a_recorded_run_is_judged_rightly(file: str) -> None:
    judged, truth = report(file), truth_of(file)
    if int(file.split(".")[1]) in truth.get("not_judged_in", []):
        assert judged["verdict"] == "not_judged"
        return
    assert judged["verdict"] == truth["verdict"]
    if truth["verdict"] == "clean":
        assert {finding["kind"] for finding in judged["findings"]} <= set(truth.get("allowed", []))
        return
    naming = [finding for finding in judged["findings"] if names_the_leak(finding, truth)]
    assert naming, judged["findings"]
    fixes = " / ".join(finding["fix"] or "" for finding in naming)
    assert "fix" not in truth or any(word in fixes for word in truth["fix"]), fixes
    first = {finding["cuts"][0]["cut"] for finding in naming if finding["cuts"]}
    assert "cures" not in truth or not first or first & {cure["cut"] for cure in truth["cures"]}, first
    assert "event" not in truth or {finding["event"] for finding in naming} == {truth["event"]}
    for field in RATES:
        if field in truth:
            rates = [finding[field] for finding in naming]
            assert within(rates, truth[field], truth.get("tolerance", 0.10)), rates


def test_every_script_is_recorded_in_files_of_a_size_that_git_bears() -> None:
    assert {file.split(".")[0] + ".py" for file in FILES} == set(ALL)
    sizes = [(RECORDS / file).stat().st_size for file in FILES]
    assert max(sizes) < 1 << 20 and sum(sizes) < 8 << 20


def test_judging_needs_no_torch() -> None:
    code = f"""
import sys
sys.modules["torch"] = None
from pathlib import Path
from memtriage.report.growth_words import judged_again
from memtriage.store.reader import read_run
(rank,) = read_run([Path({str(RECORDS / FILES[-1])!r})]).ranks
print(len(judged_again(rank).findings))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(report(FILES[-1])["findings"])
