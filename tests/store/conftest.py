import pytest

from memtriage.store.layout import RankIdentity, record_path
from memtriage.store.records import End, Start
from memtriage.store.writer import RankWriter
from support.runs import step_mark


@pytest.fixture
def write_rank(tmp_path):
    """Write a rank's record below a directory and return its path."""

    def write(
        rank=None,
        *,
        world_size=1,
        run="run",
        restart=0,
        top="runs",
        time=1000.0,
        steps=3,
        end="clean",
        extra=(),
        **start,
    ):
        path = record_path(tmp_path / top, RankIdentity(run, restart, rank, world_size, rank))
        with RankWriter(path) as writer:
            writer.write(
                "start",
                Start(run_id=run, restart=restart, rank=rank, world_size=world_size, time=time, **start),
            )
            for step in range(1, steps + 1):
                writer.write(
                    "mark",
                    step_mark(step, 1000 + step, rank),
                )
            for kind, record in extra:
                writer.write(kind, record)
            if end is not None:
                writer.write("end", End(verdict=end, steps=steps, time_s=float(steps)))
        return path

    return write
