"""Workspaces of cuDNN's convolutions.

cuDNN does not document which of its kernels it runs. What is written here was read off 2,055 calls on an H200
(torch 2.11.0+cu130, cuDNN 9.19, `tests/gpu/record_conv.py`: sizes of the workspaces and names of the kernels;
`tests/data/conv_h200.json`):

- Tensor cores read channels-last data, in units of 16 bytes of channels. Data that lie channels first are
  copied: input, weight and result, each way and in each of the three operations.
- The gradient of a weight is summed by more blocks than the weight has tiles, where those are too few for all
  multiprocessors: each has partial sums in single precision.
- Images of fewer channels than a unit have no workspace in single precision where the kernel is small.
- Of small layers (some 30 pixels wide, workspaces of megabytes) no rule was found for which of the three are
  copied: forward leaves out the result for some, and all three for others.
- Kernels of one pixel that move by one are matrix products and need no copies, but where rows have an odd
  number of pixels, which tensor cores cannot read: input and result are copied (the weight lies the same
  way).
- The gradient of such a weight is a product for each sample, summed afterwards: one weight in single
  precision for each sample, as long as that is not much more than the copies, which are made otherwise.
- Depthwise convolutions of channels-first data are PyTorch's own. Of channels-last data, the gradient of the
  weight has partial sums for each sample in half precision; in single precision copies of all three with a
  unit for each channel, where kernel and image are large.
- Channels-last data are copied only where channels do not fill a unit: to pad them.
- Without tensor cores (single precision with TF32 off) data are read as they lie, but for the gradient of the
  weight: by Winograd's method for 3 by 3, by copies otherwise. (cuDNN may take Fourier transforms for some
  forward convolutions then, with workspaces of up to gigabytes: those are not predicted.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

UNIT: Final = 16
"""Bytes of channels that tensor cores read at once."""
WINOGRAD_STEP: Final = 4
WINOGRAD_TILE: Final = 36
"""Winograd's method for 3 by 3 takes results 4 by 4, of which each is 36 products."""
SINGLE: Final = 4
PATCHES: Final = 4
"""Images are read as they lie by kernels that move by their own width of so many pixels."""
WIDE: Final = 128
NARROW: Final = 64
"""Filters of a tile; a tile of single precision is as deep as wide."""
LEAST_OF_REST: Final = 8
"""Tiles that are left when all multiprocessors have had theirs are shared by so many blocks, or by none."""
BLOCKS_OF_SAMPLE: Final = 8
LARGE_KERNEL: Final = 7
LARGE_SOURCE: Final = 28
"""Depthwise: 7 by 7 of 28 pixels and more was copied, of 14 and less was not; nor 5 by 5 and less."""
BY_SAMPLE: Final = {4: 1.4, 2: 0.7}
"""By bytes of an element: up to this multiple of the copies, weights of 1 by 1 are summed over samples.
Measured between 1.31 and 1.57, and between 0.52 and 0.85."""


class Operation(Enum):
    """What is computed."""

    FORWARD = "forward"
    OF_INPUT = "gradient of the input"
    OF_WEIGHT = "gradient of the weight"


