"""What holds memory now, and what is freed of it."""

from __future__ import annotations

from typing import Any

from memtriage.integrations.notebook.now import free_now, memory_now
from support.notebooks import run

MIB = 1 << 20


def test_outputs_are_freed_only_where_asked(shell: Any) -> None:
    run(shell, "torch.zeros(1 << 18)")
    assert memory_now(shell, 12).outputs == {"cpu": MIB}
    assert free_now(shell, outputs=False).bytes == {}
    freed = free_now(shell, outputs=True)
    assert freed.bytes == {"cpu": MIB}
    assert [(holder.holder, holder.bytes) for holder in freed.holders] == [("Out[*]", -MIB)]
    assert memory_now(shell, 12).outputs == {}


def test_the_largest_holders_come_first_and_the_rest_is_summed(shell: Any) -> None:
    """Larger than what other tests of this process have left."""
    run(shell, "first, second, third = (torch.zeros(size << 24) for size in (1, 3, 2))")
    now = memory_now(shell, 2)
    assert [holder.bytes for holder in now.holders] == [192 * MIB, 128 * MIB]
    assert now.more["cpu"] >= 64 * MIB
    assert "host" in {ledger.device for ledger in now.ledgers}
