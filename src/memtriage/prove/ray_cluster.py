"""Trials at the same time on a Ray cluster: each is a task, which Ray puts where the GPUs it needs are free.

The script, its data and memtriage must be at the same paths on every node; records and logs travel back in
the task's result. A trial's ranks run on one node. Trials that run at the same time run on different devices,
and what differs between devices is in what differs between variants: the report says so.
"""

from __future__ import annotations

import io
import math
import shutil
import socket
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memtriage.prove.campaign import Campaign, Say
from memtriage.prove.result import Trial
from memtriage.prove.table import TrialsError
from memtriage.prove.trial import LOG, TrialEnd, read_end, run_trial, write_end
from memtriage.prove.trials import Trials, Variant

_LONGEST_ERROR: Final = 300
_CANCEL_S: Final = 40.0
"""How long interrupted trials get to stop their processes; longer than `processes` gives them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a trial asks of a node."""

    gpus: float
    cpus: float

    def fits(self, resources: Mapping[str, float]) -> int:
        """Return how many trials fit into these resources at the same time."""
        asked = [(self.gpus, resources.get("GPU", 0.0)), (self.cpus, resources.get("CPU", 0.0))]
        return min((math.floor(has / needs) for needs, has in asked if needs > 0), default=1)


def run_on_ray(campaign: Campaign, say: Say) -> None:
    """Run all trials that are to come on a Ray cluster, as many at once as it has room for.

    Raises:
        TrialsError: Ray is not installed, or no node has what a trial asks for.
        KeyboardInterrupt: Ctrl-C. Trials under way are stopped, finished ones are kept.
    """
    ray = _ray()
    connected = bool(ray.is_initialized())
    if not connected:
        ray.init(address=campaign.trials.ray.address, log_to_driver=False)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        demand = demand_of(campaign.trials, nodes)
        room = sum(demand.fits(node) for node in nodes)
        say(
            f"Ray: up to {room} trials at the same time, each with {demand.gpus:g} GPUs, {demand.cpus:g} CPUs"
        )
        task = ray.remote(num_gpus=demand.gpus, num_cpus=demand.cpus, max_retries=0)(run_remotely)
        _fan_out(ray, task, campaign, room)
    finally:
        if not connected:
            ray.shutdown()


def demand_of(trials: Trials, nodes: Sequence[Mapping[str, float]]) -> Demand:
    """Return what a trial asks of a node: what the file says, else one GPU and one CPU a rank.

    Args:
        trials: the file.
        nodes: each node's resources. Where none has a GPU, none is asked for by default.

    Raises:
        TrialsError: no node has that much.
    """
    given = trials.ray
    by_default = trials.ranks if any(node.get("GPU", 0.0) > 0 for node in nodes) else 0
    demand = Demand(
        gpus=by_default if given.gpus is None else given.gpus,
        cpus=trials.ranks if given.cpus is None else given.cpus,
    )
    if not any(demand.fits(node) for node in nodes):
        largest = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
        raise TrialsError(
            f"a trial asks for {demand.gpus:g} GPUs and {demand.cpus:g} CPUs of one node; expected no more "
            f"than some node of the Ray cluster has (the most GPUs are {largest:g}): lower ranks, or gpus "
            f"and cpus in [ray]"
        )
    return demand


def run_remotely(trials: Trials, variant: Variant, number: int, settings: dict[str, str]) -> bytes:
    """Run one trial where this is called, and return its folder as a compressed archive."""
    folder = Path(tempfile.mkdtemp(prefix="memtriage-trial-"))
    try:
        run_trial(trials, variant, number, settings, folder)
        return pack(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def pack(folder: Path) -> bytes:
    """Return a folder as a compressed archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Put a trial's files into its folder, instead of what was there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        opened.extractall(folder, filter="data")


def _fan_out(ray: Any, task: Any, campaign: Campaign, room: int) -> None:
    variants = {variant.name: variant for variant in campaign.trials.variants}
    under_way: dict[Any, tuple[Trial, float]] = {}
    try:
        while True:
            busy = {trial for trial, _ in under_way.values()}
            to_come = [trial for trial in campaign.pending() if trial not in busy]
            for number, name in to_come[: room - len(under_way)]:
                campaign.state.refuse_changes()
                campaign.begins(number, name, to_come, len(under_way), room)
                settings = campaign.state.settings(name)
                reference = task.remote(campaign.trials, variants[name], number, settings)
                under_way[reference] = ((number, name), time.time())
            if not under_way:
                return
            done, _ = ray.wait(list(under_way), num_returns=1)
            for reference in done:
                trial, begun = under_way.pop(reference)
                campaign.ends(_collected(ray, reference, campaign, trial, begun))
    finally:
        _cancel(ray, list(under_way))


def _collected(ray: Any, reference: Any, campaign: Campaign, trial: Trial, begun: float) -> TrialEnd:
    """Put a trial's files where they belong; a task that Ray lost is a trial that was killed."""
    number, name = trial
    folder = campaign.state.folder(name, number)
    try:
        unpack(ray.get(reference), folder)
        end = read_end(folder)
        error = "its files came back without an end"
    except ray.exceptions.RayError as lost:
        end, error = None, " ".join(str(lost).split())[:_LONGEST_ERROR]
    if end is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).write_text(f"{error}\n", "utf-8")
        end = TrialEnd(
            variant=name,
            round=number,
            settings=campaign.state.settings(name),
            outcome="killed",
            exit_code=-1,
            error=f"Ray lost the task: {error}",
            started=begun,
            seconds=time.time() - begun,
            host=socket.gethostname(),
        )
        write_end(end, folder)
    return end


def _cancel(ray: Any, references: list[Any]) -> None:
    """Interrupt tasks and wait until they have stopped their processes."""
    for reference in references:
        ray.cancel(reference)
    if references:
        with suppress(Exception):  # what they raise when canceled is of no interest any more
            ray.wait(references, num_returns=len(references), timeout=_CANCEL_S)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise TrialsError(
            f"--ray needs Ray, which cannot be imported ({error}); expected the extra: "
            f"pip install 'memtriage[ray]'"
        ) from error
    return ray
