"""Phases: at the end of a block of training, what must leave the devices leaves them, and one line says what
is left.

The order is: park, and while the copies are under way collect garbage and clear what the catalogue of
holders allows; then compact. Each does its part alone; one that fails is reported, and the rest goes on.
Where a phase begins again, memory is primed for what it needed before.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from memtriage.catalogue.catalogue import holders, read_holders
from memtriage.catalogue.generic import GENERIC
from memtriage.catalogue.scene import Scene
from memtriage.diagnose.residue import (
    POLICY,
    ResiduePolicy,
    ResidueRow,
    residue_findings,
    residue_rows,
)
from memtriage.model.holders import AllocatorFigures, Cleared
from memtriage.model.trials import PHASE_VARIABLE
from memtriage.model.units import size
from memtriage.observe import cuda
from memtriage.observe.host import rss
from memtriage.observe.malloc import malloc_info
from memtriage.process import active
from memtriage.store.layout import identify
from memtriage.treat import phase_needs
from memtriage.treat.caches import allocator_figures, clear_holders, synchronize

if TYPE_CHECKING:
    from memtriage.treat.compaction.result import Compaction
    from memtriage.treat.parking.handle import Moved, Parked
    from memtriage.treat.phase_needs import Need


_GB: Final = 1024**3
"""What the frameworks' own lines call GB."""
_ROWS: Final = 5
"""Holders of residue that are printed, for each device."""
_SHOWN: Final = 0.01
"""Part of the residue below which a holder is not printed."""


def _print(text: str) -> None:
    print(text, flush=True)


@dataclass(frozen=True, slots=True)
class PhasePolicy:
    """What happens where a phase begins and ends.

    Attributes:
        unpark: what is brought back when it begins, as far as it is parked: arguments as of
            `memtriage.unpark`.
        prime: then allocate and free two blocks as large as what the phase will need, as far as known from
            its earlier rounds, so that its memory packs closely. Only with `compact`.
        clear: at its end: True clears what the catalogue of holders clears by itself; a tuple of kinds or
            names of holders (`memtriage holders`) clears these; False nothing.
        collect: collect garbage. Clearing does so anyway.
        park: what must leave the devices, as far as it is not parked yet: arguments as of `memtriage.park`.
        despite_graphs: as of `memtriage.park`.
        compact: move what strands segments, and give free segments back to the driver.
        keep: tensors and storages that must not move: somebody has their address (DLPack, a library).
        residue: when what stays is looked for, and told; None: never.
        log: gets the lines, as one text. By default they are printed to stdout.
    """

    unpark: tuple[Any, ...] = ()
    prime: bool = True
    clear: bool | tuple[str, ...] = True
    collect: bool = True
    park: tuple[Any, ...] = ()
    despite_graphs: bool = False
    compact: bool = True
    keep: tuple[Any, ...] = ()
    residue: ResiduePolicy | None = POLICY
    log: Callable[[str], None] = _print

    def __post_init__(self) -> None:
        for name in ("unpark", "park", "keep"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                raise TypeError(
                    f"PhasePolicy({name}=...) takes a tuple of models, optimizers, ...; got "
                    f"{type(value).__name__}: write {name}=(value,)"
                )
        for name in ("prime", "collect", "compact", "despite_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"PhasePolicy({name}={getattr(self, name)!r}): give True or False")
        names = self.clear if isinstance(self.clear, tuple) else ()
        if not isinstance(self.clear, bool | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"PhasePolicy(clear={self.clear!r}): give True, False or a tuple of kinds or names"
            )


DEFAULT: Final = PhasePolicy()


@dataclass(slots=True)
class PhaseReport:
    """What the end of a phase did. Sizes in bytes.

    Attributes:
        name: of the phase.
        devices: the allocator's figures at the very end, by device; empty without CUDA.
        host: resident set of the process.
        cleared, parked, compaction: what these steps did; None where there was nothing to do.
        residue: what stays on the devices, by holder; empty unless it was looked for.
        looked: whether it was looked for: only where the counters left room for it.
        problems: what failed, in words.
        parts: seconds that each part took; those of clearing are within those of parking, where that copies.
        seconds: how long all of it took.
    """

    name: str
    devices: Mapping[str, AllocatorFigures]
    host: int | None
    cleared: Cleared | None
    parked: Parked | None
    compaction: Compaction | None
    residue: list[ResidueRow]
    looked: bool
    problems: list[str]
    parts: Mapping[str, float]
    seconds: float

    @property
    def text(self) -> str:
        """The lines that are printed: one for each device, its residue below it."""
        lines = []
        for device, now in self.devices.items():
            lines.append(
                f"GPU Memory after {self.name}: {_gb(now.allocated)} allocated, {_gb(now.reserved)} reserved"
            )
            lines += self._rows(device)
        if not self.devices:
            lines.append(f"Host Memory after {self.name}: {_gb(self.host)} resident")
            lines += self._rows("cpu")
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])

    def _rows(self, device: str) -> list[str]:
        mine = [row for row in self.residue if row.device == device]
        total = sum(row.nbytes for row in mine)
        rank = _rank()
        where = device if rank is None else f"rank {rank}, {device}"
        shown = [row for row in mine if row.nbytes >= _SHOWN * total][:_ROWS]
        lines = [f"  {where}: {size(row.nbytes)} {row.owner} kept alive by {row.name}" for row in shown]
        rest = total - sum(row.nbytes for row in shown)
        small = rest <= _SHOWN * total
        return lines + ([] if small else [f"  {where}: {size(rest)} in {len(mine) - len(shown)} more places"])


