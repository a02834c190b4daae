"""Replaced functions are put back, unless other code has wrapped them in turn."""

from __future__ import annotations

from types import ModuleType

from memtriage.process.replaced import Replaced


def test_functions_are_replaced_and_put_back() -> None:
    module = ModuleType("module")
    module.__dict__.update(first=len, second=abs)
    replaced = Replaced(module)
    replaced.put(first=min, second=max)
    assert (module.first, module.second) == (min, max)
    replaced.restore()
    assert (module.first, module.second) == (len, abs)


def test_a_wrapper_that_was_wrapped_stays() -> None:
    module = ModuleType("module")
    module.__dict__.update(first=len, second=abs)
    replaced = Replaced(module)
    replaced.put(first=min, second=max)
    module.__dict__["first"] = sum
    replaced.restore()
    assert (module.first, module.second) == (sum, abs)
    module.__dict__["second"] = max
    replaced.restore()  # a second time does nothing
    assert module.second is max
