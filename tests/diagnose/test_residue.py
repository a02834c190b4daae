"""Residue at the end of a phase: which storages count, and what is said of them."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from memtriage.diagnose.residue import (
    KEPT_OWNERS,
    ResiduePolicy,
    ResidueRow,
    residue_findings,
    residue_rows,
)
from memtriage.model.census import Owner, StorageRecord
from support.paths import named

MIB = 1 << 20
DEVICES = {"cuda:0", "cuda:1"}


def record(address: int, nbytes: int = MIB, **fields: Any) -> StorageRecord:
    known = {"device": "cuda:0", "owner": "known cache", "path": named("train.cache[*]")}
    return StorageRecord(address=address, nbytes=nbytes, **(known | fields))


def rows(*records: StorageRecord, **settings: Any) -> list[ResidueRow]:
    return residue_rows(records, **({"generic": {}, "devices": DEVICES, "variables": True} | settings))


@pytest.mark.parametrize("owner", get_args(Owner))
def test_what_a_model_has_between_phases_is_none(owner: Owner) -> None:
    assert bool(rows(record(1, owner=owner))) == (owner not in KEPT_OWNERS)


def test_holder_is_one_row_and_the_largest_comes_first() -> None:
    table = rows(
        record(1), record(2), record(3, 5 * MIB, path=named("train.graph")), record(4, device="cuda:1")
    )
    assert [(row.device, row.name, row.nbytes, row.storages) for row in table] == [
        ("cuda:0", "train.graph", 5 * MIB, 1),
        ("cuda:0", "train.cache[*]", 2 * MIB, 2),
        ("cuda:1", "train.cache[*]", MIB, 1),
    ]


def test_other_devices_and_memtriages_own_memory_are_left_out() -> None:
    assert not rows(record(1, device="cpu"), record(7), ours={7})


def test_variables_count_where_all_had_to_leave_or_are_held() -> None:
    storages = [
        record(1, owner="variable"),
        record(2, owner="variable"),
        record(3, owner="variable", known="te.x"),
    ]
    generic = {("cuda:0", 2): "generic.module_attributes"}
    assert sum(row.storages for row in rows(*storages, generic=generic)) == 3
    kept = rows(*storages, generic=generic, variables=False)
    assert {row.name for row in kept} == {
        "generic.module_attributes: train.cache[*]",
        "te.x: train.cache[*]",
    }


def test_a_row_without_a_path_is_called_by_its_owner() -> None:
    assert rows(record(1, path=None))[0].name == "known cache"


def test_findings_name_the_large_holders_of_each_device() -> None:
    residues = residue_findings(
        rows(
            record(1, 80 * MIB),
            record(2, 15 * MIB, path=named("train.graph"), owner="saved for backward"),
            record(3, MIB, path=named("train.small")),
            record(4, MIB, device="cuda:1"),
        ),
        "train",
        7,
    )
    assert [
        (finding.kind, finding.device, finding.bytes, finding.holder, finding.phase, finding.step)
        for finding in residues
    ] == [
        ("residue", "cuda:0", 80 * MIB, "train.cache[*]", "train", 7),
        ("residue", "cuda:0", 15 * MIB, "train.graph", "train", 7),
    ]
    assert residues[0].evidence == [
        "after phase 'train' 96.0 MiB stay on cuda:0 in addition to parameters, gradients, optimizer state "
        "and buffers; 80.0 MiB of it in 1 storages here"
    ]
    assert "autograd graph" in (residues[1].mechanism or "")


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"owner": "garbage"}, "PhasePolicy(collect=True)"),
        ({"owner": "autograd context"}, ".detach()"),
        ({"owner": "communication buffer"}, "reshard()"),
        ({"owner": "variable"}, "PhasePolicy(park=...)"),
        ({"known": "te.fp8_workspaces"}, "memtriage.clear_caches(['te.fp8_workspaces'])"),
    ],
)
def test_the_fix_fits_the_holder(fields: dict[str, Any], fix: str) -> None:
    (found,) = residue_findings(rows(record(1, 64 * MIB, **fields)), "train", None)
    assert fix in (found.fix or "")
    assert found.mechanism


def test_a_known_holder_is_named_before_its_path() -> None:
    (found,) = residue_findings(rows(record(1, 64 * MIB, known="te.fp8_workspaces")), "train", None)
    assert found.holder == "te.fp8_workspaces: train.cache[*]"


@pytest.mark.parametrize("settings", [{"share": -0.1}, {"share": 1.1}, {"floor": -1}, {"findings": 0}])
def test_a_policy_beyond_them_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"floor is at least 0 .* share between 0 and 1"):
        ResiduePolicy(**settings)


def test_the_five_largest_holders_of_a_device_have_findings() -> None:
    table = rows(*(record(n, (9 + n) * MIB, path=named(f"train.held_{n}")) for n in range(7)))
    assert [found.bytes for found in residue_findings(table, "train", None)] == [
        n * MIB for n in (15, 14, 13, 12, 11)
    ]
