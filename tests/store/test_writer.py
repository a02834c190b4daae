import errno
import json
import os
import threading

import pytest

from memtriage.model.marks import Mark
from memtriage.store import records as records_module
from memtriage.store import writer as writer_module
from memtriage.store.records import Note, Start
from memtriage.store.writer import RankWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "0" / "rank-00000.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_record_is_one_line_that_names_its_type(path):
    mark = Mark(name="step", step=1, microbatch=0, rank=None, time_s=0.5, device="cuda:0", allocated=7)
    with RankWriter(path) as writer:
        writer.write("start", Start(run_id="r"))
        writer.write("mark", mark)
        writer.write("note", {"text": "two\nlines"})
        writer.write("note", {})
    start, written, note, empty = lines(path)
    assert (start["t"], start["schema"], start["run_id"]) == ("start", 2, "r")
    assert written == {
        "t": "mark",
        "name": "step",
        "step": 1,
        "microbatch": 0,
        "rank": None,
        "time_s": 0.5,
        "device": "cuda:0",
        "allocated": 7,
        "reserved": None,
        "requested": None,
        "outside": None,
        "host_rss": None,
        "host_pinned": None,
    }
    assert note == {"t": "note", "text": "two\nlines"}
    assert empty == {"t": "note"}


def test_a_line_is_in_the_file_as_soon_as_it_is_written(path):
    writer = RankWriter(path)
    writer.write("note", Note(text="here"))
    assert lines(path) == [{"t": "note", "text": "here"}]
    writer.close()


def test_appends_behind_an_earlier_run_and_closes_its_cut_line(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"t":"note","text":"old"}\n{"t":"mar')
    with RankWriter(path) as writer:
        writer.write("note", Note(text="new"))
    assert path.read_bytes() == b'{"t":"note","text":"old"}\n{"t":"mar\n{"t":"note","text":"new"}\n'


def test_names_that_are_not_utf8_are_written_escaped(path):
    with RankWriter(path) as writer:
        writer.write("start", Start(argv=["caf\udce9.py", "ü"]))
    assert lines(path)[0]["argv"] == ["caf\\udce9.py", "ü"]


def test_what_cannot_be_written_is_lost_with_one_warning(path, capfd):
    with RankWriter(path) as writer:
        writer.write("note", {"text": object()})
        writer.write("note", {"text": object()})
        writer.write("note", Note(text="goes on"))
        assert writer.lost == 2
        assert writer.error is not None
    assert [line["text"] for line in lines(path)] == ["goes on"]
    assert capfd.readouterr().err.count("memtriage:") == 1


def test_directory_that_cannot_be_made_does_not_stop_the_run(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    writer = RankWriter(tmp_path / "file" / "0" / "rank-00000.jsonl")
    writer.write("note", Note(text="lost"))
    writer.close()
    assert writer.error is not None
    assert "going on" in capfd.readouterr().err


def test_full_disk_loses_lines_and_what_follows_is_readable(path, capfd, monkeypatch):
    room = 30
    real_write = os.write

    def write(fd, data):
        nonlocal room
        if fd != writer._file.number:
            return real_write(fd, data)
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real_write(fd, bytes(data)[:room])
        room -= written
        return written

    writer = RankWriter(path)
    monkeypatch.setattr(writer_module.os, "write", write)
    writer.write("note", Note(text="a"))
    writer.write("note", Note(text="cut somewhere in here"))
    writer.write("note", Note(text="wholly lost"))
    room = 1000
    writer.write("note", Note(text="b"))
    writer.close()
    first, cut, last = path.read_bytes().splitlines()
    assert (json.loads(first)["text"], json.loads(last)["text"]) == ("a", "b")
    assert len(cut) == 30 - len(first) - 1
    assert writer.lost == 2
    assert "No space left" in capfd.readouterr().err


def test_a_forked_child_never_writes(path):
    writer = RankWriter(path)
    child = os.fork()
    if child == 0:
        writer.write("note", Note(text="child"))
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.write("note", Note(text="parent"))
    writer.close()
    assert [line["text"] for line in lines(path)] == ["parent"]


def test_closed_writer_does_nothing(path):
    writer = RankWriter(path)
    writer.close()
    writer.close()
    writer.write("note", Note(text="late"))
    assert path.read_bytes() == b""
    assert writer.error is None


def test_threads_share_a_writer(path):
    writer = RankWriter(path)

    def work(number):
        for index in range(50):
            writer.write("note", Note(text=f"{number}/{index}"))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    texts = [line["text"] for line in lines(path)]
    assert sorted(texts) == sorted(f"{number}/{index}" for number in range(4) for index in range(50))


def test_a_handler_may_write_while_its_thread_writes(path, monkeypatch):
    writer = RankWriter(path)
    encode = records_module.encode

    def interrupted(record):
        """A signal handler runs in the middle of a write."""
        if record.text == "outer":
            writer.write("note", Note(text="inner"))
        return encode(record)

    monkeypatch.setattr(records_module, "encode", interrupted)
    writer.write("note", Note(text="outer"))
    writer.close()
    assert [line["text"] for line in lines(path)] == ["inner", "outer"]
