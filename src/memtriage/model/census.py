"""What a census says about storages and groups of them. Numbers and names only: nothing is kept alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from memtriage.model.paths import HolderPath, PathSegment, SegmentKind, has, in_words

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
        path: shortest holder path, folded.
        pinned: page-locked host memory.
        shared: in shared memory (`share_memory_`, DataLoader worker batches).
        known: the entry of the catalogue of known holders that keeps it, e.g. `te.fp8_workspaces`.
    """

    device: str
    address: int
    nbytes: int
    owner: Owner
    path: HolderPath | None = None
    pinned: bool = False
    shared: bool = False
    known: str | None = None

    @property
    def holder(self) -> str | None:
        """The path as printed: `train.losses['lm'][*] -> grad_fn MulBackward0 -> saved self`."""
        return None if self.path is None else in_words(self.path)

    @property
    def named(self) -> str | None:
        """The path as printed, after the name of the entry of the catalogue that keeps it."""
        path = known_path(self.known, self.path)
        return None if path is None else in_words(path)


def known_path(known: str | None, path: HolderPath | None) -> HolderPath | None:
    """Put the entry of the catalogue of known holders before a path; None without both."""
    if known is None:
        return path
    return (PathSegment(SegmentKind.KNOWN, known), *(path or ()))


class HolderGroup(msgspec.Struct, kw_only=True):
    """Storages that one place of the program keeps: the same device and the same anchor.

    Where a place keeps autograd nodes and no storage at all, `count` and `nbytes` are 0.

    Attributes:
        device: `cuda:N` or `cpu`.
        anchor: what the program itself holds: the holder path up to its first hop into the autograd graph.
        path: the whole path of the group's largest kind of storage.
        count: storages in the group.
        nbytes: their bytes.
        by_path: bytes by whole path.
        owners: bytes by owner.
        attached: some of it hangs on the autograd graph.
        known: bytes that known holders keep, by entry of the catalogue.
        holders: bytes by token of the object that holds them: a container, an instance, a module. Censuses
            that share `observe.identity.Identities` give the same object the same token as long as it lives,
            and never another object; empty in others. A variable's holder is its module, instance or
            function: token and anchor together tell which variable.
        within: token of the outermost object that has entries (`[*]`) on the anchor, if it supports weak
            references: a queue whose entries hold the storages.
        witnesses: tokens of some of its storages: a few of each holder, and those that an earlier census
            with the same `Identities` chose and that it still has.
        kept: estimated bytes of host memory of the autograd nodes, tensor objects and storage records that
            the anchor keeps alive (`account.native_sizes`). No storage's size includes them. If an anchor has
            groups on several devices, only the one on `cpu` counts them, else the largest.
        objects: how many autograd nodes these are.
        made: sequence numbers that autograd gave the oldest and the newest of them; None where unknown.
        containers: how many objects have the entries (`[*]`) on the anchor, the innermost first.
        entries: objects that the anchor itself names: entries of its container, 1 for a variable. For a state
            that is carried from step to step they stay the same while its graph gets longer.
    """

    device: str
    anchor: HolderPath
    path: HolderPath
    count: int
    nbytes: int
    by_path: dict[HolderPath, int]
    owners: dict[str, int]
    attached: bool
    known: dict[str, int] = msgspec.field(default_factory=dict)
    holders: dict[int, int] = msgspec.field(default_factory=dict)
    within: int | None = None
    witnesses: frozenset[int] = frozenset()
    kept: int = 0
    objects: int = 0
    made: tuple[int, int] | None = None
    containers: list[int] = []
    entries: int = 0

    @property
    def on_host(self) -> int:
        """Bytes of host memory: the storages, if they are on the host, and `kept`."""
        return self.kept + (self.nbytes if self.device == "cpu" else 0)

    @property
    def key(self) -> GroupKey:
        return self.device, self.anchor

    @property
    def holder(self) -> str:
        """The whole path as printed."""
        return in_words(self.path)

    @property
    def largest_path(self) -> HolderPath:
        """The whole path of most bytes."""
        return max(self.by_path, key=self.by_path.__getitem__)


def add_storage(
    groups: dict[GroupKey, HolderGroup], record: StorageRecord, anchor: HolderPath, *, attached: bool
) -> HolderGroup:
    """Count a storage in the group of its device and anchor, which is made if missing; return the group."""
    path, nbytes = record.path or (), record.nbytes
    group = groups.get((record.device, anchor))
    if group is None:
        group = groups[record.device, anchor] = HolderGroup(
            device=record.device, anchor=anchor, path=path, count=0, nbytes=0, by_path={}, owners={},
            attached=False,
        )  # fmt: skip
    group.count += 1
    group.nbytes += nbytes
    group.by_path[path] = group.by_path.get(path, 0) + nbytes
    group.owners[record.owner] = group.owners.get(record.owner, 0) + nbytes
    group.attached = group.attached or attached
    if record.known is not None:
        group.known[record.known] = group.known.get(record.known, 0) + nbytes
    return group


def counting_kept(groups: Iterable[HolderGroup]) -> dict[HolderPath, HolderGroup]:
    """Return the group of each anchor that counts `kept`: the one on `cpu`, else the largest."""
    chosen: dict[HolderPath, HolderGroup] = {}
    for group in groups:
        other = chosen.get(group.anchor)
        if other is None or (group.device == "cpu", group.nbytes) > (other.device == "cpu", other.nbytes):
            chosen[group.anchor] = group
    return chosen


GroupKey = tuple[str, HolderPath]
"""Identifies a group of a census: device and anchor."""


