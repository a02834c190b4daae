import pytest

from memtriage.prediction.gpu_kinds import GPU_KINDS, machine


def test_names_are_read_kindly():
    assert machine("H200") is machine("h200")
    assert machine("A100 40GB".replace(" ", "-")) is GPU_KINDS["a100-40gb"]


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="expected one of h200, h100"):
        machine("abacus")


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS)
def test_every_kind_has_the_memory_of_a_gpu(kind):
    assert 10 * 2**30 < kind.memory < 300 * 2**30
    assert 0 < kind.outside < 2**31


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS)
def test_the_capability_of_every_kind_is_known(kind):
    assert kind.threads_per_multiprocessor >= 1024 and kind.shared_memory > 48 << 10  # what any block may ask
