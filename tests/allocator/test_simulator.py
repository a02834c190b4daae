"""The rules of the caching allocator, one by one: small programs in words, with what must come of them."""

from __future__ import annotations

import pytest
from tests.allocator.simulators import MIB, POOL, Played, layout, simulator

from memtriage.allocator.blocks import FREE
from memtriage.allocator.driver import Driver
from memtriage.allocator.events import AllocatorEvent, OutOfMemory

GC = "garbage_collection_threshold:0.5 limit=200"
EXPANDABLE = "expandable_segments:True"
SPLIT = "max_split_size_mb:64"
EARLY = "2.12 throw_on_cudamalloc_oom:True"

RULES = {
    "the classic walk through segment sizes": """| a=1B allocated:512B reserved:2 b=3 reserved:22
        c=11534337B reserved:22 d=12582913B reserved:36 -a -b -c -d empty allocated:0 requested:0 reserved:0
        layout: peak_reserved:36""",
    "small and large pools do not mix": "| a=20 -a b=1 reserved:22 c=1048577B reserved:22",
    "streams and private pools do not share": "| a=30 -a b=30@5 c=30@p d=30 reserved:90 d:a",
    "best fit takes the smallest that is large enough": "| a=50 b=30 c=40 -a -b -c d=29.5 e=31 d:b e:c",
    "a large block keeps up to one MiB of slack": """| a=30 -a b=29 b:30 allocated:30 -b c=30407680B
        c:30407680B""",
    "a small block is split to the byte": """| a=1048064B b=1 b:1 reserved:2 allocated:2096640B c=512B
        reserved:2 allocated:2""",
    "free neighbors become one block": "| a=5 b=5 c=5 d=5 -a -c -d -b layout:20F",
    "the cache is flushed before giving up": """capacity=100 | a=60 -a b=70 log:+60,-60,+70 retries:1 ooms:0
        reserved:70""",
    # `max_split_size_mb`
    "oversized blocks are not split and not used for less": f"""{SPLIT} | a=100 -a b=30 reserved:130 c=90
        c:100 reserved:130""",
    "a block of that very size is oversized": f"{SPLIT} | a=64 -a b=30 reserved:94",
    "an oversized block may be so much bigger and no more": f"{SPLIT} | a=100 -a b=80 reserved:180",
    "unless more is allowed": f"{SPLIT} max_non_split_rounding_mb:40 | a=100 -a b=80 b:100",
    "smaller blocks are split as ever": f"{SPLIT} | a=60 -a b=30 c=30 reserved:60",
    "one oversized block is released before the whole cache": f"""{SPLIT} capacity=400 | a=70 b=80 c=200 d=40
        -a -b -c -d log:+70,+80,+200,+40 e=140 log:-200,+140 retries:0""",
    "or several of them, the largest first": f"""{SPLIT} capacity=300 | a=70 b=80 c=90 d=40 -a -b -c -d
        log:+70,+80,+90,+40 e=160 log:-90,-80,+160""",
    "oversized blocks on other streams stay": f"""{SPLIT} capacity=300 | a=100@3 -a b=90 -b c=70 -c
        log:+100,+90,+70 d=160 log:-90,-70,+160 retries:0""",
    "where oversized blocks are not enough the whole cache goes too": f"""{SPLIT} capacity=200 | a=80 -a b=40
        -b c=60 -c log:+80,+40,+60 d=150 log:-80,-40,-60,+150 retries:1""",
    "pages of expandable segments are no oversized blocks": f"""{EXPANDABLE} {SPLIT} limit=200
        device_memory=320 | a=20 b=140 -b log:m20,m140 c=100 log:u140,m100 retries:1 ooms:0""",
    "nor when memory runs out": f"""{EXPANDABLE} {SPLIT} capacity=200 device_memory=320 | a=20 b=140 -b
        log:m20,m140 !210 log:u140,oom210 retries:1 ooms:1""",
    # streams
    "a block awaits the stream and then the next allocation": """| a=30 a>9 -a allocated:0 awaiting:30
        active:30 requested:30 b=30 reserved:60 done9 awaiting:30 c=30 c:a awaiting:0 reserved:60""",
    "it awaits every stream": "| a=512B a>7 a>8 a>8 -a done8 events awaiting:512B done7 events awaiting:0",
    "its own stream does not count": "| a=512B@3 a>3 -a awaiting:0",
    "work put on the stream later is not done": "| a=512B b=512B a>9 b>9 -a done9 -b events awaiting:512B",
    "a flush waits for all streams": """capacity=100 | a=60 a>9 -a b=70 awaiting:0 retries:1
        synchronizations:1""",
    "a recording may complete a free itself": """| a=512B b=512B a>9 -a b>9 -b done9 a. awaiting:512B events
        awaiting:0""",
    # private pools
    "a pool keeps its memory until it is released": """| a=30@p -a empty reserved:30 release empty
        reserved:0""",
    "a capture neither flushes nor recycles": """capacity=100 | a=60 -a b=512B b>9 -b done9 c=20@p
        awaiting:512B !60@p retries:0 d=512B awaiting:0""",
    "a user pool does not flush before torch 2.12": "2.11 capacity=100 | a=60 -a !60@p",
    "a user pool flushes since": "2.13 capacity=100 | a=60 -a b=60@p",
    # limits
    "a fraction of the device is a limit": "per_process_memory_fraction:0.5 device_memory=100 | a=50 !1B",
    "throwing early spares the cache": f"{EARLY} capacity=100 | a=60 -a !70 reserved:60 retries:0",
    "but a limit of the process does not": f"""{EARLY} per_process_memory_fraction:0.5 device_memory=100 |
        a=40 -a !70 reserved:0 retries:1""",
    "a limit may be met exactly and goes before a fraction": """per_process_memory_fraction:0.1
        device_memory=100 limit=60 | a=60 !512B ooms:1 retries:1 reserved:60""",
    "empty_cache keeps what is split": """| a=4 b=30 -b releasable:30 stranded:16 empty reserved:20
        releasable:0 stranded:16 -a empty reserved:0""",
    "peaks begin again where one is": """| a=20 b=40 -b peak_allocated:60 peak_reserved:60 reset
        peak_allocated:20 peak_reserved:60""",
    # garbage collection
    "old blocks go before more is reserved": f"""{GC} | a=60 b=50 -a c=30@4 -c d=30@4 -d e=30@4 -e -b
        log:+60,+50,-60,+30 f=20@3 log:+20 retries:0""",
    "small allocations make no large block older": f"""{GC} | z=512B -z a=60 b=50 -a c=512B -c d=512B -d
        e=512B -e -b log:+2,+60,+50 f=20@3 log:-50,-60,+20""",
    "a segment that is in use stays": f"{GC} | a=5 b=5 c=90 -a log:+20,+90 d=30@3 log:+30",
    "nothing happens below the threshold": """garbage_collection_threshold:0.9 limit=1024 | a=60 -a b=100
        reserved:160""",
    "nor without a limit": "garbage_collection_threshold:0.9 | a=60 -a b=100 reserved:160",
    # which of equal blocks
    "ties go by address before torch 2.13": "2.12 | a=30 b=30 -a -b c=30 c:b",
    "and by age since": "2.13 | a=30 b=30 -a -b c=30 c:a",
    # expandable segments
    "one segment grows by whole pages": f"""{EXPANDABLE} device_memory=160 | a=5 b=50 c=512B log:m20,m40,m2
        reserved:62 allocated:57672192B""",
    "its blocks are split to the byte": f"{EXPANDABLE} | a=19.5 a:19.5",
    "wholly free pages go back and the gap is filled first": f"""{EXPANDABLE} device_memory=160 | a=30 b=40
        c=10 reserved:80 -b releasable:20 stranded:20 log:m40,m40 empty log:u20 reserved:60
        layout:30A_10F_20U_10F_10A_100U d=35 d:b log:m20""",
    "everything goes back with its virtual range": f"""{EXPANDABLE} | a=512B b=5 c=70 -a -b -c empty
        reserved:0 layout:""",
    "best fit spares the end that can grow": f"{EXPANDABLE} | a=30 b=5 reserved:40 -a c=4 c:a",
    "of equal holes the lower one is taken": f"{EXPANDABLE} | a=6 b=6 c=6 d=6 e=6 -d -b f=6 f:b",
    "pages are unmapped under pressure": f"""{EXPANDABLE} capacity=100 | a=60@1 -a b=80 retries:1 reserved:80
        !40 allocated:80""",
    "what was mapped before memory ran out stays mapped": f"""{EXPANDABLE} capacity=100 | a=20 b=20 c=20 d=20
        -b !41 reserved:60 e=40 reserved:100""",
    "pages are mapped at the lowest place that has room": f"""{EXPANDABLE} device_memory=160 | a=30
        layout:30A_10F_140U b=35 layout:30A_35A_15F_100U -a releasable:20 stranded:25 empty
        layout:20U_10F_35A_15F_100U reserved:60 releasable:0 stranded:25 c=31 layout:20U_10F_35A_31A_4F_80U
        d=30 layout:30A_35A_31A_4F_80U -b -c empty layout:30A_10F_140U -d empty layout: reserved:0""",
    "whole pages go from the middle of a free block": f"""{EXPANDABLE} device_memory=160 | a=10 b=45 c=5 -b
        empty layout:10A_10F_20U_15F_5A_120U""",
    "only unmapped space behind a free block makes it larger": f"""{EXPANDABLE} | a=6 b=50 c=8 d=2 -a -c e=4
        e:a""",
    "a segment that is full is followed by another": f"""{EXPANDABLE} capacity=100 device_memory=40 | a=50
        b=20 layout:50A_10F/20A_40U reserved:80""",
}


