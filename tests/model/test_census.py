"""Censuses and what is compared with them: names of storages, bytes on the host."""

from __future__ import annotations

import pytest

from memtriage.model.census import CutSeen, GroupDetail, HolderGroup, StorageRecord, known_path
from memtriage.model.paths import HolderPath, in_words
from support.paths import items_of, named

PATH = items_of("main", "losses")


@pytest.mark.parametrize(
    ("path", "known", "holder", "name"),
    [
        (PATH, None, "frame main(): losses[*]", "frame main(): losses[*]"),
        (PATH, "te.workspaces", "frame main(): losses[*]", "te.workspaces: frame main(): losses[*]"),
        (None, "te.workspaces", None, "te.workspaces"),
        (None, None, None, None),
    ],
)
def test_a_storage_is_named_after_the_known_holder(
    path: HolderPath | None, known: str | None, holder: str | None, name: str | None
) -> None:
    storage = StorageRecord(device="cpu", address=64, nbytes=8, owner="variable", path=path, known=known)
    assert (storage.holder, storage.named) == (holder, name)
    assert (known_path(known, path) is None) == (name is None)


@pytest.mark.parametrize(("device", "on_host"), [("cpu", 110), ("cuda:0", 10)])
def test_storages_on_a_gpu_take_no_host_memory_but_what_is_kept_for_them(device: str, on_host: int) -> None:
    group = HolderGroup(
        device=device,
        anchor=named("losses"),
        path=PATH,
        count=1,
        nbytes=100,
        by_path={},
        owners={},
        attached=False,
        kept=10,
    )
    assert group.on_host == on_host
    assert (group.key, group.holder) == ((device, named("losses")), in_words(PATH))


@pytest.mark.parametrize("retained", [8, 4])
def test_a_cut_releases_the_same_part_of_a_group_that_has_grown(retained: int) -> None:
    cut = CutSeen(cut="detach", at=PATH, releases=400, of=600)
    earlier, now = GroupDetail(retained=retained, retained_of=8, cuts=[cut]), GroupDetail()
    now.take_retained(earlier, nbytes=8, size=6000)
    assert [(each.releases, each.of) for each in now.cuts] == [(4000, 6000)]
