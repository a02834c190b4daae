"""The census of a running process on paper and as JSON."""

from __future__ import annotations

import msgspec

from memtriage.model.asked import Answer, HeldHere, Unanswered
from memtriage.model.ledger import Ledger, LedgerRow
from memtriage.report.census_text import as_json, render
from support.printed import printed

MIB = 1024**2

ANSWER = Answer(
    pid=4711,
    rank=3,
    host="node0",
    argv=["train.py"],
    time=1.0,
    run_id="job",
    step=12,
    microbatch=1,
    doing="forward",
    paused_s=0.25,
    ledgers=[
        Ledger(
            device="cuda:3",
            total=30 * MIB,
            source="test",
            rows=[LedgerRow(row="requested", bytes=30 * MIB, owner="parameter")],
        )
    ],
    holders=[
        HeldHere(
            device="cuda:3",
            holder="train.losses[*] -> grad_fn MulBackward0",
            count=40,
            bytes=20 * MIB,
            owners={"saved for backward": 15 * MIB, "variable": 5 * MIB},
            known={"te.fp8_workspaces": MIB},
        ),
        HeldHere(
            device="cuda:3", holder="model.weight", count=1, bytes=8 * MIB, owners={"parameter": 8 * MIB}
        ),
        HeldHere(device="cuda:3", holder=None, count=7, bytes=2 * MIB, owners={"variable": 2 * MIB}),
        HeldHere(device="cpu", holder="train.batch", count=1, bytes=MIB, owners={"variable": MIB}),
    ],
    objects=420_454,
    nodes=2_542,
    notes=["something is missing"],
)


def shown(rows: int = 20) -> str:
    return printed(render, [ANSWER, ANSWER], rows)


def test_on_paper() -> None:
    text = shown()
    assert text.startswith("CENSUS: rank 3 after 12 steps, in forward\ntrain.py · process 4711 on node0")
    assert "paused for 250 ms" in text and "420,454 objects, 2,542 autograd nodes" in text
    assert "- something is missing" in text
    assert "cuda:3 of rank 3  30.0 MiB in use" in text
    assert "kept alive on cuda:3  30.0 MiB in 48 storages" in text
    assert (
        "20.0 MiB  te.fp8_workspaces: train.losses[*] -> grad_fn MulBackward0 · "
        "saved for backward, variable · 40 storages"
    ) in text
    assert "2.0 MiB  7 storages of smaller holders" in text
    assert "kept alive on cpu  1.0 MiB in 1 storage" in text
    assert text.count("CENSUS") == 2


def test_what_is_missing_is_in_the_first_line() -> None:
    missing = ["8 gradients changed while they were read", "searched 10 objects until the time was over"]
    text = printed(render, [msgspec.structs.replace(ANSWER, incomplete=missing)], 20)
    first = " ".join(text.split("train.py")[0].split())
    assert first == f"INCOMPLETE CENSUS: rank 3 after 12 steps, in forward: {'; '.join(missing)}"


def test_holders_beyond_the_rows_asked_for_are_summed() -> None:
    text = shown(rows=1)
    assert "model.weight" not in text
    assert "10.0 MiB  8 storages of others" in text


def test_as_json() -> None:
    failed = [Unanswered(9, "process 9 ended before it answered")]
    said = msgspec.to_builtins(as_json([ANSWER], failed))
    assert said["schema"] == 1
    assert said["failed"] == [{"pid": 9, "why": "process 9 ended before it answered"}]
    (one,) = said["answers"]
    assert one["ledger"]["cuda:3"][0] == {
        "row": "requested",
        "bytes": 30 * MIB,
        "owner": "parameter",
        "detail": None,
    }
    assert [row["bytes"] for row in one["holders"]] == [20 * MIB, 8 * MIB, 2 * MIB, MIB]
    assert "refused" not in one
