"""One execution of a cell: what is looked at before and after, and what its report says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import memtriage
from memtriage.integrations.notebook import watched_cell
from memtriage.integrations.notebook.watched_cell import CellOptions, WatchedCell
from memtriage.integrations.notebook.words import census_in_words
from memtriage.model.blocks import DeviceCounters
from memtriage.model.cell import CellReport
from memtriage.model.census import Census, HolderGroup
from memtriage.model.findings import Finding
from memtriage.model.paths import ANY_ITEM
from memtriage.model.report import RankCount, RunReport
from memtriage.model.units import MIB
from memtriage.observe import cuda
from memtriage.process import active
from support import censuses
from support.censuses import census, looks_at
from support.paths import of_module


def mib(size: float) -> torch.Tensor:
    return torch.zeros(round(size * MIB), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def main(monkeypatch: pytest.MonkeyPatch, only_new_objects: None) -> Iterator[Any]:
    """The module in which a notebook's cells run."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    censuses.leave_out(monkeypatch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "MEMTRIAGE_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield module
    vars(module).clear()
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    assert active.session is None


class Notebook:
    """Executes cells as IPython does, as far as a watched cell asks."""

    def __init__(self, main: Any) -> None:
        self.shell: Any = SimpleNamespace(
            user_ns=vars(main), compile=SimpleNamespace(_filename_map={"/tmp/ipykernel_7/12.py": 4}),
            last_execution_result=None, InteractiveTB=SimpleNamespace(),
        )  # fmt: skip

    def run(self, body: Callable[[], object] = lambda: None, **options: Any) -> CellReport:
        watched = WatchedCell(self.shell, CellOptions(**options))
        watched.begin()
        failed = False
        try:
            body()
        except Exception as raised:
            failed, sys.last_value, sys.last_traceback = True, raised, raised.__traceback__
        return watched.end(sys.last_value if failed else None, "In[5]")


def changed(changes: Any) -> list[tuple[str, int, int]]:
    return [(each.holder, each.bytes, each.count) for each in changes]


def test_what_an_execution_changed(main: Any) -> None:
    main.model, main.old, main.kept = mib(4), [mib(3), mib(2)], [mib(1)]
    main.Out = main._oh = {3: mib(2)}

    def cell() -> None:
        main.model = mib(4)
        main.old.clear()
        main.kept.append(mib(2))
        main.new = mib(1)
        main._oh[5] = mib(3)

    report = Notebook(main).run(cell)
    assert report.label == "In[5]"
    assert 0 < report.seconds < 60
    assert changed(report.came) == [("Out[*]", 3 * MIB, 1), ("kept[*]", 2 * MIB, 1), ("new", MIB, 1)]
    assert changed(report.went) == [("old[*]", -5 * MIB, -2)]
    assert report.outputs == {"cpu": 5 * MIB}
    (use,) = report.devices
    assert (use.device, use.after - use.before, use.reserved) == ("cpu", MIB, None)
    assert use.peak is not None and use.peak > use.after
    assert (report.holders, report.traceback, report.freed, report.notes) == ([], {}, None, [])
    assert report.run_report is not None and report.run_report.verdict == "not_judged"
    assert {"host"} <= set(report.run_report.ledger)
    assert report.runs_out_in == []


def test_an_out_of_memory_error_frees_what_its_traceback_keeps(main: Any) -> None:
    notebook = Notebook(main)
    main.model = mib(4)

    def cell() -> None:
        activations = [mib(2), mib(1)]
        raise torch.OutOfMemoryError(f"CUDA out of memory with {len(activations)}")

    kept = notebook.run(cell, keep_traceback=True)
    assert (kept.traceback, kept.freed) == ({"cpu": 3 * MIB}, None)
    assert ("last traceback -> frame cell(): activations[*]", 3 * MIB, 2) in changed(kept.came)
    freed = notebook.run(cell)
    assert freed.traceback == {}
    assert freed.freed is not None
    assert (freed.freed.bytes, freed.freed.frames > 0) == ({"cpu": 3 * MIB}, True)
    assert [each.bytes for each in freed.freed.holders] == [-3 * MIB]
    assert ("model", 4 * MIB, 1) in changed(freed.holders) and len(freed.holders) <= 8
    assert freed.run_report is not None and freed.run_report.verdict == "out_of_memory"
    assert changed(freed.went) == [("last traceback -> frame cell(): activations[*]", -3 * MIB, -2)]


# --- with censuses that are stated --------------------------------------------------------------------------


def held(name: str, mib: float, count: int = 1, device: str = "cpu") -> HolderGroup:
    """A variable of the notebook; the items of a list, where its name ends so."""
    variable = of_module("__main__", name.removesuffix("[*]"))
    anchor = (*variable, ANY_ITEM) if name.endswith("[*]") else variable
    nbytes = round(mib * MIB)
    return HolderGroup(
        device=device, anchor=anchor, path=anchor, count=count, nbytes=nbytes, by_path={anchor: nbytes},
        owners={"variable": nbytes}, attached=False,
    )  # fmt: skip


Sees = Callable[..., Notebook]


@pytest.fixture
def sees(main: Any, monkeypatch: pytest.MonkeyPatch) -> Sees:
    def notebook(*looks: Census) -> Notebook:
        monkeypatch.setattr(watched_cell, "Look", looks_at(*looks))
        return Notebook(main)

    return notebook


