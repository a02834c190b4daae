import io
import json
import os

import msgspec
import pytest

from memtriage.report.run.json_file import write, write_stream


def test_the_json_is_one_line_in_which_the_unknown_is_null(make_report, leak):
    stream = io.BytesIO()
    write_stream(make_report(leak()), stream)
    assert stream.getvalue().count(b"\n") == 1
    report = json.loads(stream.getvalue())
    assert report["schema"] == 1
    assert report["exception"] is None
    assert report["ranks"] == {"seen": 1, "of": 1}
    assert report["findings"][0]["rank"] is None
    assert report["marks"][0]["reserved"] is None
    assert list(report["ledger"]) == ["cuda:0", "host"]
    assert list(report["ledger"]["host"][0]) == ["row", "bytes", "owner", "detail"]


@pytest.mark.parametrize("count", [0, 1, 10_000, 10_001, 25_000])
def test_marks_go_out_in_pieces_that_make_the_whole(make_report, leak, count):
    report = make_report(leak(holder='"marks":[]', mechanism='{"marks":[]}'))
    report.marks = (report.marks * count)[:count]
    stream = io.BytesIO()
    write_stream(report, stream)
    assert stream.getvalue() == msgspec.json.encode(report) + b"\n"


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path, make_report):
    path = tmp_path / "new" / "report.json"
    write(make_report(verdict="clean"), path)
    write(make_report(verdict="leak"), path)
    assert json.loads(path.read_bytes())["verdict"] == "leak"
    assert os.listdir(path.parent) == ["report.json"]


def test_after_a_failure_the_old_file_is_still_there(tmp_path, make_report, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("old")

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write(make_report(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_link_is_written_through(tmp_path, make_report):
    target = tmp_path / "target.json"
    target.write_text("")
    link = tmp_path / "link.json"
    link.symlink_to(target)
    write(make_report(), link)
    assert link.is_symlink()
    assert json.loads(target.read_bytes())["schema"] == 1
