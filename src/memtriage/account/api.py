"""`memtriage.census` and `memtriage.ledger`."""

from __future__ import annotations

from memtriage.account.census import Look, take_census
from memtriage.account.host_reading import read_host
from memtriage.account.job_ledger import take_job_ledger
from memtriage.account.ledgers import take_ledgers
from memtriage.model.census import Census
from memtriage.model.ledger import Ledger


def census() -> Census:
    """Every storage that is alive now: what it is, who holds it, how large. Sizes in bytes.

    Takes about two seconds for a million Python objects and 100,000 autograd nodes; Python code in other
    threads waits meanwhile. The result keeps no tensor alive.

    Not seen: memory that only C++ holds and that no autograd node leads to. On CUDA, `ledger()` has a row for
    it.
    """
    return take_census()


def ledger(device: str | None = None) -> list[Ledger]:
    """The closed ledgers of each CUDA device in use and of the host, with owners found by a census.

    The rows of a ledger never overlap and sum to its `total`, in bytes: the device's use as the driver
    counts it, or the resident set of this process.

    Args:
        device: `cuda:N` or `host` for that ledger alone; None for all of these. `job`: this process and all
            its children, by process; it sums to their proportional set sizes, so shared pages count once.

    Raises:
        ValueError: there is no such ledger; the text lists those that exist.
    """
    if device == "job":
        return [take_job_ledger()]
    on_host = read_host()
    with Look() as view:
        taken = view.census()
        ledgers = take_ledgers(taken.storages, on_host=on_host, parameters=taken.parameters)
    if device is None:
        return ledgers
    chosen = [ledger for ledger in ledgers if ledger.device == device]
    if not chosen:
        there = ", ".join(ledger.device for ledger in ledgers)
        raise ValueError(f"no ledger for device {device!r}: this process has one for {there}, job")
    return chosen
