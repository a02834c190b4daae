"""Phases: at the end of a block of training, free the devices' memory, and print in one line what is left.

The order is: park; while the copies run, collect garbage and clear what the catalogue of holders allows; then
compact. If one of these fails, that is reported, and the others are still done. When a phase begins again,
memory is primed for what it needed before.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
"""Holders of residue that are printed per device."""
_SHOWN: Final = 0.01
"""Holders with a smaller share of the residue are not printed."""
_PRINT: Final = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class PhasePolicy:
    """What happens when a phase begins and ends.

    Attributes:
        unpark: what to bring back at the beginning, if it is parked: arguments as for `memtriage.unpark`.
        prime: then allocate and free two blocks of the size that the phase needed in its earlier rounds, so
            that its memory packs closely. Only with `compact`.
        clear: at the end, True clears the holders whose policy is `automatic`; a tuple of kinds or names of
            holders (`memtriage holders`) clears these; False clears none.
        collect: collect garbage. Clearing does so anyway.
        park: what must leave the devices, unless it is parked already: arguments as for `memtriage.park`.
        despite_graphs: as for `memtriage.park`.
        compact: move what strands segments, and return free segments to the driver.
        keep: tensors and storages that must not move because their address is known elsewhere (DLPack, a
            library).
        residue: when to look for and report what stays; None: never.
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
    log: Callable[[str], None] = _PRINT

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
        devices: the allocator's figures after everything, by device; empty without CUDA.
        host: resident set of the process.
        cleared, parked, compaction: what these steps did; None if there was nothing to do.
        residue: what stays on the devices, by holder; empty unless it was looked for.
        looked: whether it was looked for, which is only done if the counters allow for residue.
        problems: what failed, in words.
        parts: seconds that each part took; those of clearing are within those of parking, where that copies.
        seconds: how long all of it took.
    """

    name: str
    devices: Mapping[str, AllocatorFigures] = field(default_factory=dict)
    host: int | None = None
    cleared: Cleared | None = None
    parked: Parked | None = None
    compaction: Compaction | None = None
    residue: list[ResidueRow] = field(default_factory=list)
    looked: bool = False
    problems: list[str] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The printed lines: one per device, followed by its residue."""
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
    """The context manager that `memtriage.phase` returns; see there.

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
        self._needs: dict[int, Need] | None = None

    def __enter__(self) -> Phase:
        if self.policy.unpark:
            bring_back(self.policy.unpark)
        from memtriage.treat.parking.api import parked_by_device

        # What its end parks comes back during the phase.
        self.begin(parked_by_device(*self.policy.park) if self.policy.park else {})
        return self

    def begin(self, coming: Mapping[int, int]) -> None:
        """Prime memory.

        Args:
            coming: parked bytes that will come back during the phase, by CUDA index.
        """
        if _acts() and self.policy.compact:
            self._needs = phase_needs.begin(self.name, coming, prime=self.policy.prime)
        needs = self._needs or {}
        self.primed = {device: need.primed for device, need in needs.items() if need.primed}
        self._before = _allocated()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failures = self.end()
        if error is None and failures:
            raise failures[0]

    def end(self) -> list[Exception]:
        """Do everything at the end; return the failures of its parts."""
        started = time.perf_counter()
        policy, needs = self.policy, self._needs or {}
        report = self.report = PhaseReport(self.name)
        failures: list[Exception] = []
        if self._needs is not None:
            phase_needs.end(self.name, needs)

        def attempt(what: str, work: Callable[[], Any]) -> Any:
            begun = time.perf_counter()
            try:
                return work()
            except Exception as error:
                failures.append(error)
                report.problems.append(f"{what} failed: {type(error).__name__}: {error}")
                return None
            finally:
                report.parts[what] = time.perf_counter() - begun

        def clear_once(*, idle: bool) -> None:
            if "clearing caches" not in report.parts:
                report.cleared = attempt("clearing caches", lambda: _clear(policy, idle=idle))

        if _acts():
            report.parked = attempt("parking", lambda: _park(policy, lambda: clear_once(idle=True)))
            clear_once(idle=False)  # if nothing had to be copied, or that failed
            report.compaction = attempt("compaction", lambda: _compact(policy))
            phase_needs.left(needs)
        report.devices, report.host = allocator_figures(), rss()
        if active.session is not None:
            active.session.mark(f"after {self.name}")
        attempt("looking for residue", lambda: _look(report, policy, self._before))
        report.seconds = time.perf_counter() - started
        policy.log(report.text)
        return failures


def phase_begin(name: str, policy: PhasePolicy = DEFAULT) -> Phase:
    """Begin a phase without a `with` block: for frameworks that call a function there.

    The framework is assumed to bring back during the phase what is parked.
    """
    from memtriage.treat.parking.api import parked_by_device

    phase = Phase(name, policy)
    phase.begin(parked_by_device())
    return phase


def phase_end(name: str, policy: PhasePolicy = DEFAULT, begun: Phase | None = None) -> PhaseReport:
    """End a phase without a `with` block: for frameworks that call a function there.

    Args:
        name, policy: as for `phase`.
        begun: what `phase_begin` returned for the same name and policy, if it was called.

    Raises:
        Exception: the first failure, after everything else was done and the lines were printed.
    """
    phase = Phase(name, policy) if begun is None else begun
    failures = phase.end()
    if failures:
        raise failures[0]
    assert phase.report is not None
    return phase.report


def bring_back(what: tuple[Any, ...]) -> Moved | None:
    """As `memtriage.unpark`, but skip what is not parked; None if nothing is."""
    from memtriage.treat.parking.api import is_parked, unpark

    return unpark(*what) if is_parked(*what) else None


def _acts() -> bool:
    """Whether phases move anything, or only mark and log."""
    return os.environ.get(PHASE_VARIABLE) != "off"


def _clear(policy: PhasePolicy, *, idle: bool) -> Cleared | None:
    if policy.clear:
        # Looking at others than those that are cleared automatically would take most of the time.
        automatic = [holder.name for holder in holders() if holder.policy == "automatic"]
        kinds = policy.clear if isinstance(policy.clear, tuple) else automatic
        return clear_holders(kinds, between_steps=True, empty_cache=False, idle=idle)
    if policy.collect:
        gc.collect()
    return None


def _park(policy: PhasePolicy, meanwhile: Callable[[], None]) -> Parked | None:
    if not policy.park:
        return None
    from memtriage.treat.parking.api import park_rest

    synchronize()  # now, because clearing must not wait: it would wait for the copies, too
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
"""Generic entries that only say where a program keeps variables, its results as well as its leftovers."""

_known: Final[dict[tuple[str, str], int]] = {}
"""Bytes allocated at the last census, by phase and device. Only clearly more is worth another census."""


def _look(report: PhaseReport, policy: PhasePolicy, before: Mapping[str, int]) -> None:
    """Find out what stays, if the counters allow for residue."""
    if policy.residue is None:
        return
    now = _allocated()
    # If the phase parks something, all that is allocated may be residue; else only what the phase added.
    bases = {} if policy.park else before
    grown = 1 + policy.residue.share
    explained = {
        device: grown * _known[report.name, device]
        if (report.name, device) in _known
        else bases.get(device, 0)
        for device in now
    }
    suspects = {device for device in now if now[device] - explained[device] > policy.residue.floor}
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
    """Allocated bytes by device according to the counters: of CUDA devices in use, else of malloc."""
    figures = allocator_figures()
    if figures:
        return {device: now.allocated for device, now in figures.items() if now.allocated is not None}
    info = malloc_info()
    return {} if info is None else {"cpu": info.in_use}


def _rank() -> int | None:
    """This process's rank: torch.distributed's if it is in use, else the launcher's."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return identify(os.environ, pid=os.getpid(), time_s=time.time()).rank


def _gb(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / _GB:.2f}GB"


def phase(name: str, policy: PhasePolicy | None = None) -> Phase:
    """A context manager whose end frees as much of the devices' memory as it can. Sizes in bytes.

        with memtriage.phase("train", policy=memtriage.PhasePolicy(park=(model, optimizer))):
            train()

    At the end, what the policy names is parked on the host, transient caches of known holders are cleared,
    garbage is collected, and the rest is compacted. Then one line per device is printed, in the frameworks'
    own words, followed by what stays:

        GPU Memory after train: 0.02GB allocated, 0.04GB reserved

    In a watched run the end is a mark (`after train`), and what stays is a finding of kind `residue`.

    Args:
        name: of the phase, one line.
        policy: what to bring back at the beginning, and what to do at the end; `PhasePolicy()` by default,
            which parks nothing.

    Raises:
        ValueError, TypeError: the name or the policy is invalid.
        Exception: at the end, what failed there, after the rest was done and the lines were printed; an
            exception of the block takes precedence.
    """
    return Phase(name, DEFAULT if policy is None else policy)
