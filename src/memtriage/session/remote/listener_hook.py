"""Let this process answer `memtriage census --pid N` once torch is imported.

`memtriage install-listener` copies this file into an environment, and a .pth file there imports it when
Python starts. It only needs the standard library, and changes nothing if memtriage is gone.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing takes 10 ms to import
if TYPE_CHECKING:
    from typing import Any


class _ArmingFinder:
    """A finder that arms the listener when torch is imported, and then leaves no trace in torch or Python."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        spec: Any = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                break
        loader: Any = getattr(spec, "loader", None)
        run = getattr(loader, "exec_module", None)
        if run is not None:

            def exec_module(module: Any) -> None:
                del loader.exec_module
                run(module)
                _arm()

            try:
                loader.exec_module = exec_module
            except AttributeError:  # a loader without attributes of its own
                pass
        return spec


def _arm() -> None:
    try:
        from memtriage.session.remote.armed import arm

        arm()
    except Exception:  # memtriage is gone or another version: the program continues
        pass


if "torch" not in sys.modules:
    sys.meta_path.insert(0, _ArmingFinder())
