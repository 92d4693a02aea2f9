"""`get_accelerator()`: DeepSpeed's questions about the device, answered by torch.accelerator."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from hf_zero.native.machine import memory_bytes

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class Accelerator:
    """The accelerator of this process, or the CPU where there is none. Thin: every answer is torch's."""

    def __init__(self) -> None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if device is None else device.type
        self._module: Any = torch.get_device_module(self._name)
        self._random: Any = torch if self._name == "cpu" else self._module

    # ---------------------------------------------------------------- devices
    def device_name(self, device_index: int | None = None) -> str:
        """Return a name that torch.device takes: "cuda", "cuda:1", "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def is_available(self) -> bool:
        """Whether tensors can be put on it: always, on the CPU."""
        return self._name == "cpu" or torch.accelerator.is_available()

    def device_count(self) -> int:
        """Return the number of devices that this process sees, or without any of processes of this node."""
        if self._name == "cpu":
            return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return torch.accelerator.device_count()

    def current_device(self) -> int | str:
        """Return the index of the device in use; "cpu" without an accelerator."""
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return the name of the device in use: "cuda:0", "cpu"."""
        return "cpu" if self._name == "cpu" else self.device_name(torch.accelerator.current_device_index())

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for its tensors: nccl, gloo, ..."""
        return torch.distributed.get_default_backend_for_device(self._name)

    # ---------------------------------------------------------------- time and memory
    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            torch.accelerator.synchronize(self.device_name(device_index))

    def empty_cache(self) -> None:
        if self._name != "cpu":
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes in tensors; 0 without an accelerator, and so for the next ones."""
        return self._bytes("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._bytes("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes("max_memory_reserved", device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of memory of the device, or of the host without an accelerator."""
        if self._name == "cpu":
            return memory_bytes()
        return torch.accelerator.get_memory_info(device_index)[1]

    def _bytes(self, name: str, device_index: int | None) -> int:
        return 0 if self._name == "cpu" else int(getattr(self._module, name)(device_index))

    # ---------------------------------------------------------------- random numbers
    def random(self) -> Any:
        """Return torch's module of random numbers."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the device in use."""
        self._random.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        if self._name == "cpu":
            torch.manual_seed(seed)
        else:
            self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(self._random.initial_seed())

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        state: torch.Tensor = self._random.get_rng_state(*self._index(device_index))
        return state

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._random.set_rng_state(new_state, *self._index(device_index))

    def _index(self, device_index: int | None) -> tuple[int, ...]:
        """Return the index as arguments: the device in use is torch's default, and the CPU has no index."""
        return () if device_index is None or self._name == "cpu" else (device_index,)

    # ---------------------------------------------------------------- types
    def __getattr__(self, name: str) -> Any:
        """Return the function that makes tensors on the device, as FloatTensor([1, 2])."""
        if name not in _TENSORS:
            raise AttributeError(f"get_accelerator() has no {name}")
        return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float32, torch.float16, *bf16]

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in page-locked memory, where there is an accelerator to copy to; else `tensor`."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._name != "cpu" and tensor.is_pinned()


@functools.cache
def get_accelerator() -> Accelerator:
    """DeepSpeed's `get_accelerator()`: one object per process."""
    return Accelerator()
