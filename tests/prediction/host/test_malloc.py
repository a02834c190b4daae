"""glibc's malloc, as far as it decides what stays resident."""

from hypothesis import given
from hypothesis import strategies as st

from memtriage.prediction.host.malloc import Malloc

MIB = 1 << 20


def test_a_large_block_is_mapped_and_returned():
    malloc = Malloc()
    malloc.malloc(0, 64 * MIB)
    assert 64 * MIB <= malloc.resident < 64 * MIB + 8192
    malloc.free(0, 64 * MIB)
    assert malloc.resident == malloc.in_use == 0


def test_one_survivor_keeps_all_that_is_below_it():
    # Measured with torch 2.13 and glibc 2.36: of 2000 tensors of 400 KiB the last keeps all.
    malloc = Malloc()
    malloc.malloc(0, 400 << 10)
    malloc.free(0, 400 << 10)  # the threshold rises: such blocks are of the heap from now on
    for block in range(1, 2001):
        malloc.malloc(block, 400 << 10)
    live = malloc.resident
    for block in range(1, 2000):
        malloc.free(block, 400 << 10)
    assert live >= 2000 * (400 << 10)
    assert malloc.resident == live
    assert malloc.in_use == 400 << 10
    malloc.free(2000, 400 << 10)
    assert malloc.resident < MIB


def test_freed_memory_is_used_again_also_for_a_large_block():
    malloc = Malloc()
    malloc.malloc(0, MIB)
    malloc.free(0, MIB)
    for block in range(1, 101):
        malloc.malloc(block, MIB // 2)
    malloc.malloc(101, 1024)
    for block in range(1, 101):
        malloc.free(block, MIB // 2)
    before = malloc.resident
    malloc.malloc(102, 40 * MIB)
    assert malloc.resident == before


def test_the_smallest_hole_that_fits_is_taken():
    malloc = Malloc()
    malloc.malloc(0, 2 * MIB)
    malloc.free(0, 2 * MIB)
    for block, size in enumerate((MIB, 1024, 2 * MIB, 1024), 1):
        malloc.malloc(block, size)
    malloc.free(1, MIB)
    malloc.free(3, 2 * MIB)
    before = malloc.resident
    malloc.malloc(5, MIB - 4096)
    malloc.malloc(6, 2 * MIB - 4096)
    assert malloc.resident == before


KIB = 1 << 10


def test_small_blocks_stay_and_large_ones_are_mapped_up_to_the_threshold():
    malloc = Malloc()
    malloc.malloc(0, 100 * KIB)
    malloc.free(0, 100 * KIB)
    kept = malloc.resident
    assert 100 * KIB <= kept < 101 * KIB  # of the heap: too little to be trimmed
    malloc.malloc(1, 256 * KIB)
    assert malloc.resident == kept + 260 * KIB  # mapped in whole pages, with a header
    malloc.free(1, 256 * KIB)
    assert malloc.resident == kept
    malloc.malloc(2, 256 * KIB)  # the threshold has risen to such a block
    malloc.free(2, 256 * KIB)
    assert malloc.resident >= 256 * KIB


def test_the_threshold_rises_to_32_mib_at_most():
    malloc = Malloc()
    for size in (31 * MIB, 33 * MIB):
        malloc.malloc(0, size)
        malloc.free(0, size)
    malloc.malloc(1, 30 * MIB)
    heap = malloc.resident
    malloc.malloc(2, 32 * MIB)
    malloc.free(2, 32 * MIB)
    assert malloc.resident == heap


def test_neighbors_that_are_free_are_one_hole():
    malloc = Malloc()
    malloc.malloc(0, 2 * MIB)
    malloc.free(0, 2 * MIB)
    for block in range(4):
        malloc.malloc(block, MIB)
    before = malloc.resident
    for block in (0, 2, 1):
        malloc.free(block, MIB)
    malloc.malloc(4, 3 * MIB)
    assert malloc.resident == before


STEPS = st.lists(st.tuples(st.integers(1, 3 * MIB) | st.just(40 * MIB), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_resident_covers_what_is_in_use_and_goes_back_with_it(steps):
    """Each step allocates a block, and frees one of those that are live, or none."""
    malloc, live = Malloc(), {}
    for block, (size, freed) in enumerate(steps):
        malloc.malloc(block, size)
        live[block] = size
        if freed < len(live):
            gone = sorted(live)[freed]
            malloc.free(gone, live.pop(gone))
        assert malloc.in_use == sum(live.values()) <= malloc.resident
    for block, size in live.items():
        malloc.free(block, size)
    assert malloc.in_use == 0
    assert malloc.resident <= 2 * max([0, *(size for size, _ in steps if size <= 32 * MIB)]) + MIB
