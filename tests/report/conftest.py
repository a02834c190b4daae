import pytest

from memtriage.model.findings import Finding
from memtriage.model.ledger import LedgerRow
from memtriage.model.report import RankCount, RunReport
from support.chromium import Chromium, find
from support.runs import step_mark

MiB = 1024**2
GiB = 1024**3


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    return Chromium(find(), tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def leak():
    """A finding with every field filled in."""

    def make(rank=None, **fields):
        known = {
            "kind": "leak",
            "device": "cuda:0",
            "rank": rank,
            "bytes": 6724 * MiB,
            "bytes_per_step": 164 * MiB,
            "bytes_per_microbatch": 41 * MiB,
            "holder": "train.losses['lm'][*] -> grad_fn WrapBackward -> ctx.context[1] -> saved tensor of "
            "LinearBackward in model.transformer.h.11.mlp.c_proj",
            "also_held_by": ["frame evaluate(): acts", "closure of hook grab: captured['n1'][*]"],
            "stored_at": "/home/user/projects/fast-llm/train.py:150 in train",
            "allocated_at": "/home/user/projects/fast-llm/train.py:142 in loss_func",
            "mechanism": "Each step's loss still carries its graph.",
            "fix": "Store loss.detach() or loss.item() instead of the loss.",
            "playbook": "M21",
            "phase": "forward",
            "step": 41,
            "evidence": [
                "allocated rose at each of 38 steps",
                "2,132 storages are reachable only from there",
            ],
        }
        return Finding(**(known | fields))

    return make


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
