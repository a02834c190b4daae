"""The adapter for reinforcement-learning frameworks, on stand-ins of their workers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memtriage
from memtriage.integrations import rl
from memtriage.model.holders import AllocatorFigures
from memtriage.treat import phase as phase_module
from memtriage.treat.parking import transfer
from memtriage.treat.parking.api import is_parked
from memtriage.treat.phase import PhasePolicy
from memtriage.treat.phase_needs import Need


class FlatBuffer:
    """As Megatron's `_ParamAndGradBuffer`: parameters and gradients are views of two flat tensors."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        total = sum(parameter.numel() for parameter in parameters)
        self.param_data = torch.empty(total)
        self.grad_data = torch.zeros(total)
        self.calls: list[tuple[str, bool, bool]] = []
        self._size = self.grad_data.untyped_storage().nbytes()
        at = 0
        for parameter in parameters:
            view = self.param_data[at : at + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.main_grad = self.grad_data[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        self.calls.append(("offload", move_params, move_grads))
        if move_grads:
            self.grad_data.untyped_storage().resize_(0)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        self.calls.append(("reload", move_params, move_grads))
        if move_grads:
            self.grad_data.untyped_storage().resize_(self._size)
            self.grad_data.zero_()


class MegatronDDP(nn.Module):
    """As Megatron's `DistributedDataParallel`: `buffers` is a list and hides the method of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = [FlatBuffer(list(module.parameters()))]
        self.expert_parallel_buffers: list[FlatBuffer] = []

    def forward(self, x: Tensor) -> Any:
        return self.module(x)


class MegatronOptimizer:
    """As Megatron's optimizer with float32 masters, over a `torch.optim.Optimizer`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.masters = [parameter.detach().clone() for parameter in parameters]
        self.shard_fp32_from_float16_groups = [self.masters]
        self.model_float16_groups = [parameters]
        self.optimizer = torch.optim.Adam(self.masters)

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model_float16_groups[0], strict=True):
            master.grad = parameter.main_grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for master, parameter in zip(self.masters, self.model_float16_groups[0], strict=True):
            parameter.data.copy_(master)


class MegatronPolicyWorker:
    """As NeMo-RL's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        self.model: Any = MegatronDDP(module)
        self.optimizer = MegatronOptimizer(list(module.parameters()))
        self.calls: list[str] = []

    def train_step(self) -> float:
        loss = self.model(torch.ones(2, 8)).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        self.optimizer.step()
        return loss.item()

    def prepare_for_training(self) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=True, move_params=True)
        self.model.train()
        self.move_optimizer("cuda")

    def offload_before_refit(self) -> None:
        self.calls.append("before")
        self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
        self.move_optimizer("cpu")

    def offload_after_refit(self) -> str:
        self.calls.append("after")
        self.model = self.move_model(self.model, "cpu")
        self.model.eval()
        self.offload_before_refit()
        return "done"

    def move_model(self, model: Any, device: str, move_params: bool = True, move_grads: bool = True) -> Any:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            way = buffer.offload_to_cpu if device == "cpu" else buffer.reload_from_cpu
            way(move_params=move_params, move_grads=move_grads)
        return model

    def move_optimizer(self, device: str) -> None:
        self.calls.append(f"optimizer to {device}")


class DTensorPolicyWorker:
    """As NeMo-RL's other one: FSDP2, with moves of its own names."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(8, 8)
        self.optimizer: torch.optim.Optimizer | None = torch.optim.Adam(self.model.parameters())
        self.calls: list[str] = []

    def offload_before_refit(self) -> None:
        self.move_optimizer_to_device("cpu")

    def offload_after_refit(self) -> None:
        self.model = self.move_to_cpu(self.model)
        self.offload_before_refit()

    def prepare_for_training(self) -> None:
        self.model = self.move_to_cuda(self.model)
        self.move_optimizer_to_device("cuda")

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        self.calls.append("model to cpu")
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        self.calls.append("model to cuda")
        return model

    def move_optimizer_to_device(self, device: str) -> None:
        self.calls.append(f"optimizer to {device}")


class VerlEngine:
    """As an engine of verl."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool, bool, bool]] = []

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        self.calls.append((device, model, optimizer, grad))


class SlimeActor:
    """As a train actor of slime."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def sleep(self) -> None:
        self.events.append("pause")

    def wake_up(self) -> None:
        self.events.append("resume")


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