class Phase:
    """`with memtriage.phase("train", policy):` See there.

    Attributes:
        report: what the end did; None before it.
        primed: bytes that the beginning primed, by CUDA index.
    """

    def __init__(self, name: str, policy: PhasePolicy = DEFAULT) -> None:
        if not isinstance(name, str) or not name or "\n" in name:
            raise ValueError(f"a phase needs a name of one line; got {name!r}")
        if not isinstance(policy, PhasePolicy):
            raise TypeError(f"policy={policy!r}: give a memtriage.PhasePolicy")
        self.name = name
        self.policy = policy
        self.report: PhaseReport | None = None
        self.primed: Mapping[int, int] = {}
        self._before: dict[str, int] = {}
        self._needs: Mapping[int, Need] = {}

    def __enter__(self) -> Phase:
        if self.policy.unpark:
            bring_back(self.policy.unpark)
        self.begin(_coming(self.policy))
        return self

    def begin(self, coming: Mapping[int, int]) -> None:
        """Prime memory.

        Args:
            coming: by CUDA index, parked bytes that come back during the phase.
        """
        if _acts() and self.policy.compact:
            self._needs = phase_needs.begin(self.name, coming, prime=self.policy.prime)
        self.primed = {device: need.primed for device, need in self._needs.items() if need.primed}
        self._before = _allocated()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures = self.end()
        if error is None and failures:
            raise failures[0]

    def end(self) -> list[Exception]:
        """Everything at the end; returns the failures of its parts."""
        self.report, failures = _end(self.name, self.policy, self._before, self._needs)
        return failures


def phase_begin(name: str, policy: PhasePolicy = DEFAULT) -> Phase:
    """The beginning of a phase without a block: for frameworks that have a function there.

    What is parked is taken to come back during the phase, by the framework's own calls.
    """
    from memtriage.treat.parking.api import parked_by_device

    phase = Phase(name, policy)
    phase.begin(parked_by_device())
    return phase


def phase_end(name: str, policy: PhasePolicy = DEFAULT, begun: Phase | None = None) -> PhaseReport:
    """The end of a phase without a block: for frameworks with a function at the boundary.

    Args:
        name, policy: as of `phase`.
        begun: its beginning, if it has one; with the same name and policy.

    Raises:
        Exception: what failed first, after everything else was done and the lines were printed.
    """
    phase = Phase(name, policy) if begun is None else begun
    failures = phase.end()
    if failures:
        raise failures[0]
    assert phase.report is not None
    return phase.report


def bring_back(what: tuple[Any, ...]) -> Moved | None:
    """Bring back what is parked of it; None if nothing is. Arguments and errors as of `memtriage.unpark`."""
    from memtriage.treat.parking.api import is_parked, unpark

    return unpark(*what) if is_parked(*what) else None


