"""Counts the bytes behind the tensors that code makes, on the meta device or any other, as they come and go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_zero.extras.estimate.meta_results import MetaResults


class StorageTracker(TorchDispatchMode):
    """Counts every storage that an operation in the `with` block returns, from there until its last use.

    Shared memory counts once. What existed before is to be given to `ignore` (never counts) or `hold` (counts while
    it lives), because a view of it would look new.
    """

    _results = MetaResults()  # of all trackers: plans of one model ask for the same sizes

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._known: dict[int, list[Any]] = {}  # key -> [weak reference, bytes]
        self._ignored: dict[int, Any] = {}  # kept alive: an address must not come back as another storage

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._ignored[storage._cdata] = storage

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._count(tensor)

    def refresh(self) -> None:
        """Look at the sizes again: a storage may have been resized, which is no operation."""
        for entry in self._known.values():
            storage = entry[0]()
            if storage is not None:
                self.live += storage.nbytes() - entry[1]
                entry[1] = storage.nbytes()

    def restart_peak(self) -> int:
        """The peak since the last call, or the start."""
        peak, self.peak = self.peak, self.live
        return peak

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it would cost more than the operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._results.call(func, args, kwargs or {})
        self._count_all(result)
        return result

    def _count_all(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self._count(result)
        elif isinstance(result, (tuple, list)):
            for one in result:
                self._count_all(one)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._ignored or not nbytes:
            return

        def gone(_: Any) -> None:
            self.live -= self._known.pop(key)[1]

        self._known[key] = [weakref.ref(storage, gone), nbytes]
        self.live += nbytes
        self.peak = max(self.peak, self.live)
