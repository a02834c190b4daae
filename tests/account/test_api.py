"""`memtriage.census` and `memtriage.ledger`."""

from __future__ import annotations

import re

import pytest
import torch

from memtriage.account.api import census, ledger
from memtriage.observe import cuda

without_cuda = pytest.mark.skipif(bool(cuda.devices()), reason="this process has used a GPU")


def test_a_census_has_a_tensor_of_this_function() -> None:
    kept = torch.ones(12_347)
    (record,) = [one for one in census().storages if one.address == kept.data_ptr()]
    assert (record.nbytes, record.holder) == (
        4 * 12_347,
        "frame test_a_census_has_a_tensor_of_this_function(): kept",
    )


@without_cuda
@pytest.mark.parametrize("device", [None, "host", "job"])
def test_a_ledger_is_that_of_the_device_asked_for(device: str | None) -> None:
    kept = torch.ones(1 << 20)
    ledgers = ledger(device)
    assert [one.device for one in ledgers] == ["job" if device == "job" else "host"]
    owned = sum(row.bytes for row in ledgers[0].rows if row.owner is not None)
    assert (owned >= kept.nbytes) is (device != "job")


@without_cuda
def test_a_device_without_a_ledger_is_refused_with_those_that_there_are() -> None:
    said = "no ledger for device 'cuda:77': this process has one for host, job"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        ledger("cuda:77")
