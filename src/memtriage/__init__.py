"""memtriage: where every byte of GPU and host memory is in a PyTorch training run, and who holds it.

    memtriage run train.py

watches an unchanged training script. The functions here are for use inside a program. While no watch is on,
`mark()` and `step()` do nothing and cost nothing.

Names are imported when they are first used: `import memtriage` loads neither torch nor any report.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import memtriage.process.active  # noqa: F401  it notes which modules were loaded before memtriage
from memtriage.model.version import __version__

if TYPE_CHECKING:
    from memtriage.account.api import census as census
    from memtriage.account.api import ledger as ledger
    from memtriage.account.host_step import host_step as host_step
    from memtriage.catalogue.registered import Registration as Registration
    from memtriage.catalogue.registered import register_holder as register_holder
    from memtriage.integrations.metric_writer import MetricWriter as MetricWriter
    from memtriage.integrations.metrics import metrics as metrics
    from memtriage.integrations.metrics import otel_gauges as otel_gauges
    from memtriage.integrations.metrics import serve_metrics as serve_metrics
    from memtriage.integrations.notebook.extension import load_ipython_extension as load_ipython_extension
    from memtriage.integrations.notebook.extension import unload_ipython_extension as unload_ipython_extension
    from memtriage.messages.explain import explain as explain
    from memtriage.model.census import Census as Census
    from memtriage.model.explanation import Explanation as Explanation
    from memtriage.model.findings import Finding as Finding
    from memtriage.model.holders import Cleared as Cleared
    from memtriage.model.host_step import HostStep as HostStep
    from memtriage.model.ledger import Ledger as Ledger
    from memtriage.model.ledger import LedgerRow as LedgerRow
    from memtriage.model.marks import Mark as Mark
    from memtriage.model.plan import Plan as Plan
    from memtriage.model.prediction import Horizon as Horizon
    from memtriage.model.prediction import Prediction as Prediction
    from memtriage.model.priming import Priming as Priming
    from memtriage.model.recording import Recording as Recording
    from memtriage.model.recording import SnapshotError as SnapshotError
    from memtriage.model.report import RunReport as RunReport
    from memtriage.planning.api import plan as plan
    from memtriage.prediction.api import predict as predict
    from memtriage.prediction.build import BuildError as BuildError
    from memtriage.prediction.many_steps.api import horizon as horizon
    from memtriage.report.monitoring.prometheus import MetricsServer as MetricsServer
    from memtriage.session.api import mark as mark
    from memtriage.session.api import step as step
    from memtriage.session.api import watch as watch
    from memtriage.session.run import Watch as Watch
    from memtriage.snapshots.read import load_snapshot as load_snapshot
    from memtriage.treat.caches import clear_caches as clear_caches
    from memtriage.treat.compaction.api import compact as compact
    from memtriage.treat.compaction.relocate import CompactionError as CompactionError
    from memtriage.treat.compaction.result import Compaction as Compaction
    from memtriage.treat.deepspeed.internals import UnknownDeepSpeed as UnknownDeepSpeed
    from memtriage.treat.deepspeed.remedy import ExactHostMemory as ExactHostMemory
    from memtriage.treat.deepspeed.remedy import deepspeed_exact_host_memory as deepspeed_exact_host_memory
    from memtriage.treat.deepspeed.sums import SumsLost as SumsLost
    from memtriage.treat.host_tuning import Trimmed as Trimmed
    from memtriage.treat.host_tuning import malloc_settings as malloc_settings
    from memtriage.treat.host_tuning import malloc_trim as malloc_trim
    from memtriage.treat.offload.optimizer import OffloadedAdamW as OffloadedAdamW
    from memtriage.treat.offload.pinned import PinningFailed as PinningFailed
    from memtriage.treat.parking.api import park as park
    from memtriage.treat.parking.api import release_parking as release_parking
    from memtriage.treat.parking.api import unpark as unpark
    from memtriage.treat.parking.errors import ParkedError as ParkedError
    from memtriage.treat.parking.errors import ParkError as ParkError
    from memtriage.treat.parking.errors import ParkRefused as ParkRefused
    from memtriage.treat.parking.handle import Moved as Moved
    from memtriage.treat.parking.handle import Parked as Parked
    from memtriage.treat.phase import Phase as Phase
    from memtriage.treat.phase import PhasePolicy as PhasePolicy
    from memtriage.treat.phase import phase as phase
    from memtriage.treat.priming import prime as prime

__all__ = [
    "BuildError",
    "Census",
    "Cleared",
    "Compaction",
    "CompactionError",
    "ExactHostMemory",
    "Explanation",
    "Finding",
    "Horizon",
    "HostStep",
    "Ledger",
    "LedgerRow",
    "Mark",
    "MetricWriter",
    "MetricsServer",
    "Moved",
    "OffloadedAdamW",
    "ParkError",
    "ParkRefused",
    "Parked",
    "ParkedError",
    "Phase",
    "PhasePolicy",
    "PinningFailed",
    "Plan",
    "Prediction",
    "Priming",
    "Recording",
    "Registration",
    "RunReport",
    "SnapshotError",
    "SumsLost",
    "Trimmed",
    "UnknownDeepSpeed",
    "Watch",
    "__version__",
    "census",
    "clear_caches",
    "compact",
    "deepspeed_exact_host_memory",
    "explain",
    "horizon",
    "host_step",
    "ledger",
    "load_snapshot",
    "malloc_settings",
    "malloc_trim",
    "mark",
    "metrics",
    "otel_gauges",
    "park",
    "phase",
    "plan",
    "predict",
    "prime",
    "register_holder",
    "release_parking",
    "serve_metrics",
    "step",
    "unpark",
    "watch",
]

_HOMES: Final = {
    "BuildError": "prediction.build",
    "Census": "model.census",
    "Cleared": "model.holders",
    "Compaction": "treat.compaction.result",
    "CompactionError": "treat.compaction.relocate",
    "ExactHostMemory": "treat.deepspeed.remedy",
    "Explanation": "model.explanation",
    "Finding": "model.findings",
    "Horizon": "model.prediction",
    "HostStep": "model.host_step",
    "Ledger": "model.ledger",
    "LedgerRow": "model.ledger",
    "Mark": "model.marks",
    "MetricWriter": "integrations.metric_writer",
    "MetricsServer": "report.monitoring.prometheus",
    "Moved": "treat.parking.handle",
    "OffloadedAdamW": "treat.offload.optimizer",
    "ParkError": "treat.parking.errors",
    "ParkRefused": "treat.parking.errors",
    "Parked": "treat.parking.handle",
    "ParkedError": "treat.parking.errors",
    "Phase": "treat.phase",
    "PhasePolicy": "treat.phase",
    "PinningFailed": "treat.offload.pinned",
    "Plan": "model.plan",
    "Prediction": "model.prediction",
    "Priming": "model.priming",
    "Recording": "model.recording",
    "Registration": "catalogue.registered",
    "RunReport": "model.report",
    "SnapshotError": "model.recording",
    "SumsLost": "treat.deepspeed.sums",
    "Trimmed": "treat.host_tuning",
    "UnknownDeepSpeed": "treat.deepspeed.internals",
    "Watch": "session.run",
    "census": "account.api",
    "clear_caches": "treat.caches",
    "compact": "treat.compaction.api",
    "deepspeed_exact_host_memory": "treat.deepspeed.remedy",
    "explain": "messages.explain",
    "horizon": "prediction.many_steps.api",
    "host_step": "account.host_step",
    "ledger": "account.api",
    "load_ipython_extension": "integrations.notebook.extension",
    "load_snapshot": "snapshots.read",
    "malloc_settings": "treat.host_tuning",
    "malloc_trim": "treat.host_tuning",
    "mark": "session.api",
    "metrics": "integrations.metrics",
    "otel_gauges": "integrations.metrics",
    "park": "treat.parking.api",
    "phase": "treat.phase",
    "plan": "planning.api",
    "predict": "prediction.api",
    "prime": "treat.priming",
    "register_holder": "catalogue.registered",
    "release_parking": "treat.parking.api",
    "serve_metrics": "integrations.metrics",
    "step": "session.api",
    "unload_ipython_extension": "integrations.notebook.extension",
    "unpark": "treat.parking.api",
    "watch": "session.api",
}
"""The module below `memtriage` that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f"{__name__}.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"{__name__}.{name} needs torch, and there is none in this environment; expected 2.8 or newer: "
            f"install torch for {sys.executable}",
            name="torch",
        ) from None
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
