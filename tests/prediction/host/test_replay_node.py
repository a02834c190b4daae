"""The host memory of several ranks together."""

from memtriage.model.prediction import HostCourse
from memtriage.prediction.host.replay import node


def course(*parts):
    return HostCourse(
        stretches=[{**part, "peak": sum(part.values())} for part in parts], shared=10, launcher=5
    )


def test_libraries_and_files_of_a_node_are_there_once():
    part = {"libraries": 30, "mapped files": 100, "parameter": 7}
    together = node([course(part), course(part)], 4)
    assert together["libraries"] == 4 * 20 + 10
    assert together["mapped files"] == 100
    assert together["parameter"] == 28
    assert together["launcher"] == 5
    assert together["peak"] == 90 + 100 + 28 + 5


def test_peaks_of_different_parts_are_not_added():
    first = course({"libraries": 10, "parameter": 50}, {"libraries": 10, "copies for saving": 900})
    other = course({"libraries": 10, "parameter": 500}, {"libraries": 10, "parameter": 1})
    assert node([first, other], 3)["peak"] == 5 + 10 + 50 + 2 * 500
    assert node([first, other], 2)["peak"] == 5 + 10 + 900 + 1


def test_ranks_whose_parts_cannot_be_matched_are_added():
    first = course({"libraries": 10, "parameter": 50}, {"libraries": 10, "copies for saving": 900})
    other = course({"libraries": 10, "parameter": 500})
    assert node([first, other], 2)["peak"] == 5 + 10 + 900 + 500


def test_one_rank_needs_no_launcher():
    assert node([course({"libraries": 10, "parameter": 3})], 1) == {
        "libraries": 10, "parameter": 3, "peak": 13,
    }  # fmt: skip
