"""The allocator's settings of a trace: those that are given, or those that the program runs with."""

from __future__ import annotations

from memtriage.allocator.settings import AllocatorSettings, ConfError, join_conf, parse_conf
from memtriage.observe.cuda import allocator_conf_of_environment
from memtriage.prediction.build import BuildError
from memtriage.prediction.notes import Notes


class AllocatorConf:
    """Read from the environment when the program first uses the device, as torch does.

    Args:
        given: as in `PYTORCH_CUDA_ALLOC_CONF`; None for what the environment and the program set.

    Raises:
        ConfError: torch would refuse what is given.
    """

    def __init__(self, given: str | None, version: tuple[int, int], notes: Notes) -> None:
        self._set = ""
        self._version = version
        self._notes = notes
        self._follows = given is None
        self._used: tuple[str, AllocatorSettings] | None = None
        if given is not None:
            self._used = given, parse_conf(given, version)

    def change(self, conf: str) -> None:
        """`torch.cuda.memory._set_allocator_settings`."""
        if not self._follows:
            return
        if self._used is not None:
            self._notes.add(f"allocator settings changed after the device was used are left out: {conf}")
        else:
            self._set = conf

    def use(self) -> tuple[str, AllocatorSettings]:
        """The settings, as text and parsed: the device is used now, and they are fixed.

        Raises:
            BuildError: torch would refuse what the environment or the program sets.
        """
        if self._used is None:
            conf = join_conf(allocator_conf_of_environment(), self._set)
            try:
                self._used = conf, parse_conf(conf, self._version)
            except ConfError as error:
                raise BuildError(
                    f"allocator settings of the environment: {error}; "
                    'pass --allocator-conf "" to leave them out'
                ) from error
            if conf:
                self._notes.add(f"allocator settings of the environment: {conf}")
        return self._used
