"""A process group for ranks that share a device, which NCCL refuses: collectives go through host memory, over gloo.

A collective waits, in a thread of the group, for the stream that it is called on; there its input is copied to the
host, exchanged, and the output copied back on a stream of the group. `Work.wait` makes the current stream wait for
that. So outputs are late, as NCCL's are; in the time between, whoever reads an output or writes an input is wrong.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NAME = "through_host"


class HostWork(dist.Work):
    """A collective under way. Keeps its tensors until somebody waits."""

    def __init__(self, done: concurrent.futures.Future[torch.Event], tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._done, self._tensors = done, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._done.result().wait(torch.accelerator.current_stream())
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return self._done.done() and bool(self._done.result().query())

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> None:
        return None


class HostGroup(dist.ProcessGroup):
    """One thread and one stream for all collectives, which run in the order of their calls."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = ""
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._device = torch.device(kind.type, torch.accelerator.current_device_index())
        self._stream = torch.Stream(device=self._device)
        self._thread = concurrent.futures.ThreadPoolExecutor(
            1, "through-host", torch.accelerator.set_device_index, (self._device.index,)
        )

    def getBackendName(self) -> str:
        return _NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)  # torch asks once more at the end
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices on which torch puts the bytes of objects."""
        return [torch.device(self._device.type)]

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> HostWork:
        def exchange(mine: torch.Tensor) -> torch.Tensor:
            parts = [torch.empty_like(mine) for _ in range(self.size())]
            self._gloo.allgather([parts], [mine]).wait()
            return torch.cat([part.reshape(-1) for part in parts])

        return self._begin(output, tensor, exchange)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> HostWork:
        def exchange(mine: torch.Tensor) -> torch.Tensor:
            self._gloo.allreduce([mine]).wait()
            return mine.reshape(-1).chunk(self.size())[self.rank()]

        return self._begin(output, tensor, exchange)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> HostWork:
        def exchange(mine: torch.Tensor) -> torch.Tensor:
            got = torch.empty(output.shape, dtype=output.dtype)
            self._gloo.alltoall_base(got, mine, received or [], sent or []).wait()
            return got

        return self._begin(output, tensor, exchange)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> HostWork:  # type: ignore[override]
        def exchange(mine: torch.Tensor) -> torch.Tensor:
            self._gloo.allreduce([mine], opts).wait()
            return mine

        return self._begin(tensors[0], tensors[0], exchange)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> HostWork:  # type: ignore[override]
        def exchange(mine: torch.Tensor) -> torch.Tensor:
            self._gloo.broadcast([mine], opts).wait()
            return mine

        return self._begin(tensors[0], tensors[0], exchange)

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> HostWork:
        """Gather into one tensor, then into those asked for: of objects, for which the host waits anyway."""
        mine = tensors[0].reshape(-1)
        everyone = mine.new_empty(self.size() * mine.numel())
        work = self.all_gather_single(everyone, mine)
        work.wait()
        for output, part in zip(outputs[0], everyone.split(mine.numel()), strict=True):
            output.copy_(part.view(output.shape))
        return work

    def barrier(self, opts: Any = None) -> HostWork:
        number = torch.zeros(1, device=self._device)
        work = self.allreduce([number], dist.AllreduceOptions())
        work.wait()
        number.item()
        return work

    def abort(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def shutdown(self) -> None:
        self.abort()

    def _begin(
        self, output: torch.Tensor, tensor: torch.Tensor, exchange: Callable[[torch.Tensor], torch.Tensor]
    ) -> HostWork:
        """`exchange` takes the input on the host and returns the output there."""
        ready = torch.accelerator.current_stream().record_event()
        tensor, output = tensor.detach(), output.detach()

        def run() -> torch.Event:
            with self._stream:
                ready.wait(self._stream)
                brought = exchange(tensor.cpu())
                output.view(-1).copy_(brought.reshape(-1))
                return self._stream.record_event()

        return HostWork(self._thread.submit(run), [tensor, output])


def register() -> None:
    """Make it the backend of this process's accelerator, instead of the device's own."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    dist.Backend.register_backend(_NAME, HostGroup, devices=[kind.type])
    dist.Backend.default_device_backend_map[kind.type] = _NAME
