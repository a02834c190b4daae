"""glibc's malloc, as far as it decides what stays resident."""

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
