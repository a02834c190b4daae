"""The adapter for reinforcement-learning frameworks, on stand-ins of their workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtriage
from memtriage.integrations import rl
from memtriage.model.holders import AllocatorFigures
from memtriage.treat import phase as phase_module
from memtriage.treat.parking import transfer
from memtriage.treat.parking.api import is_parked
from memtriage.treat.phase import PhasePolicy
from memtriage.treat.phase_needs import Need
from support.rl_workers import (
    DTensorPolicyWorker,
    MegatronPolicyWorker,
    Rotary,
    SlimeActor,
    VerlEngine,
)

QUIET = PhasePolicy(clear=False, collect=False, residue=None)
OFFLOAD = "GPU Memory after optimizer offload: 0.55GB allocated, 0.62GB reserved\n"
REFIT = "GPU Memory after refit complete: 0.55GB allocated, 0.62GB reserved\n"


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The figures of a GPU; nothing stays parked."""
    now = {"cuda:0": AllocatorFigures(allocated=590_558_003, reserved=665_719_930)}
    monkeypatch.setattr(phase_module, "allocator_figures", lambda: now)
    monkeypatch.setattr(transfer.cuda, "initialized", lambda: False)
    yield
    if is_parked():
        memtriage.unpark()
    memtriage.release_parking()


