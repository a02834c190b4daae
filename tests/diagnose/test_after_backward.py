"""What is said of contexts that keep what their backward has restored."""

from __future__ import annotations

from typing import Any

from memtriage.diagnose.after_backward import ENTRY, left_after_backward
from memtriage.diagnose.residue import POLICY
from memtriage.model.census import StorageRecord
from support.paths import named


def record(nbytes: int, **fields: Any) -> StorageRecord:
    usual = {
        "device": "cuda:0",
        "owner": "autograd context",
        "path": named("loss -> ctx.tensor_objects[2]._data"),
    }
    return StorageRecord(address=4096, nbytes=nbytes, **(usual | fields))


def test_all_layers_are_one_finding_for_each_device() -> None:
    half = POLICY.floor // 2
    left = left_after_backward(
        [
            record(half, known=ENTRY, path=named("loss -> ctx.tensor_objects[0]._scale_inv")),
            record(half + 1, known=ENTRY),
            record(POLICY.floor, known=ENTRY, device="cuda:1"),
            record(POLICY.floor, known="te.fp8_workspaces", device="cuda:2"),
            record(POLICY.floor, device="cuda:3"),
        ],
        step=3,
    )
    assert [(finding.device, finding.bytes, finding.kind) for finding in left] == [
        ("cuda:0", 2 * half + 1, "residue"),
        ("cuda:1", POLICY.floor, "residue"),
    ]
    assert left[0].holder == "loss -> ctx.tensor_objects[2]._data"
    assert left[0].evidence[0].startswith("2 storages on cuda:0")


def test_little_is_left_alone() -> None:
    assert left_after_backward([record(POLICY.floor - 1, known=ENTRY)], step=3) == []
