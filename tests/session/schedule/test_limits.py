"""At how many bytes memory runs out, and how many are in use as that limit counts them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memtriage.model.units import GIB
from memtriage.observe import cuda, driver
from memtriage.observe.cgroup import HostLimit
from memtriage.observe.counters import Reading
from memtriage.observe.host import InUse
from memtriage.session.schedule import limits as limits_module
from memtriage.session.schedule.limits import device_limit, limits_and_use


@pytest.mark.parametrize(
    ("cap", "total", "used", "reserved", "limit"),
    [
        pytest.param(None, 80 * GIB, 10 * GIB, 6 * GIB, 76 * GIB, id="what others leave"),
        pytest.param(None, 80 * GIB, 5 * GIB, 6 * GIB, 80 * GIB, id="nobody else"),
        pytest.param(40 * GIB, 80 * GIB, 10 * GIB, 6 * GIB, 40 * GIB, id="the cap"),
        pytest.param(79 * GIB, 80 * GIB, 10 * GIB, 6 * GIB, 76 * GIB, id="less than the cap"),
        pytest.param(40 * GIB, None, 10 * GIB, 6 * GIB, 40 * GIB, id="capacity unknown"),
        pytest.param(None, 80 * GIB, None, 6 * GIB, None, id="use unknown"),
        pytest.param(None, 80 * GIB, 10 * GIB, None, None, id="reserved unknown"),
    ],
)
def test_what_an_allocator_may_have(
    cap: int | None, total: int | None, used: int | None, reserved: int | None, limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "per_process_limit", lambda device: cap)
    monkeypatch.setattr(cuda, "capacity", lambda device: total)
    monkeypatch.setattr(cuda, "counters", lambda device: SimpleNamespace(reserved=reserved))
    monkeypatch.setattr(driver, "used", lambda device: used)
    assert device_limit(3) == limit


def test_memory_that_comes_and_goes_counts_as_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(limits_module, "device_limit", lambda device: asked.append(device) or 80 * GIB)
    readings = [
        Reading("cuda:12", allocated=3 * GIB),
        Reading("cuda:1", allocated=GIB),
        Reading("cpu", allocated=5),
    ]
    limits, used = limits_and_use(None, [*readings, Reading("cuda:0")], {"cuda:12": GIB})
    assert limits == {"cuda:12": 80 * GIB, "cuda:1": 80 * GIB} and asked == [12, 1]
    assert used == {"cuda:12": 4 * GIB, "cuda:1": GIB}


def test_host_memory_has_one_limit_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "host_limit", lambda: HostLimit(9 * GIB, "RLIMIT_DATA"))
    limits, used = limits_and_use(InUse(mapped=1, resident=2, data=3, shared=0), [], {})
    assert limits == {"cpu": 9 * GIB, "host": 9 * GIB} and used == {"cpu": 3, "host": 3}
