"""Versions and devices."""

from __future__ import annotations

import contextlib
import platform
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from memtriage.model.machine import Fact
from memtriage.model.units import size
from memtriage.model.version import __version__
from memtriage.observe.host import release_of

_OLDEST: Final = (2, 8)
"""The oldest release of torch that memtriage is tested with."""


def versions(torch: ModuleType | None, why_not: str = "") -> Iterator[Fact]:
    """Report the versions of memtriage, Python, torch and the driver.

    Args:
        torch: the module; None when it cannot be imported.
        why_not: why it cannot be imported.
    """
    yield Fact(section="versions", name="memtriage", value=__version__)
    yield Fact(section="versions", name="python", value=f"{platform.python_version()}, {sys.executable}")
    if torch is None:
        yield Fact(
            section="versions",
            name="torch",
            value=f"not importable ({why_not})",
            status="bad",
            advice="Install memtriage into the environment that training runs in, or torch into this one.",
        )
    else:
        old = release_of(torch.__version__) < _OLDEST
        yield Fact(
            section="versions",
            name="torch",
            value=str(torch.__version__),  # a TorchVersion, which is a str of its own kind
            status="bad" if old else "ok",
            advice="memtriage is made for torch 2.8 and newer." if old else None,
        )
        yield _cuda_build(torch)
    driver, supports = _driver()
    yield Fact(section="versions", name="NVIDIA driver", value=driver)
    if supports is not None:
        yield Fact(section="versions", name="CUDA of driver", value=supports)


def _cuda_build(torch: ModuleType) -> Fact:
    built = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    if built is None:
        return Fact(section="versions", name="CUDA of torch", value="none: a CPU build of torch")
    return Fact(section="versions", name="CUDA of torch", value=built)


def _driver() -> tuple[str, str | None]:
    """Return the NVIDIA driver's version, or why there is none, and the CUDA version that it supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return "unknown: nvidia-ml-py is not installed", None
    except pynvml.NVMLError as error:
        return f"none ({error})", None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return _text(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except pynvml.NVMLError as error:
        return f"unknown ({error})", None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def devices(torch: ModuleType | None) -> Iterator[Fact]:
    """List the GPUs that torch can use, and accelerators that are not counted. Makes no CUDA context."""
    if torch is None:
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    yield from other_accelerators(torch)
    if not available:
        built = torch.version.cuda is not None or torch.version.hip is not None
        said = f": {caught[0].message}" if caught else ""
        yield Fact(
            section="devices",
            name="GPU",
            value=f"none that torch can use{said}",
            status="bad" if built and caught else "note",
            advice="Check the driver, CUDA_VISIBLE_DEVICES and the container's device access."
            if built
            else "This torch is built for CPU only; memtriage watches CPU tensors and the process.",
        )
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield Fact(
            section="devices",
            name=f"cuda:{index}",
            value=f"{properties.name}, {size(properties.total_memory)}, {capability}",
        )


def other_accelerators(torch: ModuleType) -> Iterator[Fact]:
    """Name accelerators whose memory memtriage does not count, or was never tried on."""
    if torch.version.hip is not None:
        yield Fact(
            section="devices",
            name="ROCm",
            value="never tried",
            status="note",
            advice="Counters and holders may work: they come from torch.cuda. The driver's figures are "
            "missing: they come from NVML.",
        )
    for name, module in (("XPU", getattr(torch, "xpu", None)), ("MPS", getattr(torch.backends, "mps", None))):
        if module is not None and module.is_available():
            yield Fact(
                section="devices",
                name=name,
                value="its memory is not counted",
                status="note",
                advice="memtriage counts CUDA devices, CPU tensors and the host. A census still lists "
                f"tensors on {name}.",
            )
