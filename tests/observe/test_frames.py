"""Reading a running function's variables must name them all and keep none of them alive."""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from memtriage.observe.frames import frame_locals, running_frames


class Thing:
    pass


def outer(free: Thing) -> tuple[dict[str, object], weakref.ref[Thing]]:
    mine = Thing()
    watched = weakref.ref(mine)
    if watched() is None:
        unbound = 1
        assert unbound

    def inner() -> dict[str, object]:
        assert free is not None
        caller = sys._getframe(1)
        return dict(frame_locals(caller))

    seen = inner()
    seen_types = {name: type(value) for name, value in seen.items()}
    del mine, seen
    return {"types": seen_types, "alive": watched() is not None}, watched


def test_names_arguments_cells_and_locals_and_keeps_nothing() -> None:
    result, watched = outer(Thing())
    types = result["types"]
    assert isinstance(types, dict)
    assert types["mine"] is Thing
    assert types["free"] is Thing
    assert "unbound" not in types
    assert result["alive"] is False
    assert watched() is None


def test_module_body_has_no_fast_locals() -> None:
    frames: list[FrameType] = []
    namespace = {"frames": frames, "sys": sys}
    exec("frames.append(sys._getframe())", namespace)
    assert frame_locals(frames.pop()) == []


def test_free_variables_are_read_through_their_cell() -> None:
    captured = [1, 2, 3]

    def reader() -> dict[str, object]:
        assert captured
        return dict(frame_locals(sys._getframe()))

    assert reader()["captured"] is captured


def test_running_frames_lists_this_one_and_skips_by_file() -> None:
    names = {frame.f_code.co_name for thread, frame in running_frames(lambda name: False) if thread is None}
    assert "test_running_frames_lists_this_one_and_skips_by_file" in names
    skipped = {frame.f_code.co_name for _, frame in running_frames(lambda name: name == __file__)}
    assert "test_running_frames_lists_this_one_and_skips_by_file" not in skipped
