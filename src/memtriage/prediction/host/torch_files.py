"""`torch.save` and `torch.load` of tensors without data: files of the right size, without contents."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.utils.serialization
from torch.utils._python_dispatch import _disable_current_modes

from memtriage.prediction.fake_cuda.stand_ins import around, replaced
from memtriage.prediction.fake_cuda.tensors import CPU, CUDA, META, as_device, kernel
from memtriage.prediction.host.memory import LOADED, SAVED, HostMemory, MappedFile

SMALL: Final = 64 << 10
"""Bytes: contents of smaller storages are read and written; they may be step counts and random states."""


class TorchFiles:
    """Files in the format of `torch.save`, for the time of a trace.

    Args:
        on_gpu: whether a storage plays one of the GPU.
    """

    def __init__(self, memory: HostMemory, on_gpu: Callable[[Any], bool]) -> None:
        self._memory = memory
        self._on_gpu = on_gpu
        self._mapping: MappedFile | None = None
        self._left_out = 0  # bytes that a stream was not given

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """The attributes to replace: owner, name, value."""
        files, storage = torch.serialization, torch.UntypedStorage
        load, save = files.load, files.save
        return [
            (files, "load", around(load, self._load)),
            (torch, "load", around(load, self._load)),
            (files, "save", around(save, self._save)),
            (torch, "save", around(save, self._save)),
            (files, "_open_zipfile_reader", _opening(files._open_zipfile_reader, self._reader)),
            (files, "_open_zipfile_writer", _opening(files._open_zipfile_writer, self._writer)),
            (files, "location_tag", around(files.location_tag, self._located)),
            (torch._utils, "_rebuild_tensor", around(torch._utils._rebuild_tensor, self._rebuilt)),
            (storage, "cpu", around(storage.cpu, self._on_host)),
            (storage, "clone", around(storage.clone, self._cloned)),
            (storage, "to", around(storage.to, self._moved)),
            (storage, "resize_", around(storage.resize_, self._resized)),
        ]

    def _load(
        self, original: Callable[..., Any], f: Any, *args: Any, mmap: bool | None = None, **kwargs: Any
    ) -> Any:
        mapped = torch.utils.serialization.config.load.mmap if mmap is None else mmap
        mapping = MappedFile(self._memory, os.path.realpath(f)) if mapped else None
        with replaced(self, "_mapping", mapping), replaced(self._memory, "kind", LOADED):
            # The storages that it makes say themselves that they are parts of a mapping.
            return original(f, *args, mmap=False, **kwargs)

    def _save(self, original: Callable[..., Any], obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        with replaced(self._memory, "kind", SAVED):
            before = f.tell() if isinstance(f, io.BytesIO) else 0
            self._left_out = 0
            result = original(obj, f, *args, **kwargs)
            if isinstance(f, io.BytesIO):
                self._memory.follow(f, f.tell() - before + self._left_out)
            return result

    def _reader(self, reader: Any, file: Any) -> Any:
        return _Records(reader, get_storage_from_record=lambda *asked: self._record(reader, *asked))

    def _record(self, reader: Any, name: str, size: int, kind: Any) -> Any:
        """A storage of the file: with its contents where it is small."""
        if size <= SMALL:
            return reader.get_storage_from_record(name, size, kind)
        typed = SimpleNamespace(_untyped_storage=self.storage(size, self._mapping))
        return SimpleNamespace(_typed_storage=lambda: typed)

    def storage(self, size: int, part: MappedFile | None = None) -> Any:
        """A storage of the host without data, which was read or is part of a file."""
        with _disable_current_modes():
            storage = torch.UntypedStorage(size, device=META)
        self._memory.see(storage, used=part is None, part=part)
        return storage

    def _writer(self, writer: Any, file: Any) -> Any:
        has_path = isinstance(file, (str, os.PathLike))

        def write(name: str, data: Any, size: int) -> None:
            if not isinstance(data, torch.UntypedStorage) or data.device.type != "meta":
                writer.write_record(name, data, size)
            elif has_path:
                writer.write_record_metadata(name, size)
            elif size <= SMALL:
                writer.write_record(name, bytes(size), size)
            else:
                # A stream cannot leave room. The record is never read, see `_record`.
                writer.write_record(name, b"", 0)
                self._left_out += size

        return _Records(writer, write_record=write)

    def _located(self, original: Callable[[Any], str], storage: Any) -> str:
        return "cpu" if self._memory.knows(storage) else original(storage)

    def _rebuilt(
        self,
        original: Callable[..., Any],
        storage: Any,
        offset: int,
        size: Sequence[int],
        stride: Sequence[int],
    ) -> Any:
        untyped = storage._untyped_storage
        if untyped.device.type != "meta" or not self._memory.knows(untyped):
            return original(storage, offset, size, stride)
        return self.tensor(untyped, storage.dtype, offset, size, stride)

    def tensor(
        self, storage: Any, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """A tensor of the host in a storage without data."""
        with _disable_current_modes(), kernel():
            empty = torch.empty(0, dtype=dtype, device=META)
            return as_device(empty.set_(storage, offset, size, stride), CPU)

    def _on_host(self, original: Callable[[Any], Any], storage: Any) -> Any:
        """`UntypedStorage.cpu`: `torch.save` copies what is on the GPU."""
        if storage.device.type != "meta" or self._memory.knows(storage):
            return storage
        return self.storage(storage.nbytes()) if self._on_gpu(storage) else original(storage)

    def _cloned(self, original: Callable[[Any], Any], storage: Any) -> Any:
        if storage.device.type != "meta" or not self._memory.knows(storage):
            return original(storage)
        return self.storage(storage.nbytes())

    def _resized(self, original: Callable[..., Any], storage: Any, size: int) -> Any:
        """`UntypedStorage.resize_`, by which FSDP frees what it has gathered."""
        result = original(storage, size)
        self._memory.resized(storage)
        return result

    def _moved(
        self, original: Callable[..., Any], storage: Any, *, device: Any, non_blocking: bool = False
    ) -> Any:
        """`UntypedStorage.to`, by which `map_location="cuda"` moves what was read."""
        if not (storage.device.type == "meta" and self._memory.knows(storage)):
            return original(storage, device=device, non_blocking=non_blocking)
        if torch.device(device).type != "cuda":
            return storage
        here = self.tensor(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
        self._memory.use(storage, written=False)
        return here.to(CUDA).untyped_storage()


class _Records:
    """A reader or writer of records, some of whose methods are others."""

    def __init__(self, original: Any, **methods: Callable[..., Any]) -> None:
        self._original = original
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _opening(original: Any, wrap: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The context manager that opens a file, with its reader or writer wrapped."""

    @contextmanager
    def opened(file: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(file, *args, **kwargs) as opener:
            yield wrap(opener, file)

    return opened
