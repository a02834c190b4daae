"""What `Out` alone keeps, and taking it out of all the places where IPython keeps it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

from memtriage.integrations.notebook.outputs import behind_variables, drop_outputs


class Kept:
    """Stands for a value that a cell has shown."""


def test_ipython_s_names_come_after_the_user_s() -> None:
    namespace = dict.fromkeys(["_", "Out", "_oh", "x", "___", "get_ipython", "__", "_7", "y"], 0)
    behind_variables(namespace)
    assert list(namespace) == ["x", "_7", "y", "get_ipython", "_oh", "Out", "_", "__", "___"]


def test_dropped_outputs_are_kept_nowhere() -> None:
    first, second, own = Kept(), Kept(), Kept()
    outputs = {3: first, 4: second}
    namespace = {"_oh": outputs, "Out": outputs, "_3": first, "_4": second, "_": own, "__": second, "mine": 1}
    hidden = {"_4": second, "_": second}
    shell = SimpleNamespace(
        user_ns=namespace,
        user_ns_hidden=hidden,
        displayhook=SimpleNamespace(_=second, __=first, other=1),
        last_execution_result=SimpleNamespace(result=second),
    )
    refs = [weakref.ref(first), weakref.ref(second)]
    drop_outputs(shell)
    del first, second
    assert [ref() for ref in refs] == [None, None]
    # What the user has called `_` is not IPython's.
    assert namespace == {"_oh": {}, "Out": {}, "_": own, "__": "", "mine": 1}
    assert hidden == {"_": ""}
    assert vars(shell.displayhook) == {"_": "", "__": "", "other": 1}
    assert shell.last_execution_result.result is None
    shell.last_execution_result = None
    drop_outputs(shell)
