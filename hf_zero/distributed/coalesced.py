"""Collectives that become one operation of the backend: one launch, one kernel and one thing to wait for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch

from hf_zero.distributed.work import Finish, Pending

# Starts the operation of a kind: (kind, outputs, inputs)
Begin = Callable[[str, list[torch.Tensor], list[torch.Tensor]], Pending]


class Coalesced:
    """The operations that one `Comm.coalesced` block has collected, one of each kind.

    A collective that is waited for inside the block starts what was collected of its kind; the next one begins another
    operation.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._operations: dict[Hashable, _Operation] = {}

    def joins(self, kind: str, tensor: torch.Tensor) -> bool:
        """Whether a collective that is added now becomes part of an operation that others have begun."""
        operation = self._operations.get(_key(kind, tensor))
        return operation is not None and not operation.has_started

    def add(self, kind: str, output: torch.Tensor, tensor: torch.Tensor, finish: Finish = None) -> Pending:
        """Collect one; `finish` runs after it, when it is waited for."""
        if not self.joins(kind, tensor):
            self._operations[_key(kind, tensor)] = _Operation(functools.partial(self._begin, kind))
        operation = self._operations[_key(kind, tensor)]
        operation.add(output, tensor)
        return _Member(operation, finish)

    def start(self) -> None:
        """The block is over."""
        for operation in self._operations.values():
            operation.start()

    def drop(self) -> None:
        """The block was left by an error: what was collected never starts."""
        for operation in self._operations.values():
            operation.drop()


def _key(kind: str, tensor: torch.Tensor) -> Hashable:
    """Return what decides the operation: NCCL groups any gathers and reduce-scatters, but all-reduces of one type."""
    return kind, tensor.dtype if kind == "all_reduce" else None


class _Operation:
    """Collectives of one kind, until they start and while they are under way."""

    def __init__(self, begin: Callable[[list[torch.Tensor], list[torch.Tensor]], Pending]) -> None:
        self._begin: Callable[[list[torch.Tensor], list[torch.Tensor]], Pending] | None = begin
        self._outputs: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor] = []
        self._pending: Pending | None = None

    @property
    def has_started(self) -> bool:
        return self._begin is None

    def add(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._outputs.append(output)
        self._inputs.append(tensor)

    def start(self) -> None:
        if self._begin is not None:
            begin, outputs, inputs = self._begin, self._outputs, self._inputs
            self.drop()
            self._pending = begin(outputs, inputs)

    def drop(self) -> None:
        self._begin, self._outputs, self._inputs = None, [], []

    def wait(self) -> None:
        self.start()
        if self._pending is None:
            raise AssertionError("a collective was waited for that an error has kept from its start")
        self._pending.wait()


class _Member:
    """One collective of an operation. `wait` may be called again."""

    def __init__(self, operation: _Operation, finish: Finish) -> None:
        self._operation: _Operation | None = operation
        self._finish = finish

    def wait(self) -> None:
        if self._operation is None:
            return
        self._operation.wait()
        self._operation = None
        if self._finish is not None:
            self._finish()
            self._finish = None