SMALL_KERNEL: Final = {Operation.FORWARD: 4, Operation.OF_WEIGHT: 5}
"""Images of single precision that lie channels first are read so by kernels up to this wide: none of 3 and 4
pixels was copied for, of 5 only forward, of 7 and more all."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution.

    Attributes:
        source, weight, result: shapes; channels are the second dimension.
        stride: of the first dimension in space.
        element: bytes of one.
        channels_last: whether the data lie so.
        tensor_cores: whether they compute it.
        depthwise: whether each channel has filters of its own; only where data lie channels last.
    """

    source: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    stride: int
    element: int
    channels_last: bool
    tensor_cores: bool
    depthwise: bool = False

    @property
    def unit(self) -> int:
        """Channels of a unit."""
        return UNIT // self.element

    @property
    def one_pixel(self) -> bool:
        return all(extent == 1 for extent in self.weight[2:])

    @property
    def few_channels(self) -> bool:
        """Images: fewer channels than a unit has."""
        return self.source[1] < self.unit and not self.one_pixel

    def bytes(self, shape: tuple[int, ...], *, padded: bool = True) -> int:
        channels = -(-shape[1] // self.unit) * self.unit if padded else shape[1]
        count: int = torch.Size((shape[0], channels, *shape[2:])).numel()
        return count * self.element


def workspace(convolution: Convolution, operation: Operation, multiprocessors: int) -> int:
    """Bytes of the workspace."""
    if convolution.depthwise:
        return _depthwise(convolution) if operation is Operation.OF_WEIGHT else 0
    if not convolution.tensor_cores:
        return _without_tensor_cores(convolution, operation)
    if convolution.few_channels:
        return _of_images(convolution, operation)
    of_weight = operation is Operation.OF_WEIGHT
    sums = _partial_sums(convolution, multiprocessors) if of_weight else 0
    if convolution.channels_last:
        return sums
    if not convolution.one_pixel:
        return _copies(convolution) + sums
    ends = convolution.bytes(convolution.source) + convolution.bytes(convolution.result)
    if convolution.stride > 1:
        return ends + sums
    if of_weight:
        by_sample = _by_sample(convolution)
        return by_sample if by_sample <= BY_SAMPLE.get(convolution.element, 1) * ends else ends + sums
    pixels = torch.Size(convolution.source[2:]).numel()
    return ends if pixels % 2 else 0


def _depthwise(convolution: Convolution) -> int:
    """Of the gradient of the weight. In half precision each sample is summed by some blocks. In single
    precision large kernels run as grouped ones: each channel fills a unit of its own."""
    if convolution.element != SINGLE:
        return BLOCKS_OF_SAMPLE * _by_sample(convolution)
    small = convolution.weight[2] < LARGE_KERNEL or convolution.source[2] < LARGE_SOURCE
    if small or not convolution.tensor_cores:
        return 0
    parts = (convolution.source, convolution.weight, convolution.result)
    return convolution.unit * sum(convolution.bytes(part, padded=False) for part in parts)


def _partial_sums(convolution: Convolution, multiprocessors: int) -> int:
    """Of the gradient of a weight: a tile for each block, where several blocks share one."""
    rows, columns = convolution.weight[0], torch.Size(convolution.weight[1:]).numel()
    width = NARROW if rows <= NARROW else WIDE
    single = convolution.element == SINGLE
    depth = width if single else NARROW
    tiles = -(-rows // width) * -(-columns // depth)
    shared = tiles if tiles <= multiprocessors else tiles % multiprocessors
    blocks = multiprocessors // shared if shared else 1
    if blocks == 1 or (tiles > multiprocessors and not (single and blocks >= LEAST_OF_REST)):
        return 0
    sums: int = blocks * shared * width * depth
    return sums * SINGLE


def _copies(convolution: Convolution) -> int:
    return sum(
        convolution.bytes(shape) for shape in (convolution.source, convolution.weight, convolution.result)
    )


def _by_sample(convolution: Convolution) -> int:
    elements: int = convolution.source[0] * torch.Size(convolution.weight).numel()
    return elements * SINGLE


def _of_images(convolution: Convolution, operation: Operation) -> int:
    """First layers."""
    single = convolution.element == SINGLE
    forward = operation is Operation.FORWARD
    patches = convolution.stride == convolution.weight[2] == PATCHES
    if patches and (single if operation is Operation.OF_WEIGHT else forward):
        return 0
    small = operation is Operation.OF_INPUT or convolution.weight[2] <= SMALL_KERNEL[operation]
    if single and small and not convolution.channels_last:
        return 0
    padded = not (single and forward)
    parts = [convolution.source, convolution.weight]
    if not convolution.channels_last or (single and operation is Operation.OF_WEIGHT):
        parts.append(convolution.result)
    return sum(convolution.bytes(part, padded=padded) for part in parts)


def _without_tensor_cores(convolution: Convolution, operation: Operation) -> int:
    if operation is not Operation.OF_WEIGHT or convolution.few_channels or convolution.channels_last:
        return 0
    if convolution.one_pixel:
        ends = convolution.bytes(convolution.source) + convolution.bytes(convolution.result)
        return 0 if _by_sample(convolution) <= BY_SAMPLE[SINGLE] * ends else ends
    if convolution.weight[2:] == (3, 3) and convolution.stride == 1:
        samples, filters, *size = convolution.result
        channels = convolution.source[1]
        tiles = samples
        for extent in size:
            tiles *= -(-extent // WINOGRAD_STEP)
        elements = tiles * (channels + filters) + channels * filters
        return elements * WINOGRAD_TILE * SINGLE
    return _copies(convolution)
