import pytest

from memtriage.prediction.gpu_kinds import GPU_KINDS, machine


def test_names_are_read_kindly():
    assert machine("H200") is machine("h200")
    assert machine("A100 40GB".replace(" ", "-")) is GPU_KINDS["a100-40gb"]


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="expected one of h200, h100"):
        machine("abacus")


def test_resident_threads_follow_the_architecture():
    assert [machine(kind).threads_per_multiprocessor for kind in ("h200", "l4", "t4")] == [2048, 1536, 1024]


@pytest.mark.parametrize("kind", GPU_KINDS.values(), ids=GPU_KINDS)
def test_every_kind_has_the_memory_of_a_gpu(kind):
    assert 10 * 2**30 < kind.memory < 300 * 2**30
    assert 0 < kind.outside < 2**31


def test_architectures_are_those_of_the_data_sheets():
    assert {name: kind.capability for name, kind in GPU_KINDS.items()} == {
        "h200": (9, 0), "h100": (9, 0), "h100-pcie": (9, 0), "b200": (10, 0), "a100": (8, 0),
        "a100-40gb": (8, 0), "a10": (8, 6), "l4": (8, 9), "l40s": (8, 9), "rtx4090": (8, 9),
        "rtx3090": (8, 6), "v100": (7, 0), "t4": (7, 5),
    }  # fmt: skip


def test_multiprocessors_and_memory_are_those_measured_or_of_the_data_sheets():
    figures = {name: (kind.multiprocessors, round(kind.memory / 2**30)) for name, kind in GPU_KINDS.items()}
    assert figures == {
        "h200": (132, 140), "h100": (132, 79), "h100-pcie": (114, 80), "b200": (148, 192),
        "a100": (108, 80), "a100-40gb": (108, 40), "a10": (80, 24), "l4": (58, 24), "l40s": (142, 48),
        "rtx4090": (128, 24), "rtx3090": (82, 24), "v100": (80, 32), "t4": (40, 16),
    }  # fmt: skip


def test_shared_memory_follows_the_architecture():
    kib = {kind: machine(kind).shared_memory / 1024 for kind in ("h200", "b200", "a100", "v100", "t4", "a10")}
    assert kib == {"h200": 227, "b200": 227, "a100": 163, "v100": 96, "t4": 64, "a10": 99}


def test_only_what_was_measured_is_said_to_be():
    assert [name for name, kind in GPU_KINDS.items() if kind.measured] == ["h200"]
    assert {kind.outside for kind in GPU_KINDS.values()} == {767 * 2**20}


def test_l2_caches_are_those_measured_or_of_the_data_sheets():
    assert {name: kind.l2_cache / 2**20 for name, kind in GPU_KINDS.items()} == {
        "h200": 60, "h100": 50, "h100-pcie": 50, "b200": 126, "a100": 40, "a100-40gb": 40, "a10": 6,
        "l4": 48, "l40s": 96, "rtx4090": 72, "rtx3090": 6, "v100": 6, "t4": 4,
    }  # fmt: skip
