"""From where a rank stands to values: all that is known, nothing that is not."""

from __future__ import annotations

from memtriage.model.run_status import RunStatus
from memtriage.report.monitoring import gauges
from memtriage.report.monitoring.samples import samples, scalars
from support.runs import GIB, MIB, leak
from support.statuses import mark, status


def values(where: RunStatus) -> dict[tuple[str, ...], float]:
    return {
        (sample.gauge.name.removeprefix("memtriage."), *sample.labels): sample.value
        for sample in samples(where)
    }


def test_every_gauge_has_its_value() -> None:
    figures = values(status())
    assert figures["memory.allocated", "0", "cuda:0"] == 4 * GIB
    assert figures["memory.reserved", "0", "cuda:0"] == 7 * GIB
    assert figures["memory.requested", "0", "cuda:0"] == 4 * GIB - MIB
    assert figures["memory.outside", "0", "cuda:0"] == 600 * MIB
    assert figures["memory.stranded", "0", "cuda:0"] == 3 * GIB
    assert figures["memory.peak_allocated", "0", "cuda:0"] == 5 * GIB
    assert figures["memory.passing", "0", "cuda:0"] == GIB
    assert figures["memory.limit", "0", "host"] == 512 * GIB
    assert figures["memory.growth_per_step", "0", "cuda:0"] == 164 * MIB
    assert figures["leak.growth_per_step", "0", "cuda:0", leak().holder or ""] == 164 * MIB
    assert figures["host.rss", "0", "host"] == 5 * GIB
    assert figures["host.pinned", "0", "host"] == 512 * MIB
    assert figures["host.class", "0", "host", "libraries"] == 3 * GIB
    assert figures["mark.allocated", "0", "cuda:0", "after refit"] == GIB
    assert figures["mark.reserved", "0", "cuda:0", "after refit"] == 7 * GIB
    assert figures["mark.time", "0"] == 1_700_000_040
    assert figures["ledger.time", "0"] == 1_700_000_012
    assert figures["steps", "0"] == 12
    assert {sample.gauge for sample in samples(status())} == set(gauges.GAUGES)


def test_ledger_values_by_owner_sum_to_the_total() -> None:
    figures = values(status())
    assert figures["ledger.size", "0", "cuda:0", "requested", "parameter"] == 3 * GIB
    assert sum(value for labels, value in figures.items() if labels[0] == "ledger.size") == 7 * GIB


def test_what_is_unknown_has_no_value_and_what_is_none_has_zero() -> None:
    figures = values(status(latest=(mark("step", "cuda:0", 0, None),), host_pinned=None, ledgers_at=None))
    assert figures["memory.allocated", "0", "cuda:0"] == 0
    names = {labels[0] for labels in figures}
    assert not names & {"memory.reserved", "memory.requested", "memory.outside", "host.pinned", "ledger.time"}
    assert figures["memory.growth_per_step", "0", "cpu"] == 0


def test_leak_values_are_by_holder_the_fastest_only() -> None:
    twice = (leak(holder="a"), leak(holder="a"), leak(holder=None, bytes_per_step=None))
    assert values(status(leaks=twice))["leak.growth_per_step", "0", "cuda:0", "a"] == 2 * 164 * MIB
    open_one = (leak(holder="b", certainty="suspected"),)
    assert not any(name == "leak.growth_per_step" for name, *_ in values(status(leaks=open_one)))
    many = tuple(leak(holder=f"holder {rate}", bytes_per_step=rate) for rate in range(40))
    told = [value for labels, value in values(status(leaks=many)).items() if labels[0].startswith("leak")]
    assert sorted(told) == list(range(24, 40))


def test_scalars_have_names_that_every_logger_takes() -> None:
    named = scalars(samples(status()))
    assert named["memtriage/cuda_0/allocated_bytes"] == 4 * GIB
    assert named["memtriage/host/rss_bytes"] == 5 * GIB
    assert named["memtriage/host/malloc_in_use_bytes"] == 2 * GIB
    assert named["memtriage/cuda_0/growth_per_step_bytes"] == 164 * MIB
    assert not any("mark" in name or "ledger" in name for name in named)
    assert all(set(name) <= set(ALLOWED) for name in named)


ALLOWED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/"


def test_scalars_of_the_first_rank_are_named_as_without_ranks() -> None:
    assert scalars(samples(status(rank=0))).keys() == scalars(samples(status())).keys()
    assert "memtriage/rank_3/cuda_3/allocated_bytes" in scalars(samples(status(rank=3)))
