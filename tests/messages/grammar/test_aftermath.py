"""What other processes say when one has died."""

from __future__ import annotations

import pytest

from memtriage.messages.grammar.message import Message
from support.marked_messages import found_and_expected


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        (
            "[Rank 0] «Watchdog caught collective operation timeout»: WorkNCCL(SeqNum=3)",
            Message("aftermath", form="collective timed out", ran_out=False),
        ),
        (
            "«Timed out waiting 1800000ms for recv» operation to complete",
            Message("aftermath", form="collective timed out", ran_out=False),
        ),
        (
            "«watchdog thread terminated with exception»",
            Message("aftermath", form="watchdog ended the process", ran_out=False),
        ),
        (
            "we are going «to take down the entire process».",
            Message("aftermath", form="watchdog ended the process", ran_out=False),
        ),
        (
            "NCCL: «remote process exited» or there was a network error",
            Message("aftermath", form="peer lost", ran_out=False),
        ),
        ("«Connection closed by remote peer»", Message("aftermath", form="peer lost", ran_out=False)),
        ("«ncclRemoteError»", Message("aftermath", form="peer lost", ran_out=False)),
        (
            "W0101 «Sending process 123 closing signal SIGTERM»",
            Message("aftermath", form="ended by the launcher", ran_out=False),
        ),
        (
            "«srun: Job step aborted»: Waiting up to 32 seconds",
            Message("aftermath", form="ended by the launcher", ran_out=False),
        ),
        (
            "torch.distributed.elastic.multiprocessing.errors.«ChildFailedError»",
            Message("aftermath", form="launcher's report", ran_out=False),
        ),
        (
            "«failed (exitcode: 1)» local_rank: 5",
            Message("aftermath", form="launcher's report", ran_out=False),
        ),
    ],
)
def test_what_others_say_when_one_has_died(marked: str, message: Message) -> None:
    found, expected = found_and_expected(marked, message)
    assert found == expected
