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


def test_plurals_and_the_ellipsis_follow_the_number():
    def line(written=(), deleted=()):
        return Changes(list(written), list(deleted)).line("/job/")

    assert line(["/job/a"]) == "1 file that the script wrote was discarded (a)"
    assert line(deleted=["/job/a", "/b"]) == "2 files that the script deleted are still there (a, /b)"
    assert line(["/job/a", "/job/b", "/job/c"]) == "3 files that the script wrote were discarded (a, b, c)"


def test_only_folders_of_compiled_files_are_left_out():
    assert Changes(["/job/__pycache__.txt"]).line("/job").endswith("(__pycache__.txt)")
    assert Changes(["/jobs/a"]).line("/job").endswith("(/jobs/a)")