def test_lists_are_cut_and_holders_come_after_an_out_of_memory_error(sees: Sees, tmp_path: Path) -> None:
    few, many = census(held("model", 9)), census(*(held(f"v{each}", 10 - each) for each in range(9)))
    report = sees(few, many).run(top=2, directory=str(tmp_path))
    assert [each.holder for each in report.came] == ["v0", "v1"]
    assert [each.holder for each in sees(many, few).run(top=2).went] == ["v0", "v1"]
    (record,) = tmp_path.rglob("*.jsonl")
    assert report.notes == [f"the record is kept: memtriage report {record.parent}"]
    assert sees(few, many).run().holders == []
    assert len(sees(few, many).run().came) == 9

    def failing() -> None:
        raise MemoryError

    report = sees(few, many).run(failing, top=2)
    assert [each.holder for each in report.holders] == [f"v{each}" for each in range(8)]


def test_in_a_watched_process_the_cell_s_own_is_told(sees: Sees, tmp_path: Path) -> None:
    notebook = sees(census(), census(held("kept", 2)))
    with memtriage.watch(tmp_path, quiet=True):
        report = notebook.run()
    assert report.run_report is None and report.runs_out_in == []
    assert changed(report.came) == [("kept", 2 * MIB, 1)]
    assert report.notes == [
        "this process is watched already, from outside of the cell: steps and growth within the cell are in "
        "that watch's report"
    ]


def test_gpus_in_use_have_a_peak_where_it_rose(sees: Sees, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda:1` has had as much before; `cuda:2` has a tensor only before the cell."""
    before = {0: (5, 7), 1: (5, 7), 2: (None, None)}
    after = {0: (9, 12), 1: (5, 7), 2: (None, 3)}
    now = before
    monkeypatch.setattr(cuda, "initialized", lambda: True)
    monkeypatch.setattr(cuda, "devices", lambda: list(now))
    monkeypatch.setattr(
        cuda,
        "counters",
        lambda device: DeviceCounters(peak_allocated=now[device][0], reserved=now[device][1]),
    )
    monkeypatch.setattr(watched_cell, "Watch", ReportingWatch)
    monkeypatch.setattr(watched_cell, "take_ledgers", lambda *given, **options: [])

    def cell() -> None:
        nonlocal now
        now = after

    two = census(held("x", 2, device="cuda:0"), held("y", 1), held("w", 1, device="mps:0"))
    report = sees(census(held("z", 3, device="cuda:2")), two).run(cell)
    rows = [(use.device, use.before, use.after, use.reserved) for use in report.devices]
    assert rows == [
        ("mps:0", 0, MIB, None),
        ("cuda:2", 3 * MIB, 0, 3),
        ("cuda:1", 0, 0, 7),
        ("cuda:0", 0, 2 * MIB, 12),
        ("cpu", 0, MIB, None),
    ]
    assert [use.peak for use in report.devices[:4]] == [None, None, None, 9]


class ReportingWatch:
    """Stands for a watch, with the report that it ends with."""

    folder = Path("/nonexistent")
    report: RunReport | None = None

    def __init__(self, *given: Any, **options: Any) -> None:
        assert options["quiet"] and not options["last_census"]
        assert options["program"].argv == ["notebook cell"]

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


WITHIN = Finding(
    kind="leak", device="cpu", holder_path=(*of_module("__main__", "kept"), ANY_ITEM), bytes_per_step=5,
    certainty="proven", allocated_at="12.py:3 in train", evidence=["at other.py:1"],
)  # fmt: skip


def test_findings_within_the_cell_have_the_notebook_s_names(
    sees: Sees, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = RunReport(
        verdict="leak", steps=3, findings=[WITHIN], marks=[], ledger={}, ranks=RankCount(seen=1, of=1)
    )
    monkeypatch.setattr(watched_cell, "Watch", ReportingWatch)
    monkeypatch.setattr(ReportingWatch, "report", report)
    told = sees(census()).run().run_report
    assert told is not None
    (finding,) = told.findings
    assert (finding.holder, finding.allocated_at) == ("kept[*]", "In[4]:3 in train")
    assert finding.evidence == ["at other.py:1"]


def test_a_watch_without_a_report_leaves_the_rest(sees: Sees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_cell, "Watch", ReportingWatch)
    report = sees(census(), census(held("kept", 2))).run()
    assert report.run_report is None
    assert changed(report.came) == [("kept", 2 * MIB, 1)]


def test_what_has_gone_since_a_census(monkeypatch: pytest.MonkeyPatch) -> None:
    stays = held("y", 4, device="cuda:2")
    monkeypatch.setattr(
        watched_cell, "Look", looks_at(census(held("model", 2), held("new", 1, device="cuda:1"), stays))
    )
    before = census_in_words(census(held("model", 5), held("x", 1, device="cuda:0"), stays))
    freed, after = watched_cell.freed_since(before, 3)
    assert (freed.bytes, freed.frames) == ({"cpu": 3 * MIB, "cuda:0": MIB}, 3)
    assert changed(freed.holders) == [("model", -3 * MIB, 0), ("x", -MIB, -1)]
    assert [group.holder for group in after.groups] == ["y", "model", "new"]
