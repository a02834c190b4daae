"""What IPython's `Out` keeps: every value that a cell has shown, for good."""

from __future__ import annotations

import gc
from collections.abc import MutableMapping
from typing import Any, Final

_LATEST: Final = ("_", "__", "___")
_HIDDEN: Final = ("get_ipython", "_oh", "Out", *_LATEST)


def behind_variables(namespace: MutableMapping[str, Any]) -> None:
    """Move IPython's own names behind the user's in the namespace, for a census.

    A holder path goes through the first name that leads to an object: what both `model` and `_` hold is to
    be called `model`.
    """
    for name in _HIDDEN:
        if name in namespace:
            namespace[name] = namespace.pop(name)


def drop_outputs(shell: Any) -> None:
    """Empty `Out`, and take its values out of `_7`, `_`, `__`, `___` and the last cell's result."""
    namespace, hidden = shell.user_ns, shell.user_ns_hidden
    gone = namespace["_oh"]
    for names in (namespace, hidden):
        for number in gone:
            names.pop(f"_{number}", None)
    for names in (namespace, hidden, vars(shell.displayhook)):
        for name in _LATEST:
            if any(names.get(name) is value for value in gone.values()):  # not a variable of the user
                names[name] = ""
    if shell.last_execution_result is not None:
        shell.last_execution_result.result = None
    gone.clear()
    gc.collect()
