"""What is noted of the host's memory: pages come with their first use and go with their storage."""

import gc

import pytest
import torch

from memtriage.prediction.host.memory import (
    COMMUNICATION,
    FILES,
    LOADED,
    PINNED,
    SAVED,
    TENSORS,
    HostMemory,
    MappedFile,
    MemoryPlace,
)
from memtriage.prediction.lifetimes import FREE


def storage(size):
    return torch.UntypedStorage(size, device="meta")


def story(memory):
    """The events, as `+bytes class` and `-bytes class`."""
    blocks = memory.trace.blocks
    return [
        f"{'-' if event.size == FREE else '+'}{blocks[event.block].size} {blocks[event.block].kind}"
        for event in memory.trace.events
    ]


def test_a_storage_has_pages_from_its_first_use_to_its_end():
    memory = HostMemory()
    first, room = storage(100), storage(200)
    assert not memory.knows(first) and memory.block_of(first) is None
    memory.see(first)
    memory.see(first)
    memory.see(room, used=False)
    assert memory.knows(room) and memory.block_of(room) is None
    memory.use(room, written=False)
    assert story(memory) == ["+100 other tensors"]
    memory.use(room, written=True)
    memory.use(room, written=True)
    assert (memory.block_of(first), memory.block_of(room)) == (0, 1)
    memory.use(storage(7), written=True)  # was never seen
    del first
    assert story(memory) == ["+100 other tensors", "+200 other tensors", "-100 other tensors"]
    never = storage(300)
    memory.see(never, used=False)
    del never, room
    assert story(memory)[3:] == ["-200 other tensors"]


def test_what_is_made_in_a_block_is_of_its_class_and_place():
    memory = HostMemory()
    kept = []

    def make(size, **options):
        kept.append(storage(size))
        memory.see(kept[-1], **options)

    with memory.making(LOADED):
        make(1)
        with memory.making(SAVED):
            make(2)
        make(3)
    make(4)
    with memory.pinning():
        make(5, used=False)
    make(6, used=False)
    assert story(memory) == [f"+{size} {kind}" for size, kind in zip(
        (1, 2, 3, 4, 5), (LOADED, SAVED, LOADED, TENSORS, TENSORS), strict=True
    )]  # fmt: skip
    assert [block.place for block in memory.trace.blocks] == [MemoryPlace.HEAP] * 4 + [MemoryPlace.PINNED]
    assert [memory.pins(each) for each in kept] == [False] * 4 + [True, False]
    assert not memory.pins(storage(1))
    with pytest.raises(KeyError), memory.making(LOADED), memory.pinning():
        raise KeyError
    make(7)
    assert memory.trace.blocks[-1].kind == TENSORS and memory.trace.blocks[-1].place is MemoryPlace.HEAP


def test_another_size_replaces_the_memory():
    memory = HostMemory()
    grown, room, unknown = storage(100), storage(100), storage(100)
    memory.see(grown)
    memory.see(room, used=False)
    memory.resized(grown)
    for each in (grown, room, unknown):
        each.resize_(300)
        memory.resized(each)
    grown.resize_(0)
    memory.resized(grown)
    memory.use(room, written=True)
    assert story(memory) == [
        "+100 other tensors",
        *("+300 other tensors", "-100 other tensors"),
        *("-300 other tensors", "+300 other tensors"),
    ]
    del grown
    assert len(memory.trace.events) == 5


def test_pages_of_a_file_stay_until_no_part_is_left():
    memory = HostMemory()
    file = MappedFile(memory, "/net.pt")
    parts = [storage(size) for size in (10, 20, 30)]
    for part in parts:
        memory.see(part, used=False, part=file)
    memory.use(parts[0], written=False)
    memory.use(parts[1], written=True)
    assert story(memory) == ["+10 mapped files", "+20 mapped files"]
    block = memory.trace.blocks[0]
    assert (block.kind, block.place, block.file) == (FILES, MemoryPlace.MAPPING, "/net.pt")
    del parts[0], part
    assert len(memory.trace.events) == 2
    parts.clear()
    assert story(memory)[2:] == ["-10 mapped files", "-20 mapped files"]
    again = storage(40)
    memory.see(again, part=file)
    del again
    assert story(memory)[4:] == ["+40 mapped files", "-40 mapped files"]


def test_names_are_given_to_what_there_is_and_what_comes():
    memory = HostMemory()
    here, later, other = storage(1), storage(2), storage(3)
    memory.see(here)
    memory.see(later, used=False)
    memory.name(here, "parameter")
    memory.name(here, "gradient")  # the first counts
    memory.name(later, "buffer")
    memory.name(other, "parameter")  # was never seen
    assert memory.trace.owners == {0: "parameter"}
    memory.use(later, written=True)
    assert memory.trace.owners == {0: "parameter", 1: "buffer"}
    here.resize_(5)
    memory.resized(here)
    assert memory.trace.owners == {0: "parameter", 1: "buffer", 2: "gradient"}


def test_buffers_of_calls_and_of_objects():
    memory = HostMemory()

    class Holder:
        pass

    with pytest.raises(KeyError), memory.held(10, COMMUNICATION):
        memory.meet()
        raise KeyError
    with memory.held(20, PINNED, MemoryPlace.PINNED):
        nothing = memory.allocate(0)
        memory.free(nothing)
    memory.meet()
    holder = Holder()
    memory.follow(holder, 30)
    memory.follow(holder, 40, LOADED)
    del holder
    gc.collect()
    own = memory.allocate(50, file="/file")
    assert story(memory) == [
        *("+10 communication buffer", "-10 communication buffer", "+20 pinned", "-20 pinned"),
        *("+30 other tensors", "+40 loaded", "-40 loaded", "-30 other tensors", "+50 other tensors"),
    ]
    places = [block.place for block in memory.trace.blocks]
    heap, mapping = MemoryPlace.HEAP, MemoryPlace.MAPPING
    assert places == [heap, MemoryPlace.PINNED, heap, mapping, mapping, heap]
    assert memory.trace.blocks[own].file == "/file" and memory.trace.meetings == [1, 4]