CutKind = Literal[
    "detach",
    "clone",
    "context",
    "pack",
    "grad",
    "create_graph",
    "remove",
    "traceback",
    "close",
    "cache",
    "bound",
    "shorten",
    "break",
    "collect",
    "no_grad",
]
"""How a change of a program removes references. Each has its words in `playbook/cuts.py`."""


class CutSeen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one kind of cut would release of a group at a census.

    Attributes:
        cut: the kind.
        at: path to what the removed references lead to; of `detach` and `clone`, to the tensors.
        kind: type of what has these references, such as the container.
        together: paths in other groups, if it only releases that much together with the same cut there.
        releases: bytes of the group that nothing would keep.
        of: its bytes then, with the nodes and tensor objects that it keeps on its device.
    """

    cut: CutKind
    at: HolderPath
    kind: str = ""
    together: list[HolderPath] = []
    releases: int
    of: int

    def scaled(self, by: float) -> CutSeen:
        """Return the same cut of a group that is so many times as large."""
        return replace(self, releases=round(by * self.releases), of=round(by * self.of))


class GroupDetail(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a closer look at a group found.

    Attributes:
        retained: bytes of the group that would be freed if its holders released them; less than all of them
            if others keep some alive, too.
        retained_of: bytes that the group had then; both None if not computed.
        also_held_by: paths of those others, from the same census.
        elsewhere: objects of libraries that were not walked keep some of the group alive, too. Then only a
            census of all libraries can compute `retained`.
        allocated_at: `file.py:line in function` of a recent allocation.
        stored_at: the program's line that stores into the holder, in the same form; None if not certain.
        bound: number of entries at which the holding container stops growing; None for no bound.
        entries: entries in it now.
        holder_kind: type of the holding object, e.g. `list`.
        shared: the storages are in shared memory.
        mapped: they are in memory that is shared or mapped from a file, as page-locked memory is: malloc's
            counter does not see it, and the resident set counts it apart.
        saved_by: the autograd node that keeps the largest of them, and the module it most likely ran in.
        stored_value: source of what that line stores; None if it is not a short expression.
        stored_depth: number of segments of the anchor that lead to what that line stores into; 0 if unknown.
        carried: what that line stores is computed from the holder's previous value.
        carrier: path of another variable that leads to most of the graph, and that the program computes from
            its own previous value; None if there is none, or if `carried`.
        classes: classes of the objects on the way to the holder, and their base classes, with their modules.
        in_optimizer: one of these objects is an optimizer.
        differentiated: its graph has nodes that differentiate a gradient.
        backward_ran: most nodes of its graph have lost what they saved: a backward went through them.
        collected: what the holder belongs to, if a container of the program collects whole modules or
            optimizers; else None.
        cuts: what changes of the program would release; computed with `retained`.
        packs_itself: its graph has a node that saves its own output, as a pack hook returned it.
    """

    retained: int | None = None
    retained_of: int | None = None
    also_held_by: list[HolderPath] = msgspec.field(default_factory=list)
    elsewhere: bool = False
    allocated_at: str | None = None
    stored_at: str | None = None
    bound: int | None = None
    entries: int | None = None
    holder_kind: str | None = None
    shared: bool = False
    mapped: bool = False
    saved_by: str | None = None
    stored_value: str | None = None
    stored_depth: int = 0
    carried: bool = False
    carrier: HolderPath | None = None
    classes: list[str] = msgspec.field(default_factory=list)
    in_optimizer: bool = False
    differentiated: bool = False
    backward_ran: bool = False
    packs_itself: bool = False
    collected: Literal["module", "optimizer"] | None = None
    cuts: list[CutSeen] = msgspec.field(default_factory=list)

    @property
    def retains_all(self) -> bool:
        """Whether the holders keep all of the group alive, and nothing else any of it."""
        return bool(self.retained) and self.retained == self.retained_of

    def outgrown_by(self, nbytes: int) -> bool:
        """Whether `retained` must be computed again for a group that has so many bytes by now."""
        return not self.retains_all and nbytes >= 2 * (self.retained_of or 0)

    def take_retained(self, earlier: GroupDetail, nbytes: int, size: int) -> None:
        """Take what an earlier census computed. Holders that kept all of a group still do, and a cut releases
        the same part of it.

        Args:
            nbytes: the group's bytes now.
            size: the same with what it keeps besides.
        """
        self.retained, self.retained_of = earlier.retained, earlier.retained_of
        self.also_held_by = earlier.also_held_by
        self.cuts = [cut.scaled(size / max(1, cut.of)) for cut in earlier.cuts]
        if earlier.retains_all:
            self.retained = self.retained_of = nbytes


class Census(msgspec.Struct, kw_only=True):
    """Every storage that was alive at one instant, and who held it.

    Attributes:
        storages: one record per storage.
        groups: the same bytes by device and anchor, largest first.
        objects: Python objects walked.
        nodes: autograd nodes walked.
        seconds: how long it took.
        parameters: elements of the parameters that this process holds (a rank's shards, not the whole model).
        partial: why not everything was searched; None for a whole census. Sizes of a partial one are complete
            for tensors that have a Python object; holders are not.
    """

    storages: list[StorageRecord]
    groups: list[HolderGroup]
    objects: int
    nodes: int
    seconds: float
    parameters: int = 0
    partial: str | None = None

    @property
    def waiting(self) -> dict[str, dict[str, int]]:
        """Bytes that wait for the cyclic collector, by device and class."""
        waiting: dict[str, Counter[str]] = {}
        for group in self.groups:
            if has(group.anchor, SegmentKind.GARBAGE_CYCLE):
                waiting.setdefault(group.device, Counter())[group.anchor[0].name] += group.nbytes
                waiting.setdefault("cpu", Counter())[group.anchor[0].name] += group.kept
        return {device: dict(classes) for device, classes in waiting.items()}