def nbytes(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def state(worker: MegatronPolicyWorker) -> list[torch.Tensor]:
    moments = [v for s in worker.optimizer.optimizer.state.values() for v in s.values()]
    return [*worker.optimizer.masters, *moments]


def test_the_exact_lines_of_a_refit(capsys: pytest.CaptureFixture[str]) -> None:
    worker = MegatronPolicyWorker()
    rl.attach(worker, policy=QUIET)
    worker.offload_before_refit()
    assert capsys.readouterr().out == OFFLOAD
    assert worker.offload_after_refit() == "done"
    assert capsys.readouterr().out == OFFLOAD + REFIT  # after the refit the worker runs the first again
    assert worker.calls == ["before", "after", "before"]


def test_megatron_is_parked_with_the_same_bits() -> None:
    def losses(attached: bool) -> list[float]:
        worker = MegatronPolicyWorker()
        if attached:
            rl.attach(worker, policy=QUIET)
        found = []
        for _ in range(3):
            worker.prepare_for_training()
            found.append(worker.train_step())
            worker.offload_before_refit()
            if attached:
                assert nbytes(state(worker)) == 0
                assert nbytes(worker.model.parameters()) > 0
                assert worker.model.buffers[0].grad_data.untyped_storage().nbytes() == 0
            worker.offload_after_refit()
            if attached:
                assert nbytes(worker.model.parameters()) == 0
        return found

    assert losses(attached=True) == losses(attached=False)


def test_training_begins_a_phase_once_and_its_offload_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[Any] = []

    def begin(phase: str, coming: Any, *, prime: bool) -> dict[int, Need]:
        rounds.append((phase, prime, needs := {0: Need()}))
        return needs

    ended: list[Any] = []
    monkeypatch.setattr(phase_module.phase_needs, "begin", begin)
    monkeypatch.setattr(phase_module.phase_needs, "end", lambda phase, needs: ended.append(needs))
    monkeypatch.setattr(phase_module.phase_needs, "left", lambda needs: None)

    class Worker(MegatronPolicyWorker):
        def prepare_for_lp_inference(self) -> None:
            self.calls.append(f"scores in round {len(rounds)}")

    with rl.attach(Worker, policy=QUIET):
        worker = Worker()
        for _ in range(2):
            worker.prepare_for_lp_inference()
            worker.prepare_for_training()
            worker.train_step()
            worker.offload_before_refit()
            worker.offload_after_refit()
    assert [(phase, prime) for phase, prime, _ in rounds] == [("optimizer offload", True)] * 2
    assert ended == [needs for _, _, needs in rounds]
    scored = [call for call in worker.calls if call.startswith("scores")]
    assert scored == ["scores in round 1", "scores in round 2"]


def test_megatrons_own_code_keeps_the_gradients() -> None:
    worker = MegatronPolicyWorker()
    rl.attach(worker, policy=QUIET)
    worker.prepare_for_training()
    worker.train_step()
    worker.offload_after_refit()
    worker.prepare_for_training()
    assert worker.model.buffers[0].calls == [
        ("reload", True, True),  # nothing was parked then
        ("offload", False, True),
        ("offload", False, True),
        ("reload", False, True),
    ]
    assert worker.calls.count("optimizer to cpu") == 0


def test_a_dtensor_worker_is_parked_too(capsys: pytest.CaptureFixture[str]) -> None:
    worker = DTensorPolicyWorker()
    rl.attach(worker, policy=QUIET)
    weight = worker.model.weight.detach().clone()
    worker.offload_after_refit()
    assert nbytes(worker.model.parameters()) == 0
    assert capsys.readouterr().out == OFFLOAD + REFIT
    worker.prepare_for_training()
    assert torch.equal(worker.model.weight, weight)
    # The optimizer has no state yet: what there is to do is left to the worker's own method.
    assert worker.calls == ["optimizer to cpu", "optimizer to cuda"]
    worker.optimizer = None
    worker.offload_before_refit()


def test_without_parking_the_workers_own_moves_run() -> None:
    worker = DTensorPolicyWorker()
    rl.attach(worker, policy=QUIET, park=False)
    worker.offload_after_refit()
    worker.prepare_for_training()
    assert worker.calls == ["model to cpu", "optimizer to cpu", "model to cuda", "optimizer to cuda"]


def test_caches_are_cleared_at_the_boundary() -> None:
    worker = MegatronPolicyWorker()
    worker.rotary = Rotary()
    worker.rotary(1000)
    registration = memtriage.register_holder(
        "rotary", lambda: Rotary.forward, Rotary.forward.cache_clear, refills="at the next forward"
    )
    try:
        rl.attach(worker, policy=PhasePolicy(residue=None))
        worker.offload_before_refit()
        assert Rotary.forward.cache_info().currsize == 0
    finally:
        registration.remove()


def test_verls_engine_ends_a_phase_when_it_leaves_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    engine = VerlEngine()
    rl.attach(engine, policy=QUIET)
    engine.to("cpu", model=True, optimizer=False)
    assert capsys.readouterr().out == "GPU Memory after offload: 0.55GB allocated, 0.62GB reserved\n"
    engine.to(device="cpu")
    assert capsys.readouterr().out.startswith("GPU Memory after offload: ")
    engine.to("cuda:0")
    assert capsys.readouterr().out == ""
    assert engine.calls == [
        ("cpu", True, False, True),
        ("cpu", True, True, True),
        ("cuda:0", True, True, True),
    ]


def test_slimes_actor_is_compacted_before_its_segments_are_paused() -> None:
    events: list[str] = []
    actor = SlimeActor(events)
    rl.attach(actor, policy=PhasePolicy(clear=False, residue=None, log=events.append))
    actor.sleep()
    actor.wake_up()
    line = "GPU Memory after training: 0.55GB allocated, 0.62GB reserved"
    assert events == [line, "pause", "resume"]


def test_it_comes_off_again(capsys: pytest.CaptureFixture[str]) -> None:
    worker = MegatronPolicyWorker()
    with rl.attach(worker, policy=QUIET) as attachment:
        assert set(attachment.methods) == {
            "offload_before_refit",
            "offload_after_refit",
            "prepare_for_training",
            "move_model",
            "move_optimizer",
        }
        with pytest.raises(ValueError, match="MegatronPolicyWorker is attached already"):
            rl.attach(worker)
    attachment.detach()
    worker.offload_before_refit()
    assert capsys.readouterr().out == ""
    assert worker.calls == ["before", "optimizer to cpu"]
    rl.attach(worker, policy=QUIET)


def test_a_class_is_attached_for_all_its_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """As Ray needs it: it calls the class's functions, whatever an actor has of that name."""

    class Worker(MegatronPolicyWorker):
        pass

    with rl.attach(Worker, policy=QUIET):
        worker = Worker()
        worker.prepare_for_training()
        worker.train_step()
        assert Worker.offload_after_refit(worker) == "done"
        assert capsys.readouterr().out == OFFLOAD + REFIT
        assert nbytes([*worker.model.parameters(), *state(worker)]) == 0
        worker.prepare_for_training()
        assert nbytes(worker.model.parameters()) > 0
        with pytest.raises(ValueError, match="Worker is attached already"):
            rl.attach(worker)
        assert list(inspect.signature(Worker.move_model).parameters)[:3] == ["self", "model", "device"]
    assert "offload_after_refit" not in vars(Worker)
    assert Worker.offload_after_refit is MegatronPolicyWorker.offload_after_refit


def test_an_object_without_such_methods_is_refused() -> None:
    with pytest.raises(ValueError, match="object has none of the methods offload_before_refit, "):
        rl.attach(object())


def test_a_failure_of_the_workers_method_passes(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing:
        def offload_before_refit(self) -> None:
            raise ConnectionError("gone")

    worker = Failing()
    rl.attach(worker, policy=QUIET)
    with pytest.raises(ConnectionError, match="gone"):
        worker.offload_before_refit()
    assert capsys.readouterr().out == ""
