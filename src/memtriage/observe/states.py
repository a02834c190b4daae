"""When the optimizers of torch make their states: `_init_group`, in their first step, does nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Final

from memtriage.process.stdlib import os

Around = Callable[[], AbstractContextManager[object]]
"""Makes the context in which states are made."""
_METHOD: Final = "_init_group"


class StateMaking:
    """Runs what makes the states of optimizers inside a context.

    Only of optimizers that have no states yet, and not where the step is compiled. The hook is global, as
    optimizers may be made at any time; the method of an optimizer is wrapped for its first step, until it was
    called for each group of parameters.

    Args:
        begins: called before the first step of such an optimizer; returns the context, or None for none.
        ends: called when its states are made; `remove` may be called here.
    """

    def __init__(self, begins: Callable[[Any], Around | None], ends: Callable[[], object]) -> None:
        self._begins = begins
        self._ends = ends
        self._pid = os.getpid()
        self._handle: Any = None

    def install(self) -> None:
        """Follow each optimizer of this process, but of no fork of it."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Leave no hook behind. Not to be called in a hook of a step: torch goes through them then."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        from torch.compiler import is_compiling

        # As in `TrainingHooks`, torch.compile must be able to trace through this.
        if not is_compiling() and os.getpid() == self._pid:
            self._follow(optimizer)

    def _follow(self, optimizer: Any) -> None:
        if hasattr(vars(optimizer).get(_METHOD), _MARK):  # its last step raised
            self._over(optimizer)
        make = getattr(optimizer, _METHOD, None)
        if make is None or optimizer.state or _METHOD in vars(optimizer):
            return
        around = self._begins(optimizer)
        if around is None:
            return
        left = len(optimizer.param_groups)

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            with around():
                result = make(*args, **kwargs)
            left -= 1
            if not left:
                self._over(optimizer)
            return result

        setattr(made, _MARK, True)
        setattr(optimizer, _METHOD, made)

    def _over(self, optimizer: Any) -> None:
        delattr(optimizer, _METHOD)
        self._ends()


_MARK: Final = "_memtriage"


def parameter_bytes(optimizer: Any) -> int:
    """Bytes of all parameters of an optimizer: states that have been predicted are for as many."""
    return sum(
        parameter.numel() * parameter.element_size()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
