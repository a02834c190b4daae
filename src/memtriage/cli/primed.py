"""`memtriage run --prime`: predict first, then start again and prime.

The prediction runs in a child process, and this process starts again before the program runs. So what was
imported for it is gone, and so is what that did to random state.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

from memtriage.session.runner import ScriptTarget

if TYPE_CHECKING:
    from memtriage.model.priming import Priming

VARIABLE: Final = "MEMTRIAGE_PRIMING"
"""Carries what was chosen across the restart. It is gone before the program runs."""


def restart_primed(target: ScriptTarget) -> None:
    """Choose the blocks for a program, then start this process again with the choice in its environment.

    Does not return. The process id, open files and the command line stay.

    Raises:
        OSError: the interpreter could not be started again.
    """
    import msgspec

    priming = choose_for(target)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, VARIABLE: msgspec.json.encode(priming).decode()}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def choice_in_environment() -> Priming | None:
    """What was chosen before the restart, taken out of the environment; None before it."""
    text = os.environ.pop(VARIABLE, None)
    if text is None:
        return None
    import msgspec

    from memtriage.model.priming import Priming

    return msgspec.json.decode(text, type=Priming)


def choose_for(target: ScriptTarget) -> Priming:
    """The blocks for a program; a program that cannot be predicted gets none, with the reason."""
    from memtriage.cli.trace_options import NamedProgram
    from memtriage.model.priming import Priming
    from memtriage.model.target import TraceTarget
    from memtriage.prediction.gpu_kinds import gpu_here
    from memtriage.prediction.sandbox.call import TraceFailed

    is_module = target.kind == "module"
    traced = TraceTarget(
        name=None if is_module else target.name,
        module=target.name if is_module else None,
        arguments=list(target.args),
        inference=True,  # what only infers is primed too, however long it runs
    )
    try:
        program = NamedProgram(traced, {"gpu": gpu_here()}, allow_network=False, show_output=False)
        ranks = {"world_size": _number("WORLD_SIZE", 1), "rank": _number("RANK", 0)}
        return program.trace("prime", ranks, Priming)
    except (ValueError, TraceFailed) as error:
        return Priming(reason=f"the program cannot be predicted: {error}")


def _number(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
