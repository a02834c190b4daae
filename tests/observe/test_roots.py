"""The order of roots, which decides by which holder a tensor is named."""

from __future__ import annotations

from memtriage.observe.roots import enter_libraries, enter_program


class Recorder:
    """A walker that notes what it is asked to do, and meets a class of a library on the way."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.library_classes: list[str] = []

    def enter_module(self, name: str, module: int) -> None:
        self.steps.append(f"module {name} {module}")

    def enter_frame(self, frame: str) -> None:
        self.steps.append(f"frame {frame}")

    def enter_class(self, klass: str) -> None:
        self.steps.append(f"class {klass}")

    def exhaust(self) -> None:
        self.steps.append("exhaust")
        self.library_classes = ["torch.Tensor"]

    def release(self, *, graphs: bool = True) -> None:
        self.steps.append("release" if graphs else "release optimizers")


def test_program_modules_come_before_frames_and_the_users_frames_first():
    walker = Recorder()

    def list_frames() -> list[tuple[str, bool]]:
        walker.steps.append("list frames")
        return [("step of a library", False), ("train", True), ("main", True)]

    enter_program(walker, [("__main__", 1), ("model", 2)], list_frames)
    assert walker.steps == [
        "module __main__ 1",
        "module model 2",
        "exhaust",
        "list frames",
        "frame train",
        "frame main",
        "exhaust",
        "release optimizers",
        "frame step of a library",
        "exhaust",
        "release",
    ]


def test_classes_of_libraries_come_after_all_their_modules():
    walker = Recorder()
    enter_libraries(walker, [("torch", 3)])
    assert walker.steps == ["module torch 3", "exhaust", "class torch.Tensor", "exhaust", "release"]