@pytest.mark.parametrize("text", RULES.values(), ids=RULES)
def test_a_rule_of_the_allocator(text: str) -> None:
    Played(text)


def test_what_was_asked_wrongly_is_refused() -> None:
    one = simulator()
    block = one.malloc(512)
    one.free(block)
    for call in (one.free, lambda block: one.record_stream(block, 9)):
        with pytest.raises(ValueError, match="not live"):
            call(block)
    with pytest.raises(ValueError, match="awaits nothing"):
        one.complete(block)
    with pytest.raises(ValueError, match="at least 1 byte"):
        one.malloc(0)
    with pytest.raises(ValueError, match="not both"):
        simulator(capacity=1, driver=Driver())
    with pytest.raises(ValueError, match="needs the device's memory"):
        simulator("per_process_memory_fraction:0.5")


def test_out_of_memory_leaves_live_blocks_as_they_are() -> None:
    played = Played("capacity=100 | a=40 b=50 -b log:+40,+50")
    one = played.one
    before = [block for block in one.blocks() if block.state != FREE]
    with pytest.raises(OutOfMemory) as error:
        one.malloc(64 * MIB + 1, stream=7)
    assert played.events == [
        ("segment_free", before[0].address - 50 * MIB, 50 * MIB, 0, (0, 0)),
        ("oom", 0, 64 * MIB + 512, 7, (0, 0)),
    ]
    assert (error.value.requested, error.value.segment) == (64 * MIB + 1, 66 * MIB)
    assert (error.value.allocated, error.value.reserved) == (40 * MIB, 40 * MIB)
    assert "64.0 MiB asked for, 66.0 MiB needed" in str(error.value)
    assert [block for block in one.blocks() if block.state != FREE] == before
    assert (one.retries, one.ooms) == (1, 1)
    one.malloc(60 * MIB)


