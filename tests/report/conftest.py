import pytest

from memtriage.model.ledger import LedgerRow
from memtriage.model.report import RankCount, RunReport
from support import runs
from support.chromium import Chromium, find
from support.runs import step_mark

MiB = 1024**2
GiB = 1024**3


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    return Chromium(find(), tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def leak():
    return runs.leak


@pytest.fixture
def make_report():
    """A report of a run on one GPU or several."""

    def make(*findings, verdict="leak", ranks=1, steps=41, **fields):
        rank = None if ranks == 1 else 0
        known = {
            "verdict": verdict,
            "steps": steps,
            "findings": list(findings),
            "marks": [step_mark(step, GiB + step * 164 * MiB, rank) for step in range(1, steps + 1)],
            "ledger": {
                "cuda:0": [
                    LedgerRow(row="requested", bytes=3 * GiB, owner="parameter"),
                    LedgerRow(row="requested", bytes=GiB, owner="saved for backward", detail="losses[*]"),
                    LedgerRow(row="outside the allocator", bytes=624 * MiB, detail="context, kernels"),
                ],
                "host": [LedgerRow(row="libraries", bytes=GiB), LedgerRow(row="unexplained", bytes=-MiB)],
            },
            "ranks": RankCount(seen=ranks, of=ranks),
        }
        return RunReport(**(known | fields))

    return make
