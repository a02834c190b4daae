"""Gauges for Prometheus: a collector for any registry, and an HTTP endpoint."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from memtriage.model.run_status import RunStatus
from memtriage.process.descriptors import Descriptor, close_socket, own_socket
from memtriage.process.optional import needs
from memtriage.process.threads import OwnThread
from memtriage.report.monitoring.gauges import GAUGES
from memtriage.report.monitoring.samples import Sample, samples
from memtriage.store.layout import RankIdentity

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import GaugeMetricFamily

DEFAULT_HOST: Final = "127.0.0.1"
_LAST_PORT: Final = 65535
_CLIENT_TIMEOUT_S: Final = 5.0
"""How long a client may keep the only thread that answers, however fast or slowly it sends."""
_POLL_S: Final = 0.25
_CLOSE_WITHIN_S: Final = 1.0
"""How long `close()` may take; it usually takes less than `_POLL_S`."""

StatusSource = Callable[[], Iterable[RunStatus]]
"""Returns the current status of every rank to report."""


class Collector:
    """A collector for a `prometheus_client` registry: every gauge, with the ranks' status at that moment.

    Args:
        source: asked at each collection.
    """

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the gauges without values: registering asks for them, so that names clash early."""
        return _families(()).values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges that have values."""
        families = _families(sample for status in self._source() for sample in samples(status))
        yield from (family for family in families.values() if family.samples)


def _families(samples: Iterable[Sample]) -> dict[str, GaugeMetricFamily]:
    from prometheus_client.core import GaugeMetricFamily

    families = {
        gauge.name: GaugeMetricFamily(gauge.prometheus, gauge.help, labels=gauge.labels) for gauge in GAUGES
    }
    for sample in samples:
        families[sample.gauge.name].add_metric(sample.labels, sample.value)
    return families


def registry_of(source: StatusSource) -> CollectorRegistry:
    """Return a registry with nothing but memtriage's gauges.

    Raises:
        ImportError: prometheus-client is not installed; the text is one line for the user.
    """
    with needs("prometheus_client", "prometheus", "Prometheus's format"):
        from prometheus_client import CollectorRegistry
    registry = CollectorRegistry()
    registry.register(Collector(source))
    return registry


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Port 0 means any free port."""

    host: str
    port: int

    def url(self) -> str:
        """The URL of the metrics."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"


_ADDRESS: Final = re.compile(r"(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<port>[0-9]+)")


def parse_address(text: str) -> Address:
    """Parse `[HOST:]PORT`. Without a host only this machine can connect; an empty host means all addresses.

    Raises:
        ValueError: the text is not an address, or there is no such port.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > _LAST_PORT:
        raise ValueError(f"expected [HOST:]PORT with a port up to {_LAST_PORT}, as 9400, not {text!r}")
    host = DEFAULT_HOST if match["host"] is None else match["host"].strip("[]")
    return Address(host, int(match["port"]))


def rank_address(host: str, port: int, identity: RankIdentity) -> Address:
    """Return this rank's address: the given port plus its local rank."""
    nth = identity.local_rank if identity.local_rank is not None else identity.rank or 0
    return Address(host, port + nth if port else 0)


class MetricsServer:
    """Answer `GET /metrics` until `close()` or the end of the process.

    One thread answers one client after another, so that no scrape adds a thread and an arena of malloc.

    Args:
        source: asked at each scrape.
        address: where to listen; an empty host means every address of this machine.

    Attributes:
        url: where the metrics are.
        port: the port that it listens on.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the port is taken, or the host is not this machine's.
    """

    def __init__(self, source: StatusSource, address: Address) -> None:
        registry = registry_of(source)
        from prometheus_client import make_wsgi_app

        addresses = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = addresses[0]
        bound_to: type[_Server] = type("_BoundServer", (_Server,), {"address_family": family})
        self._server = bound_to((str(where[0]), int(where[1])), _Handler)
        self._server.set_app(make_wsgi_app(registry, disable_compression=True))
        self.port = int(self._server.server_port)
        self.url = Address(address.host or socket.gethostname(), self.port).url()
        self._thread = OwnThread(self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._server.closing and self._server.is_open():
            self._server.handle_request()

    def close(self) -> None:
        """Stop listening and cut the client that is being answered. May be called twice."""
        self._server.cut_client()
        if self._thread.join(_CLOSE_WITHIN_S):
            self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(source: StatusSource, address: Address, say: Callable[[str], None]) -> MetricsServer | None:
    """Return a server, or None after one line that says why: a taken port must not end a training."""
    try:
        return MetricsServer(source, address)
    except ImportError as error:
        say(str(error))
    except OSError as error:
        say(f"no metrics at {address.url()}: {error.strerror or error}; the program continues without them")
    return None


class _Server(WSGIServer):
    timeout = _POLL_S
    _descriptor: Descriptor | None = None
    _client: socket.socket | None = None
    closing = False

    def server_bind(self) -> None:
        """Bind without looking up the host's name: the base class does, which may take seconds."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()
        self.socket, self._descriptor = own_socket(self.socket)

    def is_open(self) -> bool:
        """Whether the program has left the socket's descriptor alone."""
        return self._descriptor is not None and self._descriptor.ours

    def server_close(self) -> None:
        if self._descriptor is None:  # bind failed
            super().server_close()
        else:
            close_socket(self.socket, self._descriptor)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._client = request
        try:
            if self.closing:
                self.shutdown_request(request)
            else:
                super().process_request(request, client_address)
        finally:
            self._client = None

    def cut_client(self) -> None:
        """End the current connection and answer no other. Called from another thread."""
        self.closing = True
        client = self._client
        if client is not None:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, such as a client that went away."""


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile = BufferedReader(_InTime(self.connection, _CLIENT_TIMEOUT_S))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: stderr is the program's."""


class _InTime(RawIOBase):
    """Reads what a client sends within a total time; a socket's own timeout applies to each read."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)
