"""Settings that torch has for its whole process: what they are, and how to set them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import pytest

from memtriage.observe.autograd import unread_saved_tensors


class _Setting(NamedTuple):
    read: Callable[[Any], Any]
    """From the module `torch`."""
    write: Callable[[Any, Any], None]


def _cudnn(name: str) -> _Setting:
    return _Setting(
        lambda torch: getattr(torch.backends.cudnn, name),
        lambda torch, value: setattr(torch.backends.cudnn, name, value),
    )


def _write_deterministic(torch: Any, value: tuple[bool, bool]) -> None:
    algorithms, warn_only = value
    torch.use_deterministic_algorithms(algorithms, warn_only=warn_only)


_SETTINGS: Final[Mapping[str, _Setting]] = {
    "backends.cudnn.benchmark": _cudnn("benchmark"),
    "backends.cudnn.deterministic": _cudnn("deterministic"),
    "backends.cudnn.enabled": _cudnn("enabled"),
    "deterministic algorithms": _Setting(
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _write_deterministic,
    ),
    "default device": _Setting(
        lambda torch: torch.get_default_device(),
        lambda torch, value: torch.set_default_device(None if value.type == "cpu" else value),
    ),
    "default dtype": _Setting(
        lambda torch: torch.get_default_dtype(), lambda torch, value: torch.set_default_dtype(value)
    ),
    "number of threads": _Setting(
        lambda torch: torch.get_num_threads(), lambda torch, value: torch.set_num_threads(value)
    ),
    "gradients": _Setting(
        lambda torch: torch.is_grad_enabled(), lambda torch, value: torch.set_grad_enabled(value)
    ),
    "anomaly detection": _Setting(
        lambda torch: torch.is_anomaly_enabled(),
        lambda torch, value: torch.autograd.set_detect_anomaly(value),
    ),
}


def read() -> dict[str, Any]:
    """Return each setting's value; nothing if this process has not imported torch."""
    torch = _torch()
    return {name: setting.read(torch) for name, setting in _SETTINGS.items()} if torch else {}


def restore(before: Mapping[str, Any]) -> None:
    """Set what differs from `before` again."""
    for name, value in read().items():
        if name in before and value != before[name]:
            _SETTINGS[name].write(_torch(), before[name])


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "autograd") and hasattr(torch, "get_default_device") else None


def shows_saved_tensors() -> pytest.MarkDecorator:
    """Return the mark that skips a test where torch, which it imports, does not show what graphs save."""
    import torch  # noqa: F401

    why = unread_saved_tensors()
    return pytest.mark.skipif(why is not None, reason=why or "")
