"""What differs between builds of torch."""

from __future__ import annotations

import torch


def versions_of_torch() -> set[str]:
    """Its version, and as a wheel's metadata may have it: without the CUDA that it was built for."""
    whole = str(torch.__version__)
    return {whole, whole.partition("+cu")[0]}
