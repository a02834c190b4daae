"""The order in which a walk over a heap enters its roots, the same for this process and for others.

What an earlier root reaches stays with it, so this order decides which holder names a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

ModuleT = TypeVar("ModuleT", contravariant=True)
FrameT = TypeVar("FrameT", contravariant=True)
ClassT = TypeVar("ClassT")


class Walker(Protocol[ModuleT, FrameT, ClassT]):
    """Enters roots of one heap, except those that were entered before.

    Attributes:
        library_classes: classes of libraries that were met so far.
    """

    library_classes: list[ClassT]

    def enter_module(self, name: str, module: ModuleT, /) -> None:
        """Enter a module's variables."""

    def enter_frame(self, frame: FrameT, /) -> None:
        """Enter the variables of a running function."""

    def enter_class(self, klass: ClassT, /) -> None:
        """Enter a class."""

    def exhaust(self) -> None:
        """Continue the walk until only graphs and optimizers are left."""

    def release(self, *, graphs: bool = True) -> None:
        """Walk optimizers, too, and graphs before them."""


def enter_program(
    walker: Walker[ModuleT, FrameT, ClassT],
    modules: Iterable[tuple[str, ModuleT]],
    list_frames: Callable[[], Sequence[tuple[FrameT, bool]]],
) -> None:
    """Walk the program's own modules, then the frames of all threads, the user's functions first.

    What the user's functions lead to is named by them: a library function that happens to run (an optimizer's
    step) has a shorter path to nearly everything.

    Args:
        walker: has entered nothing yet.
        modules: the program's own, with names.
        list_frames: returns each frame, and whether its function is the user's. Called after the modules.
    """
    for name, module in modules:
        walker.enter_module(name, module)
    walker.exhaust()
    frames = list_frames()
    for of_user in (True, False):
        for frame, is_user in frames:
            if is_user is of_user:
                walker.enter_frame(frame)
        walker.exhaust()
        walker.release(graphs=not of_user)  # an optimizer's states are in variables of its running step, too


def enter_libraries(walker: Walker[ModuleT, FrameT, ClassT], modules: Iterable[tuple[str, ModuleT]]) -> None:
    """Walk the modules of libraries, then their classes that were met so far."""
    for name, module in modules:
        walker.enter_module(name, module)
    walker.exhaust()
    for klass in walker.library_classes:
        walker.enter_class(klass)
    walker.exhaust()
    walker.release()
