"""What the rungs must know about a program, collected while the unchanged program is traced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from memtriage.model.target import BATCH_NAMES, LENGTH_NAMES
from memtriage.prediction.build import Built, parameters_in

ACCUMULATION_NAMES: Final = (
    "accum",
    "accumulation",
    "accumulate",
    "accumulation_steps",
    "grad_accum",
    "grad_accum_steps",
    "gradient_accumulation_steps",
    "accumulate_grad_batches",
)


REPEATS: Final = 2
"""So many children of a container make it one of repeated blocks."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """Repeated blocks that are not within each other.

    Attributes:
        containers: names of the modules that hold them; `` for the model itself.
        blocks: their names, in order.
        own_switch: whether each has Transformers' `gradient_checkpointing` switch.
    """

    containers: tuple[str, ...]
    blocks: tuple[str, ...]
    own_switch: bool


@dataclass(frozen=True, slots=True)
class Knob:
    """A keyword that sizes the program."""

    name: str
    value: int
    of: Literal["build", "step"]


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """One optimizer.

    Attributes:
        name: of its class.
        adam: torch's Adam or AdamW.
        fusable: of a class with a fused step.
        foreach: whether some group's step is of foreach kernels.
        amsgrad: whether it keeps a third state.
    """

    name: str
    adam: bool
    fusable: bool
    foreach: bool
    amsgrad: bool


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A Transformers model within the program.

    Attributes:
        attention: its attention implementation.
        attends_by_sdpa: whether its attention can be scaled_dot_product_attention.
        supports_checkpointing: whether it switches checkpointing itself.
        checkpointing: the word for it in the names of its methods, which Transformers 5 changed.
        own_loss: whether its own causal loss was computed from logits by an output layer.
    """

    attention: str
    attends_by_sdpa: bool
    supports_checkpointing: bool
    checkpointing: str
    own_loss: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """A program; by default one that runs as it is.

    Attributes:
        batch, accumulation, length: its knobs, where it has them.
        optimizers: its optimizers.
        keeps_gradients: whether it sets gradients to zero instead of None.
        autocast: whether the model ran under autocast.
        parameter_types: of floating-point parameters.
        trained: number of elements of trained parameters.
        frozen: whether there are parameters that are not trained.
        levels: repeated blocks.
        called: names of the blocks that were called.
        recomputed: names of the blocks that were called again within backward.
        huggingface: the Transformers model in it, if any.
        compiled: whether it calls `torch.compile`.
        parallel: what makes it one of several ranks: `DistributedDataParallel`, `FSDP2`, or nothing.
    """

    batch: Knob | None = None
    accumulation: Knob | None = None
    length: Knob | None = None
    optimizers: tuple[OptimizerFacts, ...] = ()
    keeps_gradients: bool = False
    autocast: bool = False
    parameter_types: frozenset[torch.dtype] = frozenset()
    trained: int = 0
    frozen: bool = False
    levels: tuple[RepeatedBlocks, ...] = ()
    called: frozenset[str] = frozenset()
    recomputed: frozenset[str] = frozenset()
    huggingface: HuggingFace | None = None
    parallel: str = ""
    compiled: bool = False


