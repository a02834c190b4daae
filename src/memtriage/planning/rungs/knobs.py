"""Smaller micro-batches with accumulation, by keywords of `build` or `step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from memtriage.model.target import BATCH_NAMES
from memtriage.planning.changes import Change, Offer, Rung, unchanged
from memtriage.planning.facts import Facts, Knob
from memtriage.prediction.build import Built

SIMULATED: Final = 2
"""Micro-batches of a step that are simulated: the second one finds the first one's gradients in place, as do
all later ones."""


def _smaller(knob: Knob, accumulation: Knob | None, size: int) -> Change:
    times = knob.value // size
    simulated = min(times, SIMULATED)
    arguments = {knob.of: {knob.name: size}}
    edit = _accumulating(simulated)
    if accumulation is not None:
        arguments.setdefault(accumulation.of, {})[accumulation.name] = accumulation.value * simulated
        edit = unchanged
    device = "device, " if knob.of == "build" else ""
    steps = times * (1 if accumulation is None else accumulation.value)
    return Change(
        rung="micro-batch",
        action=f"micro-batch {size} instead of {knob.value}, accumulated {steps} times",
        speed="lower utilization of the device by smaller kernels, the same operations (M5): measure it",
        maths="same",
        maths_note="except batch-norm statistics, and means over micro-batches with different numbers of "
        "tokens",
        code={
            "torch": f"{knob.of}({device}{knob.name}={size})\n"
            f"for number in range({steps}):\n"
            f"    (loss(micro_batch) / {steps}).backward()\n"
            "optimizer.step()\n"
            "optimizer.zero_grad()",
            "trainer": f"TrainingArguments(per_device_train_batch_size={size}, "
            f"gradient_accumulation_steps={steps})",
            "accelerate": f"Accelerator(gradient_accumulation_steps={steps})  # and "
            "`with accelerator.accumulate(model):` around each micro-batch",
            "lightning": f"Trainer(accumulate_grad_batches={steps})  # with batches of {size}",
        },
        edit=edit,
        build_arguments=arguments.get("build", {}),
        step_arguments=arguments.get("step", {}),
        work_factor=times / simulated,
        outermost=True,
    )


def _accumulating(times: int) -> Callable[[Built], Built]:
    """The program's own step, run several times for one step of its optimizers."""

    def edit(built: Built) -> Built:
        gates = [_Gate(optimizer) for optimizer in built.optimizers]
        drop = built.model.zero_grad

        def drop_unless_pending(*args: Any, **kwargs: Any) -> None:
            if not any(gate.pending for gate in gates):
                drop(*args, **kwargs)

        def step() -> None:
            for number in range(times):
                for gate in gates:
                    gate.is_open = number == times - 1
                built.step()

        built.model.zero_grad = drop_unless_pending
        return Built(built.model, built.optimizers, step)

    return edit


class _Gate:
    """Keeps an optimizer from stepping, and its gradients from being dropped before it has stepped.

    Attributes:
        is_open: whether it may step.
        pending: whether a step was held back since the last one that was taken.
    """

    def __init__(self, optimizer: Any) -> None:
        self.is_open = True
        self.pending = False
        self._step, optimizer.step = optimizer.step, self._take
        if hasattr(optimizer, "zero_grad"):
            self._zero_grad, optimizer.zero_grad = optimizer.zero_grad, self._drop

    def _take(self, *args: Any, **kwargs: Any) -> Any:
        self.pending = not self.is_open
        return self._step(*args, **kwargs) if self.is_open else None

    def _drop(self, *args: Any, **kwargs: Any) -> None:
        if not self.pending:
            self._zero_grad(*args, **kwargs)


def _offer_micro_batch(facts: Facts) -> Offer:
    knob = facts.batch
    if knob is None:
        return (
            "neither `build` nor `step` has a keyword for the batch: write e.g. "
            "`def build(device, micro_batch=16)` and use it where the batch is made (also understood: "
            f"{', '.join(BATCH_NAMES[1:])})"
        )
    sizes = [size for size in range(knob.value - 1, 0, -1) if knob.value % size == 0]
    if not sizes:
        return f"{knob.name} is {knob.value} already"
    return (tuple(_smaller(knob, facts.accumulation, size) for size in sizes),)


MICRO_BATCH = Rung("micro-batch", "M5", _offer_micro_batch)
