"""Replaced functions are put back, unless other code has wrapped them in turn."""

from __future__ import annotations

from types import ModuleType

import pytest

from memtriage.process.replaced import Replaced, leave_out_caller


def test_functions_are_replaced_and_put_back_unless_they_were_wrapped() -> None:
    module = ModuleType("module")
    module.__dict__.update(first=len, second=abs)
    replaced = Replaced(module)
    replaced.put(first=min, second=max)
    assert (module.first, module.second) == (min, max)
    module.__dict__["first"] = sum
    replaced.restore()
    assert (module.first, module.second) == (sum, abs)
    module.__dict__["second"] = max
    replaced.restore()  # a second time does nothing
    assert module.second is max


def test_a_wrapper_is_not_in_the_traceback_of_what_it_calls() -> None:
    def fails() -> None:
        raise ValueError

    def wrapper() -> None:
        try:
            fails()
        except ValueError as error:
            leave_out_caller(error)
            raise

    with pytest.raises(ValueError) as caught:
        wrapper()
    assert [entry.name for entry in caught.traceback][1:] == ["fails"]
