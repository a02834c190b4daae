import pytest

from memtriage.prediction.sandbox.changes import Changes

WROTE, DELETED = "that the script wrote", "that the script deleted"


@pytest.mark.parametrize(
    ("written", "deleted", "line"),
    [
        ("", "", None),
        ("/job/__pycache__/a.pyc", "", None),
        ("/job/__pycache__.txt", "", f"1 file {WROTE} was discarded (__pycache__.txt)"),
        ("/jobs/a", "", f"1 file {WROTE} was discarded (/jobs/a)"),
        ("/tmp/log /job/out/m.pt", "", f"2 files {WROTE} were discarded (out/m.pt, /tmp/log)"),
        ("/job/a /job/b /job/c", "", f"3 files {WROTE} were discarded (a, b, c)"),
        ("", "/job/a /b", f"2 files {DELETED} are still there (a, /b)"),
        (
            "/job/d /job/b /job/c /job/a",
            "/job/old.pt",
            f"4 files {WROTE} were discarded (a, b, c, …); 1 file {DELETED} is still there (old.pt)",
        ),
    ],
)
@pytest.mark.parametrize("folder", ["/job", "/job/"])
def test_files_of_the_working_directory_come_first_and_compiled_ones_not_at_all(
    written, deleted, line, folder
):
    assert Changes(written.split(), deleted.split()).line(folder) == line
