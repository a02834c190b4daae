"""Prometheus: the text is what its parser reads, and the endpoint is there, or says in one line why not."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from memtriage.model.run_status import RunStatus
from memtriage.report.monitoring import prometheus
from memtriage.report.monitoring.gauges import GAUGES
from memtriage.report.monitoring.prometheus import (
    Address,
    Collector,
    MetricsServer,
    parse_address,
    rank_address,
    registry_of,
    serve,
)
from memtriage.store.layout import RankIdentity
from support.runs import GIB
from support.statuses import status

client = pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

ANY_PORT = Address("127.0.0.1", 0)


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every series of the text, as Prometheus's own parser sees it."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exposition(statuses: list[RunStatus]) -> str:
    return str(client.generate_latest(registry_of(lambda: statuses)).decode())


def series(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(lambda: [status()], ANY_PORT) as made:
        yield made


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


def test_every_gauge_of_every_rank_is_in_the_text() -> None:
    text = exposition([status(rank=0), status(rank=1)])
    recorded = read(text)
    assert recorded[series("memtriage_memory_allocated_bytes", rank="1", device="cuda:1")] == 4 * GIB
    assert (
        recorded[series("memtriage_host_class_bytes", rank="0", device="host", **{"class": "libraries"})]
        == 3 * GIB
    )
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families.keys() == {gauge.prometheus for gauge in GAUGES}
    assert {family.type for family in families.values()} == {"gauge"}
    assert {family.documentation for family in families.values()} == {gauge.help for gauge in GAUGES}


def test_nothing_known_is_an_empty_page() -> None:
    assert exposition([]) == ""


def test_the_collector_works_in_a_registry_of_the_users_own() -> None:
    registry = client.CollectorRegistry()
    client.Gauge("loss", "of the model", registry=registry).set(2)
    registry.register(Collector(lambda: [status()]))
    assert registry.get_sample_value("memtriage_steps", {"rank": "0"}) == 12
    assert registry.get_sample_value("loss") == 2
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Collector(list))


# --- the endpoint -------------------------------------------------------------------------------------------


def test_the_endpoint_serves_what_is_known_at_the_time(server: MetricsServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert read(fetch(server.url)) == read(exposition([status()]))


def test_each_scrape_asks_anew_and_in_one_thread() -> None:
    steps = iter(range(100))
    threads = set()

    def source() -> list[RunStatus]:
        threads.add(threading.get_ident())
        return [status(steps=next(steps))]

    with MetricsServer(source, ANY_PORT) as made:
        told = [read(fetch(made.url))[series("memtriage_steps", rank="0")] for _ in range(3)]
    assert told == [0, 1, 2]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_only_this_machine_can_ask_unless_told_otherwise(server: MetricsServer) -> None:
    assert server._server.socket.getsockname()[0] == "127.0.0.1"


def test_a_client_that_sends_nothing_does_not_end_it(
    server: MetricsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.close()
    assert "memtriage_steps" in fetch(server.url)
    assert capfd.readouterr().err == ""


def test_slow_client_blocks_neither_close_nor_others(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "_CLIENT_TIMEOUT_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        assert "memtriage_steps" in fetch(server.url)  # once the half second of the other one is over
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        monkeypatch.setattr(prometheus, "_CLIENT_TIMEOUT_S", 3600.0)
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        server.close()
        assert not server._thread.is_alive


def test_closed_is_closed_and_frees_the_port(server: MetricsServer) -> None:
    server.close()
    server.close()
    with pytest.raises(OSError):
        fetch(server.url)
    with MetricsServer(list, Address("127.0.0.1", server.port)) as again:
        assert fetch(again.url) == ""


def test_a_taken_port_is_one_line() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(list, Address("127.0.0.1", port), said.append) is None
    (line,) = said
    assert f"127.0.0.1:{port}" in line and "in use" in line and "\n" not in line


def test_a_host_of_another_machine_is_one_line() -> None:
    said: list[str] = []
    assert serve(list, Address("192.0.2.1", 0), said.append) is None
    assert len(said) == 1 and "192.0.2.1" in said[0]


def test_without_the_library_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    said: list[str] = []
    assert serve(list, ANY_PORT, said.append) is None
    (line,) = said
    assert "prometheus_client" in line and "\n" not in line and "pip install 'memtriage[prometheus]'" in line


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        ("0.0.0.0:0", "0.0.0.0", 0),
        ("node7.cluster:80", "node7.cluster", 80),
        (":9400", "", 9400),
        ("[::1]:9400", "::1", 9400),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert ":" not in host or Address(host, port).url() == f"http://[{host}]:{port}/metrics"


@pytest.mark.parametrize("text", ["", "host", "host:", "70000", "1:2:3", "::1:9400", "94x", "-1", "9400 "])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:"):
        parse_address(text)


def test_ranks_of_one_machine_listen_side_by_side() -> None:
    def at(port: int, rank: int | None, local: int | None) -> int:
        return rank_address("h", port, RankIdentity("run", 0, rank, 16, local)).port

    assert at(9400, None, None) == 9400
    assert at(9400, 11, 3) == 9403
    assert at(9400, 5, None) == 9405
    assert at(0, 11, 3) == 0


def test_reading_the_table_needs_no_library() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = sys.modules['opentelemetry'] = None; "
        "import memtriage.report.monitoring.gauges, memtriage.report.monitoring.samples; "
        "import memtriage.report.monitoring.prometheus, memtriage.report.monitoring.otel; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
