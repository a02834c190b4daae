import pytest

from memtriage.prediction.gpu_kinds import MACHINES, machine


def test_names_are_read_kindly():
    assert machine("H200") is machine("h200")
    assert machine("A100 40GB".replace(" ", "-")) is MACHINES["a100-40gb"]


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="expected one of h200, h100"):
        machine("abacus")


def test_resident_threads_follow_the_architecture():
    assert [machine(kind).threads_per_multiprocessor for kind in ("h200", "l4", "t4")] == [2048, 1536, 1024]
