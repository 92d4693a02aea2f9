"""A device without values, `dry:0`, beside real memory of the host: what the host waits for is recorded.

No GPU is needed, and torch's CPU wheel does (fake tensors on "cuda" would need one with CUDA). Tensors on the device
have shapes, types and storages, as torch's FakeTensorMode makes them. Tensors of the host are ordinary ones: stores,
disks, native updates and threads do what they always do. Every operation passes through `DryDevice`:

- A value of the device that the host reads (`item`, `bool`, `float`, `tolist`), and a copy between the two that is not
  `non_blocking`, make the host wait for the stream, as an event or a device that is synchronized does. Copies that are
  `non_blocking` are taken for asynchronous, as they are from and to pinned memory.
- A tensor on the device of a type that `lacks` names raises `TypeError`, as of fp64 on Apple's.
- An operation over tensors of both raises `MixedDevicesError`, with CUDA's exceptions: a number (0-dim) of the host
  beside a tensor, not in a list of tensors.

Values that come from the device are ones. There is no time, and no order of streams. What is replaced of torch stays
replaced: use it in a process of its own (`run_ranks`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hf_zero.distributed.comm import Comm
from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.operation_log import OperationLog
from hf_zero.distributed.work import Finish, Pending
from hf_zero.extras.estimate.pretend import Ended
from hf_zero.runtime.param_grads import GradStandIn

NAME = "dry"
ROOT = Path(__file__).resolve().parents[2]
# Waits for the device in here do not stop the training.
_BESIDE = "hf_zero-update"
_LISTS = ("_foreach_", "_fused_")
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default)


class MixedDevicesError(RuntimeError):
    """Tensors of host and device in one operation."""


class DryDevice(TorchDispatchMode):
    """The device `dry:0` is there while this is entered. Invariant: no FakeTensor is on the CPU.

    `waits`: by (place, kind), how often the host has waited. A place is the innermost function of hf_zero, or "" where
    none is on the stack; kinds are "value", "to host", "to device", "event", "stream" and "device".
    """

    def __init__(self, lacks: Sequence[torch.dtype] = ()) -> None:
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()
        self._lacks = tuple(lacks)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> DryDevice:
        _replace_what_asks_for_a_device(self)
        self._entered.enter_context(self._fake)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def wait(self, kind: str) -> None:
        """The host waits for the device."""
        if threading.current_thread().name != _BESIDE:
            self.waits[_place(), kind] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self._dispatch(func, args, kwargs or {})
        for one in pytree.tree_leaves(made):
            if isinstance(one, FakeTensor) and one.dtype in self._lacks:
                raise TypeError(f"{_place()}: {func}: {NAME} has no {one.dtype}")
        return made

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves = pytree.arg_tree_leaves(*args, **kwargs)
        ours = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        if not ours and not any(isinstance(leaf, torch.device) and leaf.type == NAME for leaf in leaves):
            with _disable_current_modes():
                return func(*args, **kwargs)
        hosts = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default:
            self.wait("value")
            return _numbers((), ours[0].dtype)
        if func is torch.ops.aten._to_copy.default:
            return self._to(func, *args, **kwargs)
        if func is torch.ops.aten.copy_.default and hosts:
            return self._copy(*args, **kwargs)
        if ours and str(kwargs.get("device")) == "cpu":
            raise AssertionError(f"{_place()}: {func} would make a tensor of the host without values")
        if ours and hosts:
            self._refuse_mixed(func, hosts, args)
        return func(*args, **kwargs)

    def _to(self, func: Any, source: torch.Tensor, **options: Any) -> torch.Tensor:
        """Tensor.to, cpu, float, ..."""
        device = options.get("device") or source.device
        if device.type == source.device.type:
            return func(source, **options)
        if not options.get("non_blocking"):
            self.wait("to device" if device.type == NAME else "to host")
        dtype = options.get("dtype") or source.dtype
        if device.type == "cpu":
            return _ones(source.shape, dtype)
        return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        to_host = isinstance(source, FakeTensor)
        if not non_blocking:
            self.wait("to host" if to_host else "to device")
        if to_host:
            with _disable_current_modes():
                target.fill_(1)
        return target

    def _refuse_mixed(self, func: Any, hosts: Sequence[torch.Tensor], args: Any) -> None:
        if func in _INDEXING:  # indices may be on the host
            self.wait("to device")
            return
        listed: list[Any] = []
        if func.__name__.startswith(_LISTS):
            listed = [one for arg in args if isinstance(arg, list | tuple) for one in arg]
        if any(one.dim() or any(one is other for other in listed) for one in hosts):
            shapes = [
                f"{tuple(one.shape)} on {one.device}" for one in pytree.arg_tree_leaves(*args) if _is_tensor(one)
            ]
            raise MixedDevicesError(f"{_place()}: {func} of {', '.join(shapes)}")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _ones(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    with _disable_current_modes():
        return torch.ones(shape, dtype=dtype, device="cpu")


def _numbers(shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Return ones of Python, in lists of lists."""
    with _disable_current_modes():
        return torch.ones(shape, dtype=dtype, device="cpu").tolist()


