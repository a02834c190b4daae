"""Files in the format of safetensors: only their headers are read and written."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, BinaryIO, Final

import torch

from memtriage.prediction.fake_cuda.stand_ins import all_replaced, replaced
from memtriage.prediction.fake_cuda.tensors import fake_device
from memtriage.prediction.host.memory import LOADED, SAVED, HostMemory, MappedFile
from memtriage.prediction.host.torch_files import TorchFiles

_LENGTH: Final = 8
"""Bytes of the length of the header, at the beginning of a file."""
_LONGEST_HEADER: Final = 100_000_000
"""Bytes: safetensors refuses longer ones."""
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@contextmanager
def safetensors_followed(memory: HostMemory, files: TorchFiles) -> Iterator[None]:
    """In the block safetensors reads and writes files of tensors without data, where it is installed."""
    if find_spec("safetensors") is None:
        yield
        return
    import safetensors
    import safetensors.torch as of_torch

    def opened(filename: Any, framework: str = "pt", device: Any = "cpu", *, backend: str = "mmap") -> Any:
        return _SafeFile(memory, files, filename, device, backend)

    def save_file(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
        copies = [
            memory.allocate(tensor.nbytes, SAVED)
            for tensor in tensors.values()
            if fake_device(tensor).type != "cpu"
        ]
        try:
            with open(filename, "wb") as file:
                _write(tensors, metadata, file)
        finally:
            for copy in copies:
                memory.free(copy)

    with _everywhere(safetensors.safe_open, opened), _everywhere(of_torch.save_file, save_file):
        yield


@contextmanager
def _everywhere(original: Any, replacement: Any) -> Iterator[None]:
    """In the block all modules have the replacement, also those that imported the original by name."""
    with all_replaced((module, name, replacement) for module, name in _having(original)):
        try:
            yield
        finally:
            for module, name in _having(replacement):  # also modules that were imported in the block
                setattr(module, name, original)


def _having(value: Any) -> list[tuple[Any, str]]:
    """Where modules have a value."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        for name, held in list(getattr(module, "__dict__", {}).items())
        if held is value
    ]


class _SafeFile:
    """What `safetensors.safe_open` returns.

    Args:
        device: of the tensors that it gives.
        backend: `mmap` for a mapping of the file; others read it.

    Raises:
        OSError, ValueError: the file cannot be read.
    """

    def __init__(
        self, memory: HostMemory, files: TorchFiles, filename: Any, device: Any, backend: str
    ) -> None:
        with open(filename, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"{filename}: no header of safetensors")
            header = json.loads(file.read(length))
        self._metadata: dict[str, str] | None = header.pop("__metadata__", None)
        self._entries: dict[str, dict[str, Any]] = header
        self._memory = memory
        self._files = files
        self._device = device
        self._mapping = MappedFile(memory, os.path.realpath(filename)) if backend == "mmap" else None
        # The file stays mapped while it is open.
        self._close = weakref.finalize(self, lambda: None)
        if self._mapping is not None:
            self._mapping.opened()
            self._close = weakref.finalize(self, self._mapping.closed)

    def __enter__(self) -> _SafeFile:
        return self

    def __exit__(self, *args: Any) -> None:
        self._close()

    def keys(self) -> list[str]:
        return sorted(self._entries)

    def offset_keys(self) -> list[str]:
        return sorted(self._entries, key=lambda name: self._entries[name]["data_offsets"])

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        with replaced(self._memory, "kind", LOADED):
            storage = self._files.storage(end - begin, self._mapping)
            shape = entry["shape"]
            strides = torch.empty(shape, device="meta").stride()
            tensor = self._files.tensor(storage, _DTYPES[entry["dtype"]], 0, shape, strides)
            return tensor.to(self._device) if str(self._device) != "cpu" else tensor

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self, name, self._entries[name])


class _Slice:
    """A tensor of a file that is not read yet."""

    def __init__(self, file: _SafeFile, name: str, entry: dict[str, Any]) -> None:
        self._file = file
        self._name = name
        self._entry = entry

    def get_shape(self) -> list[int]:
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        return str(self._entry["dtype"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.get_tensor(self._name)[index]


def _write(tensors: dict[str, torch.Tensor], metadata: Any, file: BinaryIO) -> None:
    """The header, and room for the data."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH)
    file.write(len(text).to_bytes(_LENGTH, "little") + text)
    file.truncate(_LENGTH + len(text) + position)