def test_events_are_those_of_a_memory_history() -> None:
    played = Played("| a=1000B@5 a>6 -a sync empty")
    base = played.addresses["a"]
    assert played.events == [
        ("segment_alloc", base, 2 * MIB, 5, (0, 0)),
        ("alloc", base, 1000, 5, (0, 0)),
        ("free_requested", base, 1000, 5, (0, 0)),
        ("free_completed", base, 1000, 5, (0, 0)),
        ("segment_free", base, 2 * MIB, 5, (0, 0)),
    ]


def test_segments_have_their_stream_pool_and_page() -> None:
    one = Played("| a=30@5 b=30@p c=30").one
    assert {(segment.stream, segment.pool) for segment in one.snapshot()} == {
        (0, (0, 0)),
        (0, POOL),
        (5, (0, 0)),
    }
    one = Played(f"{EXPANDABLE} | a=50 b=512B c=40 d=10 -c empty").one
    found = sorted((segment.size // MIB, segment.page, segment.expandable) for segment in one.snapshot())
    assert found == [(2, 2 * MIB, True), (20, 20 * MIB, True), (60, 20 * MIB, True)]


@pytest.mark.parametrize("sizes", [(30, 40, 50), (50, 40, 30)])
def test_of_three_equal_blocks_the_oldest_is_taken(sizes: tuple[int, int, int]) -> None:
    one = simulator(version="2.13")
    for size in (*sizes, 30):
        one.free(one.malloc(size * MIB))
        held = [one.malloc(size * MIB) for size in sizes]
        for block in held:
            one.free(block)
    order = [segment.size for segment in one.backing.segments]
    ranks = [segment.rank for segment in one.backing.segments]
    assert (order, ranks) == ([size * MIB for size in sizes], [0, 1 << 48, 2 << 48])


@pytest.mark.parametrize(("conf", "page"), [("", None), ("expandable_segments:True", 20 * MIB)])
def test_a_segment_that_was_there_before_can_be_made_again(conf: str, page: int | None) -> None:
    events: list[AllocatorEvent] = []
    one = simulator(conf, capacity=100 * MIB, hook=events.append)
    arena = one.arena((0, 0), 7, small=False)
    segment = one.backing.again(arena, 60 * MIB, page)
    assert (segment.size, segment.page, segment.arena) == (60 * MIB, page, arena)
    assert list(one.backing.segments) == [segment]
    assert one.reserved == (60 * MIB if page is None else 0)
    if page is not None:
        one.backing.map_again(40 * MIB)
        one.backing.map_again(20 * MIB)
        assert one.reserved == 60 * MIB
    assert events == []
    with pytest.raises(OutOfMemory):
        one.malloc(60 * MIB)
    one.malloc(40 * MIB)


@pytest.mark.parametrize(
    ("memory", "size"),
    [(None, (1 << 40) // 8 * 9), (160 * MIB, 180 * MIB), (161 * MIB, 200 * MIB), (320 * MIB, 360 * MIB)],
)
def test_a_virtual_range_is_nine_eighths_of_the_device_in_whole_pages(memory: int | None, size: int) -> None:
    one = simulator("expandable_segments:True", device_memory=memory)
    one.malloc(30 * MIB)
    (segment,) = one.backing.segments
    assert segment.size == -(-size // (20 * MIB)) * 20 * MIB


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_an_emptied_cache_gives_back_the_large_first_and_streams_in_order(conf: str) -> None:
    played = Played(f"{conf} device_memory=160 | a=20@5 b=20@3 c=512B@5 d=60@5 e=512B@3 f=40@3 g=40@5 log:"
                    + ("m20,m20,m2,m60,m2,m40,m40" if conf else "+20,+20,+2,+60,+2,+40,+40"))  # fmt: skip
    for name in "cdefg":
        played.one.free(played.blocks[name])
    played.events.clear()
    played.one.empty_cache()
    action = "segment_unmap" if conf else "segment_free"
    sizes = [(3, 40), (5, 100), (3, 2), (5, 2)] if conf else [(3, 40), (5, 40), (5, 60), (3, 2), (5, 2)]
    assert [(event.action, event.stream, event.size // MIB) for event in played.events] == [
        (action, stream, size) for stream, size in sizes
    ]
    assert layout(played.one) == ["20A 160U", "20A 160U"] if conf else ["20A", "20A"]