def _place() -> str:
    """ "runtime/hooks.py:hook": where hf_zero has asked for what happens now."""
    frame = sys._getframe(1)
    package = str(ROOT / "hf_zero") + "/"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(package):
            return f"{file.removeprefix(package)}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


# -------------------------------------------------------------------- what torch asks CUDA for
def _replace_what_asks_for_a_device(device: DryDevice) -> None:
    """A fake tensor has no address, and the device neither streams nor events."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME)
    FakeTensor.data_ptr = _address  # type: ignore[method-assign]
    FakeTensor.tolist = lambda tensor: _tolist(device, tensor)  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    torch.Stream = lambda *_, **__: _Stream(device)  # type: ignore[assignment,misc]
    torch.Event = lambda *_, **__: _Event(device)  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = lambda *_: _Stream(device)  # type: ignore[assignment]
    torch.accelerator.set_device_index = lambda index: None
    for module in (torch.accelerator, torch.cuda):
        module.synchronize = lambda *_: device.wait("device")  # type: ignore[attr-defined]
    torch.accelerator.memory.memory_stats = lambda *_: {}  # type: ignore[assignment]
    torch.accelerator.reset_peak_memory_stats = lambda *_: None  # type: ignore[assignment]
    torch.tensor = functools.partial(_tensor, torch.tensor)  # type: ignore[assignment]
    GradStandIn.__new__ = staticmethod(_stand_in)  # type: ignore[method-assign,assignment]


def _address(tensor: torch.Tensor) -> int:
    """Different where tensors are, as an address is; 0 where there is no memory."""
    storage = tensor.untyped_storage()
    return storage._cdata + tensor.storage_offset() * tensor.element_size() if storage.nbytes() else 0


def _tolist(device: DryDevice, tensor: torch.Tensor) -> Any:
    device.wait("value")
    return _numbers(tensor.shape, tensor.dtype)


def _tensor(on_host: Callable[..., torch.Tensor], data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """torch.tensor: made on the host, then copied."""
    made = on_host(data, device="cpu", **options)
    return made if device is None else made.to(device)


def _stand_in(cls: type[GradStandIn], placeholder: torch.Tensor, name: str) -> GradStandIn:
    """Torch makes no subclass over the memory of a fake tensor."""
    made: GradStandIn = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls, placeholder.shape, placeholder.stride(), dtype=placeholder.dtype, device=placeholder.device
    )
    made.parameter, made.added = name, None
    return made


class _Stream:
    def __init__(self, device: DryDevice) -> None:
        self._device = device

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None:
        self._device.wait("stream")


class _Event:
    def __init__(self, device: DryDevice) -> None:
        self._device = device

    def record(self, stream: _Stream) -> None: ...

    def wait(self, stream: _Stream) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return 0.0

    def synchronize(self) -> None:
        self._device.wait("event")


# -------------------------------------------------------------------- the other ranks
class DryComm(Comm):
    """One of several ranks on devices, over NCCL. Collectives are over at once; what goes over gloo brings from every
    rank what this one has sent."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._place = (rank, world_size)
        super().__init__(torch.device(NAME, 0))

    def _join(self, group: Any) -> None:
        self.rank, self.world_size = self._place
        self.backend, self.coalesces = "nccl", True
        self._processes = _DryGroup(*self._place)

    def _begin(self, call: Callable[..., Any], what: str, finish: Finish = None) -> Pending:
        for tensor in pytree.tree_leaves(getattr(call, "args", ())):
            if _is_tensor(tensor) and tensor.device.type != NAME:
                raise MixedDevicesError(f"{what}: NCCL was given a tensor on {tensor.device}")
        return Ended(finish)

    def _exchange(
        self,
        places: Sequence[torch.Tensor],
        parts: Sequence[torch.Tensor],
        what: str,
        finish: Finish = None,
        tag: int | None = None,
    ) -> Pending:
        for place, part in zip(places, parts, strict=True):
            if place.device.type != "cpu" or part.device.type != "cpu":
                raise MixedDevicesError(f"{what}: gloo was given a tensor on {NAME}")
            place.copy_(part)
        return Ended(finish)

    def _combine(self, values: torch.Tensor, largest: int, what: str) -> None:
        """See Comm: every rank gives what this one does."""
        if values.device.type != "cpu":
            raise MixedDevicesError(f"{what}: gloo was given a tensor on {NAME}")
        values[: len(values) - largest] *= self.world_size


class _DryGroup(EngineGroup):
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.name = ""
        self.log = OperationLog()
        self._disconnected = threading.Event()
        self.link = self.control = None
