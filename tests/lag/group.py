"""The process group of the lag device: what NCCL is to CUDA, over gloo.

A collective is a task of the group's own stream, which waits for the stream that the collective is called on. Until
the task has run the output is 0xFF; `Work.wait` makes the current stream wait, returns at once, and never raises.
Under a random schedule all ranks must have the same seed: a task that runs waits for the other ranks' ones.
"""

from __future__ import annotations

import atexit
import functools
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tests.lag import device

NAME = "lag"
_STALL_S = 1.0  # without a call of the device: then the host waits for something else


class LagWork(dist.Work):
    """A collective under way. Its group keeps it, and it its tensors, until somebody waits, as with NCCL's."""

    def __init__(self, group: LagGroup, event: torch.Event, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = event, tensors
        self._under_way = group.under_way
        self._under_way[id(self)] = self

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._event.wait(torch.accelerator.current_stream())
        self._tensors = []
        self._under_way.pop(id(self), None)
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None


class LagGroup(dist.ProcessGroup):
    """One stream for all collectives of the group.

    As on NCCL, coalesced collectives are one task with one Work, whatever their types; all-reduces are of one type.
    """

    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        self.under_way: dict[int, LagWork] = {}  # nobody has waited for them
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)  # torch asks once more at the end
        return self._name

    @functools.cached_property
    def _stream(self) -> torch.Stream:
        """Return a stream of the device that is the current one at the first collective: a group may be
        made before.
        """
        return torch.Stream(device=torch.device(device.NAME, torch.accelerator.current_device_index()))

    @property
    def _device_types(self) -> list[torch.device]:
        """Return where torch puts the bytes of objects."""
        return [torch.device(device.NAME)]

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> LagWork:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> LagWork:
        return self._begin("all_gather", outputs, tensors)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> LagWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any
    ) -> LagWork:
        return self._begin("reduce_scatter", outputs, tensors, opts)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> LagWork:
        return self._begin("all_to_all", output, tensor, received, sent)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> LagWork:
        return self._begin("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> LagWork:
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise TypeError("Tensors must have identical type")
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> LagWork:
        return self._begin("broadcast", tensors[0], opts)

    def allgather(self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], opts: Any = None) -> LagWork:
        """Gather into one tensor, then into those asked for: of objects, for which the host waits anyway."""
        mine = tensors[0].reshape(-1)
        everyone = mine.new_empty(self.size() * mine.numel())
        work = self._begin("all_gather", [everyone], [mine])
        work.wait()
        for output, part in zip(outputs[0], everyone.split(mine.numel()), strict=True):
            output.copy_(part.view(output.shape))
        return work

    def barrier(self, opts: Any = None) -> LagWork:
        number = torch.zeros(1, device=self._stream.device)
        work = self._begin("all_reduce", [number], dist.AllreduceOptions())
        work.wait()
        number.item()
        return work

    def abort(self) -> None:
        """Drop what has not run. Its outputs stay what they are, and nobody who waits is told."""
        device.library().drop_tasks(self._gloo, self._stream.device_index, self._stream.stream_id)
        self.under_way.clear()

    def shutdown(self) -> None:
        self.abort()

    def _begin(self, name: str, *arguments: Any) -> LagWork:
        tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        wrong = [tensor.device for tensor in tensors if tensor.device != self._stream.device]
        if wrong:  # as on NCCL where a process has not chosen its device
            raise ValueError(f"{name}: the group computes on {self._stream.device}, and a tensor is on {wrong[0]}")
        getattr(device.library(), name)(self._gloo, self._stream.stream_id, *arguments)
        return LagWork(self, self._stream.record_event(), tensors)


def register() -> None:
    """Make it the backend that torch takes for the lag device, which goes on by itself where all ranks wait."""
    dist.Backend.register_backend(NAME, LagGroup, devices=[device.NAME])
    over = threading.Event()
    thread = threading.Thread(target=_let_it_run, args=(over,), name="lag-device", daemon=True)
    thread.start()
    atexit.register(lambda: (over.set(), thread.join()))  # Python must not end inside of a call of the library


def _let_it_run(over: threading.Event) -> None:
    calls = 0
    while not over.wait(_STALL_S):
        calls = device.library().let_a_stalled_device_run(calls)
