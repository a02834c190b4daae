"""The lines of `memtriage run --per-microbatch`."""

from memtriage.model.findings import Finding, Projection
from memtriage.observe.counters import Reading
from memtriage.session.microbatch_log import MicrobatchLog

MIB = 1 << 20


def test_each_microbatch_logs_bytes_and_change() -> None:
    said: list[str] = []
    log = MicrobatchLog(said.append)
    cpu = Reading("cpu", 5 * MIB, 9 * MIB)
    log.add(0, 1, [cpu, Reading("cuda:0", 100 * MIB, 200 * MIB)])
    log.add(0, 2, [cpu, Reading("cuda:0", 264 * MIB, 300 * MIB)])
    log.add(1, 1, [cpu, Reading("cuda:0", 100 * MIB, 300 * MIB), Reading("cuda:1", MIB, None)])
    assert said == [
        "step 0 micro-batch 1: cuda:0 100.0 MiB allocated, 200.0 MiB reserved",
        "step 0 micro-batch 2: cuda:0 264.0 MiB allocated (+164.0 MiB), 300.0 MiB reserved",
        "step 1 micro-batch 1: cuda:0 100.0 MiB allocated (-164.0 MiB), 300.0 MiB reserved; "
        "cuda:1 1.0 MiB allocated",
    ]


def test_without_a_gpu_it_is_mallocs_counter_where_that_was_read() -> None:
    said: list[str] = []
    log = MicrobatchLog(said.append)
    log.add(0, 1, [Reading("cpu", None, None)])
    log.add(0, 2, [Reading("cpu", 5 * MIB, 9 * MIB)])
    assert said == ["step 0 micro-batch 2: cpu 5.0 MiB allocated, 9.0 MiB reserved"]


def test_suspicion_per_microbatch_is_logged_once() -> None:
    said: list[str] = []
    log = MicrobatchLog(said.append)
    leak = Finding(kind="leak", device="cuda:0", bytes_per_microbatch=164 * MIB, holder="losses[*]")
    log.suspect([leak, Finding(kind="leak", device="cpu", bytes_per_step=1)])
    log.suspect([leak])
    assert said == ["grows by 164.0 MiB per micro-batch on cuda:0: losses[*]"]


def test_with_a_suspicion_goes_what_is_projected() -> None:
    said: list[str] = []
    full = Projection(device="cuda:0", limit=24 << 30, microbatches=145)
    leak = Finding(kind="leak", device="cuda:0", bytes_per_microbatch=MIB, holder="kept", projection=full)
    MicrobatchLog(said.append).suspect([leak])
    assert said == [
        "grows by 1.0 MiB per micro-batch on cuda:0: kept; "
        "at this rate cuda:0 (limit 24.0 GiB) is full 145 micro-batches into a step"
    ]
