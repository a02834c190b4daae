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


def test_each_kind_has_the_figures_measured_or_of_its_data_sheet():
    """Capability, multiprocessors, GiB, MiB of L2 cache, operations and bytes per second (1e12)."""
    figures = {
        name: (
            kind.capability,
            kind.multiprocessors,
            round(kind.memory / 2**30),
            kind.l2_cache / 2**20,
            kind.operations / 1e12,
            kind.bandwidth / 1e12,
        )
        for name, kind in GPU_KINDS.items()
    }
    assert figures == {
        "h200": ((9, 0), 132, 140, 60, 989, 4.8),
        "h100": ((9, 0), 132, 79, 50, 989, 3.35),
        "h100-pcie": ((9, 0), 114, 80, 50, 756, 2.0),
        "b200": ((10, 0), 148, 192, 126, 2250, 8.0),
        "a100": ((8, 0), 108, 80, 40, 312, 2.04),
        "a100-40gb": ((8, 0), 108, 40, 40, 312, 1.56),
        "a10": ((8, 6), 80, 24, 6, 125, 0.6),
        "l4": ((8, 9), 58, 24, 48, 121, 0.3),
        "l40s": ((8, 9), 142, 48, 96, 362, 0.864),
        "rtx4090": ((8, 9), 128, 24, 72, 165, 1.01),
        "rtx3090": ((8, 6), 82, 24, 6, 71, 0.936),
        "v100": ((7, 0), 80, 32, 6, 125, 0.9),
        "t4": ((7, 5), 40, 16, 4, 65, 0.32),
    }


def test_threads_and_shared_memory_follow_the_architecture():
    limits = {
        name: (machine(name).threads_per_multiprocessor, machine(name).shared_memory // 1024)
        for name in GPU_KINDS
    }
    assert limits == {
        **dict.fromkeys(("h200", "h100", "h100-pcie", "b200"), (2048, 227)),
        **dict.fromkeys(("a100", "a100-40gb"), (2048, 163)),
        **dict.fromkeys(("a10", "l4", "l40s", "rtx4090", "rtx3090"), (1536, 99)),
        "v100": (2048, 96),
        "t4": (1024, 64),
    }


def test_only_what_was_measured_is_said_to_be():
    assert [name for name, kind in GPU_KINDS.items() if kind.measured] == ["h200"]
    assert {kind.outside for kind in GPU_KINDS.values()} == {767 * 2**20}
