import os

import pytest

from memtriage.store.locate import (
    RecordError,
    newest_records,
    open_record,
)


def test_newest_records_are_of_the_newest_restart_of_a_run(tmp_path, write_rank):
    write_rank(run="old", time=100.0)
    write_rank(run="new", restart=0, time=200.0)
    latest = write_rank(run="new", restart=1, time=300.0)
    assert newest_records([tmp_path / "runs"]) == [latest]


def test_the_later_start_counts_not_the_higher_restart(tmp_path, write_rank):
    write_rank(run="same", restart=2, time=100.0)
    latest = write_rank(run="same", restart=0, time=200.0)
    assert newest_records([tmp_path / "runs"]) == [latest]


def test_when_a_file_holds_several_runs_its_last_start_counts(tmp_path, write_rank):
    write_rank(run="reused", time=100.0)
    write_rank(run="other", time=200.0)
    reused = write_rank(run="reused", time=300.0)
    assert newest_records([tmp_path / "runs"]) == [reused]


def test_run_directory_restart_directory_and_file(tmp_path, write_rank):
    older = write_rank(run="a", restart=0, time=100.0)
    newer = write_rank(run="a", restart=1, time=200.0)
    write_rank(run="b", time=300.0)
    assert newest_records([tmp_path / "runs" / "a"]) == [newer]
    assert newest_records([tmp_path / "runs" / "a" / "0"]) == [older]
    assert newest_records([older]) == [older]


def test_all_ranks_of_a_restart_in_order(tmp_path, write_rank):
    paths = [write_rank(rank, world_size=3) for rank in (2, 0, 1)]
    assert newest_records([tmp_path / "runs"]) == sorted(paths)


def test_node_local_directories_give_the_run_that_they_share(tmp_path, write_rank):
    first = write_rank(0, world_size=2, run="job", top="node0", time=100.0)
    second = write_rank(1, world_size=2, run="job", top="node1", time=100.5)
    write_rank(run="later-on-node1-only", top="node1", time=900.0)
    assert newest_records([tmp_path / "node0", tmp_path / "node1"]) == [first, second]


def test_directories_without_a_common_run_give_each_their_newest(tmp_path, write_rank):
    first = write_rank(run="a", top="node0")
    second = write_rank(run="b", top="node1")
    assert newest_records([tmp_path / "node0", tmp_path / "node1"]) == [first, second]


def test_the_same_directory_twice_is_read_once(tmp_path, write_rank):
    path = write_rank()
    assert newest_records([tmp_path / "runs", tmp_path / "runs" / "run"]) == [path]


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(RecordError, match="absent: no such file or directory"):
        newest_records([tmp_path / "absent"])
    with pytest.raises(RecordError, match="no memtriage record in it"):
        newest_records([tmp_path])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"t":"start","time":12.5,"other":1}', True),
        (b'{"t":"start"}', False),
        (b'{"t":"mark","name":"start","time":3}', False),
        (b'{"t":"start","time":12', False),
    ],
)
def test_the_start_time_is_in_the_start_line_alone(tmp_path, write_rank, line, says):
    first, second = (write_rank(run="job", restart=restart, time=10.0) for restart in (0, 1))
    second.write_bytes(line)
    os.utime(second, (5, 5))  # as old as its file where no line says
    assert newest_records([tmp_path / "runs"]) == [second if says else first]


def test_an_unreadable_restart_is_the_oldest(tmp_path, write_rank):
    latest = write_rank(run="job", restart=0, time=100.0)
    unreadable = write_rank(run="job", restart=1, time=200.0)
    unreadable.unlink()
    os.mkfifo(unreadable)
    assert newest_records([tmp_path / "runs"]) == [latest]


def test_a_record_without_a_start_is_as_old_as_its_file(tmp_path, write_rank):
    first, second = (write_rank(run="job", restart=restart, time=7.0) for restart in (0, 1))
    assert newest_records([tmp_path / "runs"]) == [second]  # equal: the later restart
    for path, age in ((first, 50), (second, 20)):
        path.write_bytes(path.read_bytes().partition(b"\n")[2])
        os.utime(path, (age, age))
    assert newest_records([tmp_path / "runs"]) == [first]


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file"):
        open_record(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"text")
    with open_record(tmp_path / "file") as file:
        assert file.read() == b"text"
