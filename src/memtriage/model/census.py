"""What a census says about storages and about groups of them. Numbers and text only: nothing is held."""

from __future__ import annotations

from typing import Literal

import msgspec

Owner = Literal[
    "parameter",
    "gradient",
    "optimizer state",
    "buffer",
    "saved for backward",
    "autograd context",
    "known cache",
    "communication buffer",
    "variable",
    "garbage",
    "c++ only",
]


class StorageRecord(msgspec.Struct, kw_only=True):
    """One live storage.

    Attributes:
        device: `cuda:N` or `cpu`.
        address: base address (`untyped_storage().data_ptr()`); 0 for an empty storage.
        nbytes: size in bytes as asked for (the allocator may round it up).
        owner: what it is.
        holder: shortest holder path, folded (`train.losses['lm'][*] -> grad_fn MulBackward0 -> saved self`).
        pinned: page-locked host memory.
        shared: in shared memory (`share_memory_`, DataLoader worker batches).
        known: the entry of the catalogue of known holders that keeps it, e.g. `te.fp8_workspaces`.
    """

    device: str
    address: int
    nbytes: int
    owner: Owner
    holder: str | None = None
    pinned: bool = False
    shared: bool = False
    known: str | None = None

    @property
    def named(self) -> str | None:
        """The holder path, behind the name of the entry of the catalogue that keeps it."""
        if self.known is None:
            return self.holder
        return self.known if self.holder is None else f"{self.known}: {self.holder}"


class HolderGroup(msgspec.Struct, kw_only=True):
    """Storages that one place of the program keeps: the same device and the same anchor.

    Attributes:
        device: `cuda:N` or `cpu`.
        anchor: what the program itself holds: the holder path up to its first hop into the autograd graph.
        holder: the whole path of the group's largest kind of storage.
        count: storages in the group.
        nbytes: their bytes.
        tails: bytes by whole path.
        owners: bytes by owner.
        attached: some of it hangs on the autograd graph.
        known: bytes by entry of the catalogue of known holders, as far as one keeps them.
    """

    device: str
    anchor: str
    holder: str
    count: int
    nbytes: int
    tails: dict[str, int]
    owners: dict[str, int]
    attached: bool
    known: dict[str, int] = msgspec.field(default_factory=dict)


class GroupDetail(msgspec.Struct, kw_only=True):
    """What a closer look at a group told.

    Attributes:
        retained: bytes that would be freed if this holder let go; less than the group's own bytes when
            others hold some of them too.
        also_held_by: paths of those others.
        allocated_at: `file.py:line in function` of a recent allocation.
        bound: number of entries at which the holding container stops growing; None for no bound.
        entries: entries in it now.
        holder_kind: type of the holding object, e.g. `list`.
        shared: the storages lie in shared memory.
        saved_by: the autograd node that keeps the largest of them, and the module it most likely ran in.
    """

    retained: int | None = None
    also_held_by: list[str] = msgspec.field(default_factory=list)
    allocated_at: str | None = None
    bound: int | None = None
    entries: int | None = None
    holder_kind: str | None = None
    shared: bool = False
    saved_by: str | None = None


class Census(msgspec.Struct, kw_only=True):
    """Every storage that was alive at one instant, and who held it.

    Attributes:
        storages: one record for each storage.
        groups: the same bytes by device and anchor, largest first.
        nodes_by_anchor: autograd nodes by what the program holds them with.
        garbage: objects that wait for the cyclic collector.
        objects: Python objects walked.
        nodes: autograd nodes walked.
        seconds: how long it took.
        parameters: elements of the parameters that this process holds (a rank's shards, not the whole model).
    """

    storages: list[StorageRecord]
    groups: list[HolderGroup]
    nodes_by_anchor: dict[str, int]
    garbage: int = 0
    objects: int
    nodes: int
    seconds: float
    parameters: int = 0
