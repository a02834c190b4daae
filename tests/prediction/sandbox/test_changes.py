from memtriage.prediction.sandbox.changes import Changes


def test_nothing_changed_is_no_line():
    assert Changes().line("/job") is None
    assert Changes(written=["/job/__pycache__/a.pyc"]).line("/job") is None


def test_working_directory_files_come_first_by_relative_path():
    changes = Changes(written=["/tmp/log", "/job/out/model.pt"])
    assert changes.line("/job") == ("2 files that the script wrote were discarded (out/model.pt, /tmp/log)")


def test_line_names_three_files_and_has_a_singular():
    changes = Changes(written=[f"/job/{name}" for name in "dbca"], deleted=["/job/old.pt"])
    assert changes.line("/job") == (
        "4 files that the script wrote were discarded (a, b, c, …); "
        "1 file that the script deleted is still there (old.pt)"
    )
