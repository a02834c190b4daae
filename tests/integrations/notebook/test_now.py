"""What holds memory now, and what is freed of it."""

from __future__ import annotations

from typing import Any

from memtriage.integrations.notebook.now import free_now, memory_now
from support.notebooks import run

MIB = 1 << 20


def test_outputs_are_freed_only_where_asked(shell: Any) -> None:
    run(shell, "torch.zeros(1 << 18)")
    freed, kept = free_now(shell, outputs=False)
    (output,) = kept
    assert (output.bytes, freed.bytes, freed.outputs) == ({"cpu": MIB}, {}, [])
    freed, kept = free_now(shell, outputs=True)
    assert (freed.bytes, freed.outputs, kept) == ({"cpu": MIB}, [output.number], [])
    assert free_now(shell, outputs=True)[0].outputs == []


def test_the_largest_holders_come_first_and_the_rest_is_summed(shell: Any) -> None:
    """Larger than what other tests of this process have left."""
    run(shell, "first, second, third = (torch.zeros(size << 24) for size in (1, 3, 2))")
    now = memory_now(shell, 2)
    assert [holder.bytes for holder in now.holders] == [192 * MIB, 128 * MIB]
    assert now.more["cpu"] >= 64 * MIB
    assert "host" in {ledger.device for ledger in now.ledgers}
