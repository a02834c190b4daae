"""When torch's optimizers make their states: in `_init_group` of their first step, which only does that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Final

from memtriage.observe.classes import instance_dict
from memtriage.process.stdlib import os

Around = Callable[[], AbstractContextManager[object]]
"""Makes the context in which states are made."""
_METHOD: Final = "_init_group"


class StateMaking:
    """Makes the states of optimizers inside a context.

    Only for optimizers without states, and not if the step is compiled. The hook is global, because
    optimizers may be made at any time. For its first step, an optimizer's method is wrapped until it has been
    called for each group of parameters.

    Args:
        begins: called before the first step of such an optimizer; returns the context, or None for no
        context.
        ends: called when its states are made; `remove` may be called here.
    """

    def __init__(self, begins: Callable[[Any], Around | None], ends: Callable[[], object]) -> None:
        self._begins = begins
        self._ends = ends
        self._pid = os.getpid()
        self._handle: Any = None

    def install(self) -> None:
        """Follow each optimizer of this process, but of no fork of it."""
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._compiling = is_compiling
        self._handle = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Remove the hook. Do not call it in a hook of a step: torch is iterating over these then."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # As in `TrainingHooks`, torch.compile must be able to trace through this.
        if not self._compiling() and os.getpid() == self._pid:
            self._follow(optimizer)

    def _follow(self, optimizer: Any) -> None:
        own = instance_dict(optimizer) or {}
        if hasattr(own.get(_METHOD), _MARK):  # its last step raised
            self._over(optimizer)
        make = getattr(optimizer, _METHOD, None)
        if make is None or optimizer.state or _METHOD in own:
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
    """Bytes of all parameters of an optimizer, by which predicted states are matched to it."""
    return sum(
        parameter.numel() * parameter.element_size()
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
