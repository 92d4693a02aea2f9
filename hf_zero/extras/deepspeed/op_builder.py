"""deepspeed.ops.op_builder's names: the native library is built with the package, so that nothing is built here."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import hf_zero.optim
from hf_zero.config.resolved import Aio
from hf_zero.errors import ConfigError
from hf_zero.native.aio import AioFile, AioQueue
from hf_zero.native.host_memory import transfer_memory
from hf_zero.native.library import has_library, library
from hf_zero.storage.swap_folder import ALIGNMENT


class OpBuilder:
    """An operation of DeepSpeed's. Here it is torch's, or the native library's."""

    NAME: ClassVar[str]

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        """Return the module that has it: hf_zero.optim, whose optimizers run torch's kernels."""
        return hf_zero.optim


class CPUAdamBuilder(OpBuilder):
    NAME = "cpu_adam"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the native library is there."""
        return has_library()

    def load(self, verbose: bool = False) -> Any:
        """Return the native library. Raises NativeError where it is missing."""
        return library()


class AsyncIOBuilder(CPUAdamBuilder):
    NAME = "async_io"

    def load(self, verbose: bool = False) -> Any:
        """Return the module that has `aio_handle`."""
        return sys.modules[__name__]


class UtilsBuilder(OpBuilder):
    NAME = "utils"

    def load(self, verbose: bool = False) -> Any:
        """Return what has torch's `flatten` and `unflatten` of dense tensors."""
        return SimpleNamespace(
            flatten=torch._utils._flatten_dense_tensors, unflatten=torch._utils._unflatten_dense_tensors
        )


class CPUAdagradBuilder(OpBuilder):
    NAME = "cpu_adagrad"


class CPULionBuilder(OpBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    NAME = "fused_adam"


class FusedLambBuilder(OpBuilder):
    NAME = "fused_lamb"


class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"


_BUILDERS = (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    UtilsBuilder,
)


def __getattr__(name: str) -> dict[str, bool]:
    """Return COMPATIBLE_OPS, whether each operation is there: asked for at its first use, it loads the library."""
    if name != "COMPATIBLE_OPS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return {one.NAME: one().is_compatible() for one in _BUILDERS}


class aio_handle:
    """Reads and writes of whole CPU tensors, by hf_zero.native.aio.

    Args:
        block_size, ...: The keys of the `aio` block, in DeepSpeed's order and with its defaults.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = Aio(block_size, queue_depth, intra_op_parallelism, single_submit, overlap_events)
        # Direct access needs whole pages; how a transfer is cut changes nothing of what it moves.
        pages = -(-block_size // ALIGNMENT)
        self._queue = AioQueue(dataclasses.replace(self._settings, block_size=pages * ALIGNMENT))
        self._running: list[tuple[int, AioFile]] = []

    def async_pread(self, buffer: torch.Tensor, filename: str | Path, file_offset: int = 0) -> int:
        """Start to fill `buffer`; returns 0."""
        return self._start(buffer, filename, file_offset, write=False)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | Path | int | None = None,
        file_offset: int = 0,
        fd: int | None = None,
    ) -> int:
        """Start to write `buffer`, which must not change before `wait`; returns 0. `fd` is that of an open file."""
        return self._start(buffer, filename if fd is None else fd, file_offset, write=True)

    def wait(self) -> int:
        """Wait for all that was started; returns how many operations that were.

        Raises:
            AioError: One has failed.
        """
        count = len(self._running)
        while self._running:
            ticket, file = self._running.pop(0)
            try:
                self._queue.wait(ticket)
            finally:
                file.close()
        return count

    def sync_pread(self, buffer: torch.Tensor, filename: str | Path, file_offset: int = 0) -> int:
        self.async_pread(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str | Path, file_offset: int = 0) -> int:
        self.async_pwrite(buffer, filename, file_offset)
        return self.wait()

    def read(self, buffer: torch.Tensor, filename: str | Path, validate: bool, file_offset: int = 0) -> int:
        """`sync_pread`: what arrives is always checked for its length."""
        return self.sync_pread(buffer, filename, file_offset)

    def write(self, buffer: torch.Tensor, filename: str | Path, validate: bool, file_offset: int = 0) -> int:
        return self.sync_pwrite(buffer, filename, file_offset)

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        return (self.async_pread if is_async else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        return (self.async_pwrite if is_async else self.sync_pwrite)(buffer, filename, file_offset)

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a 1-D tensor of the example's type in memory that files are transferred to without a detour."""
        return transfer_memory(num_elem * example_tensor.element_size()).view(example_tensor.dtype)[:num_elem]

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Return True: the memory goes with the last reference to it."""
        return True

    def get_block_size(self) -> int:
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        return self._settings.intra_op_parallelism

    def _start(self, buffer: torch.Tensor, filename: str | Path | int | None, offset: int, *, write: bool) -> int:
        if filename is None:
            raise ConfigError("aio_handle: neither the name nor the descriptor of a file was given")
        path = f"/proc/self/fd/{filename}" if isinstance(filename, int) else filename
        file = self._queue.open(path, write=write, create=write)
        transfer = self._queue.write if write else self._queue.read
        self._running.append((transfer(file, buffer, offset), file))
        return 0
