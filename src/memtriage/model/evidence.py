"""What a watch observed, as its record keeps it: readings of counters, and censuses. No judgment.

`diagnose/growth` judges from these alone, during a run, at its end, and again from a file. Sizes are bytes.
"""

from __future__ import annotations

import msgspec

from memtriage.model.bounds import Seconds, Whole
from memtriage.model.census import CutSeen, GroupDetail
from memtriage.model.findings import Event, ProcessKind
from memtriage.model.paths import HolderPath
from memtriage.model.position import Scale, TrainingPosition


class Readings(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Readings of one counter on one scale, since the line before: blocks of successive readings.

    Attributes:
        scale: what positions count.
        counter: `cpu` (malloc's bytes in use; of a role: anonymous memory, resident or swapped out), a
            device, `host` (the resident set), `shared` (its shared and mapped part), `code` (generated code),
            `heap` (what malloc and Python's allocator have handed out, read now and then), or an event, whose
            readings are counts.
        role: the process of the job, as `Role.role` has it; empty for the main process.
        step: for readings from micro-batch to micro-batch of one step: that step; None for those of the run.
        width: readings per block.
        at: mean position of each block.
        means: mean of its readings.
        floors: its smallest reading; empty where `width` is 1.
    """

    scale: Scale
    counter: str
    role: str = ""
    step: Whole | None = None
    width: Whole = 1
    at: list[float] = []
    means: list[float] = []
    floors: list[Whole] = []


class HolderSeen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one holder kept alive at one census.

    Attributes:
        id: the same number at later censuses of the run as long as it is the same holder: the same object, or
            a new one with the same content.
        device: `cuda:N` or `cpu`.
        anchor: what the program itself holds.
        path: whole path to what grew most.
        nbytes: of its storages.
        kept: host memory of the autograd nodes, tensor objects and storage records that it keeps alive.
        storages, nodes: how many storages and autograd nodes these are.
        entries: objects that the anchor names.
        holders: objects that hold its storages.
        containers: how many objects have the entries (`[*]`) on the anchor, the innermost first.
        attached: some of it is kept alive through the autograd graph.
        owner: what most of its bytes are.
        known: the entry of the catalogue of known holders that keeps more than half of it.
        replaced: it has more storages than at the census before, and most of the earlier ones are gone.
        renewed: all its nodes and storages are newer than those of the census before, as for a longer batch.
        continued: its storages begin or end with the same bytes as at the census before.
        detail: a closer look; None where none was taken.
    """

    id: Whole
    device: str
    anchor: HolderPath
    path: HolderPath
    nbytes: Whole = 0
    kept: Whole = 0
    storages: Whole = 0
    nodes: Whole = 0
    entries: Whole = 0
    holders: Whole = 0
    containers: list[Whole] = []
    attached: bool = False
    owner: str = ""
    known: str | None = None
    replaced: bool = False
    renewed: bool = False
    continued: bool = False
    detail: GroupDetail | None = None

    @property
    def size(self) -> int:
        """All bytes that it keeps alive on its device."""
        return self.nbytes + (self.kept if self.device == "cpu" else 0)


class DataSeen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A container of ordinary data at one census, that had more entries than at an earlier one.

    Attributes:
        id: the same number as long as it is the same container.
        path: to any of its entries.
        kind: its type.
        entries: how many it has; of an array that longer ones replace, its bytes.
        entry_bytes: of a recent entry, without tensors.
        before: entries at the census before, where it was not yet followed.
        native: type of its newest entries that C++ made, with memory that only it knows of.
        allocated_at: the line that makes about as many bytes per position; None where none was recorded.
        stored_at: the line that stores into it; None where that is not certain.
        stored_value: source of what that line stores; None if it is not a short expression.
        classes: of it and of the objects on the way to it, as `GroupDetail.classes` has them.
        lengthens: it is an array that is replaced by a longer one.
        cuts: what changes of the program would release, measured at its newest entries.
    """

    id: Whole
    path: HolderPath
    kind: str
    entries: Whole
    entry_bytes: Whole
    before: Whole | None = None
    native: str | None = None
    allocated_at: str | None = None
    stored_at: str | None = None
    stored_value: str | None = None
    classes: list[str] = []
    lengthens: bool = False
    cuts: list[CutSeen] = []


class CensusSeen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One census, and what changed since the one before in the same comparison.

    Attributes:
        position: where training was.
        work_s: seconds since the watch began, without those that censuses took.
        within_step: it is compared with others of the same step, from micro-batch to micro-batch.
        between: it was taken between two positions while the program ran, and all was searched. At other
            times (at the end, or when memory ran out) a holder that is gone or smaller proves nothing.
        partial: only what the program itself holds was searched: all of that is listed, and other holders may
            still be there.
        interrupted: memory had run out: it counts for the step, or micro-batch, that had begun.
        pause_s: seconds for which it stopped the program.
        holders: those that are new or have changed.
        gone: ids of holders that are no longer there.
        data: containers of ordinary data that grow, or did.
        totals: bytes of everything that has a holder, by device, as its counter counts them.
        other_memory: least and most bytes of memory that no census lists, just before it, by the counter that
            sees it: `host` for private memory that neither malloc nor Python gives out, and `shared`.
        waiting: bytes that wait for the cyclic collector, by device, and by the class they belong to.
        tracked: objects that Python's cyclic collector tracks.
        collections: times that it has looked through all of them.
        collector_off: it was off.
        profiled: torch's profiler was on.
        role: the process, as for `Readings`. Of another process than the main one it was read from outside.
    """

    position: TrainingPosition
    work_s: float = 0.0
    within_step: bool = False
    between: bool = True
    partial: bool = False
    interrupted: bool = False
    pause_s: float = 0.0
    holders: list[HolderSeen] = []
    gone: list[Whole] = []
    data: list[DataSeen] = []
    totals: dict[str, Whole] = {}
    other_memory: dict[str, tuple[Whole, Whole]] = {}
    waiting: dict[str, dict[str, Whole]] = {}
    tracked: Whole = 0
    collections: Whole = 0
    collector_off: bool = False
    profiled: bool = False
    role: str = ""

    def at(self, scale: Scale) -> float:
        """Return its position on a scale, for comparisons over the run or within a step."""
        if scale == "second":
            return self.work_s
        if scale == "step":
            return self.position.step + self.interrupted
        if self.within_step:
            return self.position.into_step + 1 if self.interrupted else self.position.microbatch
        return self.position.backwards + self.interrupted


class Role(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one process of the job is, as far as that is known by now. The last line of a role counts.

    Processes that follow one another, such as the workers of each epoch, have one role.

    Attributes:
        role: in words, e.g. `worker 0 of train_loader`.
        where: what kind of process.
        group: what processes that do the same work have in common, e.g. `workers of train_loader`.
        processes: how many have had this role so far.
        lived_s: seconds that the longest of them was seen.
        highest: most bytes of anonymous memory that one of them had.
        unread: why its objects could not be read; None if they were, or were not asked for. Of all processes
            together (`roles.LIVING`): what they are.
        each: bytes that each of these has for itself: their number is what is read, as so many MiB.
    """

    role: str
    where: ProcessKind
    group: str = ""
    processes: Whole = 1
    lived_s: Seconds = 0.0
    highest: Whole = 0
    unread: str | None = None
    each: Whole = 0


class Situation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What projections need in addition to counters and censuses, at one instant. The last line counts.

    Attributes:
        position: where training is.
        limits: bytes at which memory runs out, by device.
        used: bytes in use, by device, as that limit counts them.
        readable: by device, whether its counter could be read.
        works_s: position on the scale of seconds at which the program's work was first seen to repeat; before
            that it imports, loads and builds.
        shapes_vary: whether the program trained on batches of several shapes; None if unknown.
        collectives: of how many `torch.distributed` keeps a record, the last ones.
        came_with: bytes by which malloc's use rose during each event.
    """

    position: TrainingPosition
    limits: dict[str, Whole] = {}
    used: dict[str, Whole] = {}
    readable: dict[str, bool] = {}
    works_s: float = 0.0
    shapes_vary: bool | None = None
    collectives: Whole = 0
    came_with: dict[Event, Whole] = {}


EvidenceLine = Readings | CensusSeen | Role | Situation
"""A line of the record that growth is judged from."""
