"""Work in another thread, which a signal cannot cut short."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """Starts a thread that does some work.

    Python runs signal handlers, and raises `KeyboardInterrupt`, only in the main thread: in another one the
    work cannot be interrupted between two of its steps. What is local to the calling thread does not apply
    there: modes, `torch.cuda.use_mem_pool`, the current stream and device.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(work,), name="memtriage-compact")
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._results.append(work())
        except BaseException as error:
            self._errors.append(error)

    def result(self) -> T:
        """Wait for the work, even if signals arrive, and return its result.

        Raises:
            BaseException: what the work raised; else what a signal handler raised meanwhile.
        """
        interruption: BaseException | None = None
        while self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as error:
                interruption = error
        if self._errors:
            raise self._errors[0]
        if interruption is not None:
            raise interruption
        return self._results[0]
