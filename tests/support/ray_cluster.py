"""A small Ray cluster on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

_CPUS: Final = 4  # enough for two workers and the trainer's own tasks; Ray only counts them
_OBJECT_STORE: Final = 100 * 1024**2
_LAUNCHER: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


@contextmanager
def started() -> Iterator[Any]:
    """Start a cluster, connect this process to it, and stop it again. Skips where Ray is not installed.

    Workers find `tests/support`, and they leave the GPUs and the network alone.
    """
    ray = pytest.importorskip("ray")
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        for name in _LAUNCHER:
            patch.delenv(name, raising=False)
        ray.init(
            num_cpus=_CPUS,
            num_gpus=0,
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": environment},
        )
        try:
            yield ray
        finally:
            ray.shutdown()
