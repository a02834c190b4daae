"""What an optimizer owns in addition to its settings: ring, thread, lanes, resident memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from memtriage.treat.offload.arithmetic import Arithmetic
from memtriage.treat.offload.bucket import Bucket, buckets_of
from memtriage.treat.offload.engine import Engine
from memtriage.treat.offload.exchange import Exchange
from memtriage.treat.offload.kernel import FloatRoom
from memtriage.treat.offload.native.choice import library_for
from memtriage.treat.offload.pipeline import Lane, Ring, Worker, lane_to
from memtriage.treat.offload.resident import ResidentParameter, settle_in
from memtriage.treat.offload.settings import OffloadSettings


class OptimizerResources:
    """The resources of one optimizer.

    Attributes:
        settings: of the optimizer.
        exchange: its partition over a process group, or None.
        residents: what the host keeps, by parameter.
    """

    def __init__(self, settings: OffloadSettings, exchange: Exchange | None) -> None:
        self.settings = settings
        self.exchange = exchange
        self.residents: dict[Tensor, ResidentParameter] = {}
        self._worker = Worker()
        self._lanes: dict[torch.device, Lane] = {}
        self._engine: Engine | None = None
        self._release: weakref.finalize[..., Any] | None = None
        self._torn: str | None = None
        self._reserved = 0

    @property
    def engine(self) -> Engine:
        """Raises RuntimeError after `close`."""
        self.check_open()
        assert self._engine is not None
        return self._engine

    @property
    def pinned(self) -> bool:
        """Whether the ring is page-locked."""
        return self._engine is not None and self._engine.ring.pinned

    @property
    def compiled(self) -> bool:
        """Whether the compiled kernel is used."""
        return self._engine is not None and self._engine.arithmetic.compiled

    @property
    def host_bytes(self) -> int:
        """Bytes reserved on the host: state, ring, scratch."""
        if self._engine is None:
            return self._reserved
        return self._reserved + self._engine.ring.nbytes + self._engine.arithmetic.nbytes

    def admit(self, parameters: Sequence[Tensor], names: Sequence[str]) -> list[ResidentParameter]:
        """Reserve host memory for parameters.

        Raises:
            ValueError, TypeError, MemoryError: no parameter is admitted then.
        """
        ranks, rank = (1, 0) if self.exchange is None else (self.exchange.ranks, self.exchange.rank)
        new = [
            ResidentParameter(parameter, name, ranks, rank)
            for parameter, name in zip(parameters, names, strict=True)
        ]
        self._have_ring(any(parameter.is_cuda for parameter in parameters))
        self._reserved += settle_in(
            new, self.settings.state_dtype, gradients=self.settings.gradients == "host"
        )
        self.residents.update((resident.parameter, resident) for resident in new)
        return new

    def lane(self, device: torch.device) -> Lane:
        """The lane to a device, made at the first call."""
        if device not in self._lanes:
            self._lanes[device] = lane_to(device)
        return self._lanes[device]

    def buckets(
        self, members: Iterable[tuple[int, ResidentParameter, Tensor | None]], *, reduced: bool
    ) -> list[Bucket]:
        """`plan.buckets_of` for this ring's tiles."""
        return buckets_of(members, self.lane, self.settings.tile_elements, reduced=reduced)

    def run(self, buckets: Sequence[Bucket], work: Callable[[Engine, Bucket], None]) -> None:
        """Do the work for each bucket in the worker's thread, and wait."""
        if not buckets:
            return
        lanes = {id(bucket.lane): bucket.lane for bucket in buckets}
        self._worker.run(lanes.values(), self._guarded(buckets, work))

    def submit(self, bucket: Bucket, work: Callable[[Engine, Bucket], None]) -> Future[None]:
        """Do a part of larger work in the worker's thread, after what was submitted before."""
        return self._worker.submit([bucket.lane], self._guarded([bucket], work, whole=False))

    def check_usable(self) -> None:
        """Raises RuntimeError after `close`, and after work that failed in the middle."""
        self.check_open()
        if self._torn is not None:
            raise RuntimeError(
                f"an earlier step failed in the middle ({self._torn}): some parameters have taken it, others "
                "not. Load the last state_dict() and the weights saved with it, then continue"
            )

    def check_open(self) -> None:
        """Raises RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this OffloadedAdamW is closed")

    def mended(self) -> None:
        """Note that a whole state has been loaded: earlier failures no longer matter."""
        self._torn = None

    def close(self) -> None:
        """Release everything. No work may be running. Repeatable."""
        if self._release is not None:
            self._release()
        self._engine = None
        self._lanes.clear()
        self.residents.clear()
        self._reserved = 0

    def _guarded(
        self, buckets: Sequence[Bucket], work: Callable[[Engine, Bucket], None], *, whole: bool = True
    ) -> Callable[[], None]:
        """The work as a job. After a failure no more work is done, unless whole work has changed nothing."""
        engine = self.engine

        def job() -> None:
            engine.changing = False
            try:
                for bucket in buckets:
                    work(engine, bucket)
            except BaseException as error:
                if engine.changing or not whole:
                    self._torn = f"{type(error).__name__}: {error}"
                raise

        return job

    def _have_ring(self, on_cuda: bool) -> None:
        pin = self.settings.pin_memory and on_cuda
        if self._engine is not None and (self._engine.ring.pin_asked or not pin):
            return
        elements = self.settings.tile_elements
        ring = Ring(elements, self.settings.ring_depth, pin=pin)
        try:
            arithmetic = self._arithmetic(elements)
        except BaseException:
            ring.close()
            raise
        if self._engine is not None and self._release is not None:
            self._release.detach()
            self._engine.ring.close()
        self._engine = Engine(ring, arithmetic, self.exchange)
        self._release = weakref.finalize(self, self._worker.close, self._engine.close)

    def _arithmetic(self, elements: int) -> Arithmetic:
        if self._engine is not None:
            return self._engine.arithmetic
        scratch = FloatRoom(elements, moments=self.settings.state_dtype != torch.float32)
        return Arithmetic(scratch, library_for(self.settings.kernel))
