"""The live screen, driven by Textual's own pilot: what it shows, and what its keys do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="the live screen needs memtriage[top]")

from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from memtriage.diagnose.ranks.live import LiveRun
from memtriage.report.top.screen import TopScreen
from memtriage.report.top.words import BY_KEY
from support.live_runs import AT_ONCE, MIB, NOW, LiveRank

NEVER_S = 10_000.0
SIZE = (140, 44)


class Driver:
    """A screen under a pilot; it looks at the record when it is told to."""

    def __init__(self, app: TopScreen, pilot: Pilot[Any]) -> None:
        self.app, self.pilot = app, pilot

    async def look(self) -> None:
        """Has the screen read what is new, and waits until it shows all of it: one look may not read all."""
        self.app._look()
        await self.settle()
        while self.app.view.behind and not self.app.paused:
            self.app._look()
            await self.settle()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.settle()

    async def settle(self) -> None:
        await self.app.workers.wait_for_complete()
        await self.pilot.pause()

    @property
    def head(self) -> str:
        return str(self.app.query_one("#head", Static).render())

    @property
    def table(self) -> DataTable[Any]:
        return self.app.query_one("#ranks", DataTable)

    def column(self, key: str) -> list[str]:
        return [str(cell) for cell in self.table.get_column(key)]

    def text(self, panel: str) -> str:
        found = self.app.query_one(f"#{panel}")
        return str((found if isinstance(found, Static) else found.query_one(Static)).render())

    def title(self, panel: str) -> str:
        return str(self.app.query_one(f"#{panel}").border_title)


def drive(
    directory: Path, script: Callable[[Driver], Awaitable[None]], size: tuple[int, int] = SIZE
) -> TopScreen:
    async def run() -> TopScreen:
        app = TopScreen(
            LiveRun([directory], clock=lambda: NOW + 12.0, policy=AT_ONCE), NEVER_S, BY_KEY["rank"]
        )
        async with app.run_test(size=size) as pilot:
            driver = Driver(app, pilot)
            await driver.look()
            await script(driver)
        return app

    return asyncio.run(run())


def four_ranks(directory: Path) -> list[LiveRank]:
    return [
        LiveRank(directory, rank, world_size=4, base=(1000 - 100 * rank) * MIB, growth=rank * MIB).steps(12)
        for rank in range(4)
    ]


def test_what_it_shows_of_a_run_in_progress(tmp_path: Path) -> None:
    ranks = four_ranks(tmp_path)
    ranks[0].ledger(5 * MIB).leak()

    async def script(screen: Driver) -> None:
        assert "LEAK  32.0 MiB per step on cuda:0" in screen.head
        assert "4 of 4 ranks" in screen.head and "4 running" in screen.head
        assert screen.column("rank") == ["0", "1", "2", "3"]
        assert screen.column("growth") == ["-", "+1.0 MiB", "+2.0 MiB", "+3.0 MiB"]
        assert "allocated on cuda:0 of rank 0, at each step" in screen.title("course")
        assert "now 1000.0 MiB, step 1 to 12" in screen.text("course")
        assert "parameter" in screen.text("ledger") and "stranded" in screen.text("ledger")
        assert "train.losses[*] -> grad_fn MulBackward0" in screen.text("findings")
        assert screen.title("findings") == "1 finding so far"

    drive(tmp_path, script)


def test_selecting_a_rank_shows_its_course_and_ledger(tmp_path: Path) -> None:
    four_ranks(tmp_path)[2].ledger(9 * MIB)

    async def script(screen: Driver) -> None:
        await screen.press("down", "down")
        assert screen.app.selected == 2
        assert "of rank 2" in screen.title("course") and "of rank 2" in screen.title("ledger")
        assert "9.0 MiB" in screen.text("ledger")
        chart = screen.text("course")
        assert "801.0 MiB" not in chart  # the axis begins at step 1: 800 + 2
        assert "802.0 MiB │" in chart and "824.0 MiB │" in chart

    drive(tmp_path, script)


def test_sorting_keeps_the_selected_rank(tmp_path: Path) -> None:
    four_ranks(tmp_path)

    async def script(screen: Driver) -> None:
        await screen.press("down")
        while screen.app.column.key != "growth":
            await screen.press("s")
        assert screen.column("rank") == ["3", "2", "1", "0"]
        assert screen.app.selected == 1
        assert screen.table.cursor_row == 2
        await screen.press("r")
        assert screen.column("rank") == ["0", "1", "2", "3"]
        labels = [str(column.label) for column in screen.table.ordered_columns]
        assert "growth/step ▲" in labels

    drive(tmp_path, script)


def test_it_follows_new_marks_and_ranks(tmp_path: Path) -> None:
    rank = LiveRank(tmp_path, 0, world_size=2).steps(3)

    async def script(screen: Driver) -> None:
        assert screen.column("step") == ["3"] and "1 of 2 ranks" in screen.head
        rank.steps(2)
        LiveRank(tmp_path, 1, world_size=2).steps(1)
        await screen.look()
        assert screen.column("step") == ["5", "1"] and "2 of 2 ranks" in screen.head

    drive(tmp_path, script)


def test_an_empty_directory_is_waited_for(tmp_path: Path) -> None:
    async def script(screen: Driver) -> None:
        assert "WAITING" in screen.head and "no memtriage record" in screen.head
        assert screen.table.row_count == 0
        LiveRank(tmp_path).steps(4)
        await screen.look()
        assert screen.column("step") == ["4"]

    drive(tmp_path, script)


def test_pausing_holds_the_picture(tmp_path: Path) -> None:
    rank = LiveRank(tmp_path).steps(3)

    async def script(screen: Driver) -> None:
        await screen.press("p")
        rank.steps(2)
        await screen.look()
        assert "PAUSED" in screen.head and screen.column("step") == ["3"]
        await screen.press("p")
        assert "PAUSED" not in screen.head and screen.column("step") == ["5"]

    drive(tmp_path, script)


def test_the_next_device(tmp_path: Path) -> None:
    rank = LiveRank(tmp_path)
    for step in range(3):
        rank.mark("step", 70 * MIB + step, device="cpu").steps(1)

    async def script(screen: Driver) -> None:
        assert "allocated on cuda:0" in screen.title("course")
        await screen.press("d")
        assert "malloc in use on cpu" in screen.title("course")

    drive(tmp_path, script)


def test_q_quits(tmp_path: Path) -> None:
    LiveRank(tmp_path).steps(1)

    async def script(screen: Driver) -> None:
        await screen.pilot.press("q")

    assert drive(tmp_path, script).return_code == 0


@pytest.mark.parametrize("size", [(60, 20), (40, 12), (250, 70)])
def test_any_size(tmp_path: Path, size: tuple[int, int]) -> None:
    four_ranks(tmp_path)[0].ledger(1).leak()

    async def script(screen: Driver) -> None:
        assert screen.table.row_count == 4
        assert "<svg" in screen.app.export_screenshot()

    drive(tmp_path, script, size)


def test_a_thousand_ranks(tmp_path: Path) -> None:
    for rank in range(1024):
        LiveRank(tmp_path, rank, world_size=1024, base=rank * MIB, host=f"node{rank // 8}").steps(2).end()

    async def script(screen: Driver) -> None:
        while len(screen.app.view.lines) < 1024:
            await screen.look()
        assert "1,024 of 1,024 ranks" in screen.head
        assert "allocated 0 B to 1023.0 MiB (rank 1023)" in screen.head
        assert screen.table.row_count == 1024
        await screen.press("ctrl+end")
        assert screen.app.selected == 1023

    drive(tmp_path, script)


_JOB = """
import sys
import memtriage
with memtriage.watch(sys.argv[1], quiet=True):
    for line in sys.stdin:
        memtriage.step()
        print("stepped", flush=True)
"""


def test_a_run_in_progress_in_another_process(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", _JOB, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert job.stdin is not None and job.stdout is not None

    def step() -> None:
        assert job.stdin is not None and job.stdout is not None
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.stdout.readline() == "stepped\n"

    async def script(screen: Driver) -> None:
        for expected in ("1", "2"):
            step()
            await screen.look()
            assert screen.column("step") == [expected]
            assert screen.column("state") == ["running"]
        assert job.stdin is not None
        job.stdin.close()
        job.wait()
        await screen.look()
        assert screen.column("state") == ["ended: not judged"]

    try:
        drive(tmp_path, script)
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