class Observer:
    """Looks at a program while it is traced. `facts()` is to be called afterwards."""

    def __init__(self) -> None:
        self._called: set[str] = set()
        self._recomputed: set[str] = set()
        self._autocast = False
        self._keeps = False
        self._loss_called = False
        self._facts: Facts | None = None
        self._knobs: list[Knob] = []

    def observe(self, build: Callable[..., Any], built: Built) -> Built:
        """The program, with what observes it."""
        self._knobs = [*knobs(build, "build"), *knobs(built.step, "step")]
        levels = levels_of(built.model)
        for name in (name for level in levels for name in level.blocks):
            self._watch_block(built.model.get_submodule(name), name)
        built.model.register_forward_pre_hook(self._model_called)
        for owner in with_zero_grad(built):
            self._watch_zero_grad(owner)
        inner = huggingface_in(built.model)
        if inner is not None and hasattr(inner, "loss_function"):
            inner.loss_function = self._loss_watched(inner.loss_function)
        self._levels = levels

        def step() -> Any:
            result = built.step()
            self._note(built)
            return result

        return Built(built.model, built.optimizers, step)

    def facts(self) -> Facts:
        """What was seen."""
        assert self._facts is not None, "the program was not traced"
        return self._facts

    def _note(self, built: Built) -> None:
        parameters = list(parameters_in([built.model], built.optimizers))
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._facts = Facts(
            batch=_first(self._knobs, BATCH_NAMES),
            accumulation=_first(self._knobs, ACCUMULATION_NAMES),
            length=_first(self._knobs, LENGTH_NAMES),
            optimizers=tuple(_optimizer_facts(inner_optimizer(optimizer)) for optimizer in built.optimizers),
            keeps_gradients=self._keeps,
            autocast=self._autocast,
            parameter_types=frozenset(
                parameter.dtype for parameter in parameters if parameter.is_floating_point()
            ),
            trained=sum(parameter.numel() for parameter in trained),
            frozen=len(trained) < len(parameters),
            levels=self._levels,
            called=frozenset(self._called),
            recomputed=frozenset(self._recomputed),
            huggingface=self._huggingface(built.model),
            parallel=_parallel(built.model),
        )

    def _huggingface(self, model: nn.Module) -> HuggingFace | None:
        inner = huggingface_in(model)
        if inner is None:
            return None
        new = "activation_checkpointing"
        return HuggingFace(
            attention=str(getattr(inner.config, "_attn_implementation", None)),
            attends_by_sdpa=bool(getattr(inner, "_supports_sdpa", False)),
            supports_checkpointing=bool(getattr(inner, "supports_gradient_checkpointing", False)),
            checkpointing=new if hasattr(inner, f"{new}_enable") else "gradient_checkpointing",
            own_loss=self._loss_called and isinstance(inner.get_output_embeddings(), nn.Linear),
        )

    def _watch_block(self, block: nn.Module, name: str) -> None:
        # Compiled code would take what is noted here for a condition of its own.
        compiling = torch.compiler.is_compiling

        def call(*_: Any) -> None:
            if not compiling():
                self._called.add(name)

        def part_called(*_: Any) -> None:
            if not compiling() and torch._C._current_graph_task_id() != -1:  # within backward
                self._recomputed.add(name)

        block.register_forward_pre_hook(call)
        for part in block.modules():  # a checkpointed `forward` runs the hooks of the parts alone again
            part.register_forward_pre_hook(part_called)

    def _model_called(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._autocast = self._autocast or torch.is_autocast_enabled("cuda")

    def _watch_zero_grad(self, owner: Any) -> None:
        original = owner.zero_grad

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            self._keeps = self._keeps or False in (*args, *kwargs.values())
            original(*args, **kwargs)

        owner.zero_grad = zero_grad

    def _loss_watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*args: Any, **kwargs: Any) -> Any:
            self._loss_called = True
            return original(*args, **kwargs)

        return loss


def knobs(function: Callable[..., Any], of: Literal["build", "step"]) -> list[Knob]:
    """The keywords of a function whose defaults are whole numbers."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return []
    return [
        Knob(parameter.name, parameter.default, of)
        for parameter in parameters
        if type(parameter.default) is int
    ]


def with_zero_grad(built: Built) -> list[Any]:
    """The model and its optimizers, as far as they can drop gradients: optimizers need not be torch's."""
    return [owner for owner in (built.model, *built.optimizers) if hasattr(owner, "zero_grad")]


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer itself, where a library (Accelerate) has wrapped it."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "accelerator_state"):
        return getattr(optimizer, "optimizer", optimizer)
    return optimizer


def huggingface_in(model: nn.Module) -> Any:
    """The outermost Transformers model among a model and its parts; None without one."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return None
    kind = library.PreTrainedModel
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def _first(candidates: Iterable[Knob], names: tuple[str, ...]) -> Knob | None:
    by_name = {knob.name: knob for knob in candidates}
    return next((by_name[name] for name in names if name in by_name), None)


def _parallel(model: nn.Module) -> str:
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return "DistributedDataParallel"
    return "FSDP2" if any(hasattr(parameter, "placements") for parameter in model.parameters()) else ""


def _optimizer_facts(optimizer: Any) -> OptimizerFacts:
    groups = optimizer.param_groups
    fused = all(bool(group.get("fused")) for group in groups)
    return OptimizerFacts(
        name=type(optimizer).__name__,
        adam=isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)),
        fusable=isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)),
        foreach=any("foreach" in group and group["foreach"] is not False for group in groups) and not fused,
        amsgrad=any(bool(group.get("amsgrad")) for group in groups),
    )


def levels_of(model: nn.Module) -> tuple[RepeatedBlocks, ...]:
    """The levels of repeated blocks, the outermost first."""
    levels: list[tuple[list[str], list[str]]] = []
    _visit(model, "", 0, levels)
    return tuple(
        RepeatedBlocks(
            tuple(containers),
            tuple(blocks),
            all(hasattr(type(model.get_submodule(name)), "gradient_checkpointing") for name in blocks),
        )
        for containers, blocks in levels
    )


def _visit(module: nn.Module, name: str, depth: int, levels: list[tuple[list[str], list[str]]]) -> None:
    repeated = _repeated(module)
    if repeated:
        while len(levels) <= depth:
            levels.append(([], []))
        levels[depth][0].append(name)
        levels[depth][1].extend(_joined(name, name_inside) for name_inside in repeated)
    for child_name, child in module.named_children():
        _visit(child, _joined(name, child_name), depth + (child_name in repeated), levels)


def _repeated(module: nn.Module) -> list[str]:
    """Names of the children that are blocks: with parameters, and made of modules themselves."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    names = [
        name
        for name, child in module.named_children()
        if any(True for _ in child.children()) and any(True for _ in child.parameters())
    ]
    return names if len(names) >= REPEATS else []


def _joined(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