def _end(
    name: str, policy: PhasePolicy, before: Mapping[str, int], needs: Mapping[int, Need]
) -> tuple[PhaseReport, list[Exception]]:
    """Everything at the end of a phase, and the failures of its parts."""
    started = time.perf_counter()
    phase_needs.end(needs)
    failures: list[Exception] = []
    problems: list[str] = []
    parts: dict[str, float] = {}

    def attempt(what: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        try:
            return work()
        except Exception as error:
            failures.append(error)
            problems.append(f"{what} failed: {type(error).__name__}: {error}")
            return None
        finally:
            parts[what] = time.perf_counter() - begun

    acts = _acts()
    cleared: list[Cleared | None] = []

    def clear_once(*, idle: bool) -> None:
        if not cleared:
            cleared.append(attempt("clearing caches", lambda: _clear(policy, idle=idle)))

    parked = compaction = None
    if acts:
        parked = attempt("parking", lambda: _park(policy, meanwhile=lambda: clear_once(idle=True)))
        clear_once(idle=False)  # if nothing had to be copied, or that failed
        compaction = attempt("compaction", lambda: _compact(policy))
        phase_needs.left(needs)
    report = PhaseReport(
        name=name,
        devices=allocator_figures(),
        host=rss(),
        cleared=cleared[0] if cleared else None,
        parked=parked,
        compaction=compaction,
        residue=[],
        looked=False,
        problems=problems,
        parts=parts,
        seconds=0.0,
    )
    if active.session is not None:
        active.session.mark(f"after {name}")
    attempt("looking for residue", lambda: _look(report, policy, before))
    report.seconds = time.perf_counter() - started
    policy.log(report.text)
    return report, failures


def _acts() -> bool:
    """Whether phases move anything, or only mark and log."""
    return os.environ.get(PHASE_VARIABLE) != "off"


def _coming(policy: PhasePolicy) -> Mapping[int, int]:
    """By CUDA index, parked bytes that the phase will bring back: its end parks them again."""
    from memtriage.treat.parking.api import parked_by_device

    return parked_by_device(*policy.park) if policy.park else {}


def _clear(policy: PhasePolicy, *, idle: bool) -> Cleared | None:
    if policy.clear:
        kinds = policy.clear if isinstance(policy.clear, tuple) else _cleared_by_itself()
        return clear_holders(kinds, between_steps=True, empty_cache=False, idle=idle)
    if policy.collect:
        gc.collect()
    return None


def _cleared_by_itself() -> list[str]:
    """The entries that may be cleared unasked. The others take most of the time that looking takes."""
    return [holder.name for holder in holders() if holder.policy == "automatic"]


def _park(policy: PhasePolicy, meanwhile: Callable[[], None]) -> Parked | None:
    if not policy.park:
        return None
    from memtriage.treat.parking.api import park_rest

    synchronize()  # so that clearing need not wait, which would wait for the copies too
    return park_rest(*policy.park, despite_graphs=policy.despite_graphs, meanwhile=meanwhile)


def _compact(policy: PhasePolicy) -> Compaction | None:
    if not cuda.devices() or cuda.capturing():
        return None
    if not policy.compact:
        sys.modules["torch"].cuda.empty_cache()
        return None
    from memtriage.treat.compaction.api import compact

    done: Compaction = compact(keep=policy.keep)
    return done


# Residue

_VARIABLES: Final = ("generic.module_containers", "generic.functions")
"""Generic entries that only tell where a program keeps variables: its results as well as its leftovers."""

_known: Final[dict[tuple[str, str], int]] = {}
"""By phase and device: bytes allocated when a census last looked. Only clearly more is worth another look."""


def _look(report: PhaseReport, policy: PhasePolicy, before: Mapping[str, int]) -> None:
    """Find out what stays, where the counters say that there may be something."""
    if policy.residue is None:
        return
    now = _allocated()
    # Where something was to leave the devices, all that is allocated is in question; else what has come.
    bases = {} if policy.park else before
    suspects = {device for device in now if _may_hide(report.name, device, now, bases, policy.residue)}
    if not suspects:
        return
    rows = _census_rows(suspects, variables=bool(policy.park))
    report.looked = True
    for device in suspects:
        _known[report.name, device] = now[device]
    totals = {device: sum(row.nbytes for row in rows if row.device == device) for device in suspects}
    report.residue = [row for row in rows if totals[row.device] >= policy.residue.floor]
    if active.session is not None:
        active.session.residue(residue_findings(rows, report.name, None, policy.residue))


def _may_hide(
    phase: str, device: str, now: Mapping[str, int], bases: Mapping[str, int], policy: ResiduePolicy
) -> bool:
    """Whether so much is allocated, beyond what is known, that residue may be among it."""
    known = _known.get((phase, device))
    explained = bases.get(device, 0) if known is None else (1 + policy.share) * known
    return now[device] - explained > policy.floor


def _census_rows(devices: set[str], *, variables: bool) -> list[ResidueRow]:
    from memtriage.account.census import take_census
    from memtriage.treat.parking.api import addresses

    with Scene() as scene:
        readings = read_holders(scene, [holder for holder in GENERIC if holder.name not in _VARIABLES])
    generic = {
        (place, address): reading.name for reading in readings for place, address, _ in reading.storages
    }
    return residue_rows(
        take_census().storages, generic, devices=devices, variables=variables, ours=addresses()
    )


def _allocated() -> dict[str, int]:
    """Bytes of live tensors by device as the counters tell: of CUDA devices in use, else of malloc."""
    figures = allocator_figures()
    if figures:
        return {device: now.allocated for device, now in figures.items() if now.allocated is not None}
    info = malloc_info()
    return {} if info is None else {"cpu": info.in_use}


def _rank() -> int | None:
    """This process's rank: torch.distributed's where it is in use, else the launcher's."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return identify(os.environ, pid=os.getpid(), time_s=time.time()).rank


def _gb(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / _GB:.2f}GB"


def phase(name: str, policy: PhasePolicy | None = None) -> Phase:
    """A context manager whose end makes the devices as empty as they can be. Sizes in bytes.

        with memtriage.phase("train", policy=memtriage.PhasePolicy(park=(model, optimizer))):
            train()

    At the end transient caches of known holders are cleared, garbage is collected, what the policy names is
    parked on the host, and the rest is compacted; then one line for each device is printed, in the
    frameworks' own
    words, with what stays below it:

        GPU Memory after train: 0.02GB allocated, 0.04GB reserved

    In a watched run the end is a mark (`after train`), and what stays is a finding of kind `residue`.

    Args:
        name: of the phase, one line.
        policy: what to bring back at the beginning, and what to do at the end; `PhasePolicy()` by default,
            which parks nothing.

    Raises:
        ValueError, TypeError: the name or the policy is none.
        Exception: at the end, what failed of it, after the rest was done and the line printed; an exception
            of the block goes first.
    """
    return Phase(name, DEFAULT if policy is None else policy)
