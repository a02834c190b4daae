"""Censuses and ledgers name the entries of the catalogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memtriage
from memtriage.account.gpu_ledger import gpu_ledger
from memtriage.catalogue.catalogue import BUILT_IN, owner_with
from memtriage.model.blocks import Block, DriverUse, Segment
from memtriage.model.census import Census, StorageRecord
from support.holder_standins import NBYTES, STANDINS, Stage, tensor
from support.paths import named

MIB = 1 << 20
ENTRIES = {holder.name: holder for holder in BUILT_IN}


def take(monkeypatch: pytest.MonkeyPatch, *names: str) -> Census:
    stage = Stage(monkeypatch)
    for name in names:
        STANDINS[name][0](stage)()
    return memtriage.census()


def test_each_storage_names_its_entry_and_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    census = take(
        monkeypatch, "te.fp8_workspaces", "te.adam_remainders", "te.tensor_objects", "fsdp2.communication",
        "megatron.dispatcher", "te.float8_transpose", "te.fp8_meta",
    )  # fmt: skip
    known = {(storage.known, storage.owner) for storage in census.storages if storage.known is not None}
    assert known == {
        ("te.fp8_workspaces", "known cache"),
        ("te.adam_remainders", "optimizer state"),
        ("te.tensor_objects", "autograd context"),
        ("fsdp2.communication", "communication buffer"),
        ("megatron.dispatcher", "known cache"),
        ("te.float8_transpose", "known cache"),
        ("te.fp8_meta", "buffer"),
    }


def test_groups_count_their_bytes_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch)
    cache: dict[Any, Any] = {("causal", n, n): tensor() for n in range(5)}
    stage.module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    groups = [group for group in memtriage.census().groups if group.known]
    assert [group.known for group in groups] == [{"te.causal_mask": 5 * NBYTES}]


def test_a_census_keeps_nothing_of_a_holder_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    cache: dict[str, Any] = {"a": tensor()}
    Stage(monkeypatch).module("transformer_engine.pytorch.softmax", _default_causal_mask=cache)
    reference = torch.multiprocessing.reductions.StorageWeakRef(cache["a"].untyped_storage())
    memtriage.census()
    cache.clear()
    assert reference.expired()


def test_a_mark_on_a_tensor_is_no_holder_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(storage.known for storage in take(monkeypatch, "te.do_not_clear").storages)


def test_an_entry_without_an_owner_names_only_the_unclaimed() -> None:
    entry = ENTRIES["te.fp8_workspaces"]
    assert owner_with(entry, "variable") == "known cache"
    assert owner_with(entry, "parameter") == "parameter"
    assert owner_with(ENTRIES["te.adam_remainders"], "variable") == "optimizer state"


def test_ledger_rows_name_the_entry_that_pins_a_segment() -> None:
    block = Block(address=MIB, size=MIB, requested=MIB, state="active")
    free = Block(address=2 * MIB, size=19 * MIB, requested=0, state="free")
    segment = Segment(
        device=0, address=MIB, size=20 * MIB, stream=0, pool=(0, 0), expandable=False, blocks=(block, free)
    )
    storage = StorageRecord(
        device="cuda:0", address=MIB, nbytes=MIB, owner="known cache", path=named("rope.forward[*]"),
        known="megatron.rotary",
    )  # fmt: skip
    use = DriverUse(total=80 * MIB, used=20 * MIB, processes=(), own=20 * MIB, source="test")
    ledger = gpu_ledger("cuda:0", [segment], [storage], use)
    rows = {row.row: row for row in ledger.rows}
    assert rows["requested"].owner == "known cache"
    assert rows["requested"].detail == "megatron.rotary: rope.forward[*] 1.0 MiB"
    assert "the biggest megatron.rotary: rope.forward[*] (known cache)" in (rows["stranded"].detail or "")
