"""Values with tensors in them, sent from one rank to another: what the stages of a pipeline exchange.

A message is a header, which says what comes, and the bytes of each tensor. Messages meet by sender and tag, in any
order. They have connections of their own, and threads of their own wait for them: nobody waits for a receiver, and
what is sent while this rank computes arrives meanwhile. What lies on a device goes through the host's memory.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from hf_zero.distributed.engine_group import EngineGroup
from hf_zero.distributed.group_work import HostWork
from hf_zero.distributed.process_group import Link

_HEADER_BYTES = 1024  # of the first message; a longer header has a second one
_LENGTH_BYTES = 4
# Torch's tags of one message: its header, the rest of that, and its tensors.
_REST, _FIRST_TENSOR, MAX_TENSORS = 1, 2, 62
_STEP = 64
MAX_TAG = (1 << 31) // _STEP  # torch has tags of 31 bits
# The types that a header can hold beside tensors
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
TensorType = tuple[tuple[int, ...], torch.dtype]


class UnsendableError(Exception):
    """A value has something in it that cannot be sent. Who asked for it knows where it comes from, and says so."""


class Received:
    """A message that is to come. `wait` gives it."""

    def __init__(self, work: HostWork, box: list[Any], device: torch.device) -> None:
        self._work = work
        self._box = box
        self._device = device

    def wait(self) -> Any:
        """The value, its tensors on the device. Raises what ended the ranks, if they do not go on together."""
        self._work.wait()
        (value,) = self._box
        if self._device.type == "cpu":
            return value
        return pytree.tree_map_only(torch.Tensor, self._on_device, value)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf, as what was received is."""
        return tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)


class Messages:
    """Messages between the ranks of a group. A tag is used for one message on its way between two ranks at a time.

    Args:
        link: Connections of gloo that serve nothing else.
        device: The device to which received tensors go.
    """

    def __init__(self, group: EngineGroup, link: Link, device: torch.device) -> None:
        self._group = group
        self._link = link
        self._device = device
        # Sends end when the receiver has come: a thread beside those that receive waits, so that none of them does.
        self._sends = link.serve(1)
        self._under_way: list[HostWork] = []
        self.sent_bytes = 0  # of tensors, so far

    def send(self, to: int, tag: int, value: Any, what: str) -> None:
        """Start sending a value to a rank. Its tensors may be used, but not changed, until `wait_for_sends`.

        Raises:
            UnsendableError: There is something in it that is neither tensor, number, string nor None, or too much.
        """
        tensors, header = _described(value)
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        self._start(to, tag, [*_header_parts(header), *_tensor_parts(tensors)], what)

    def send_tensors(self, to: int, tag: int, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Start sending tensors to a receiver who knows what comes: see `receive_tensors`."""
        self.sent_bytes += sum(tensor.nbytes for tensor in tensors)
        self._start(to, tag, _tensor_parts(tensors), what)

    def _start(self, to: int, tag: int, parts: list[tuple[int, torch.Tensor]], what: str) -> None:
        if self._group.stopped:
            raise self._group.ended(what)
        try:
            group = self._link.group
            works = [dist.isend(part, group=group, group_dst=to, tag=tag * _STEP + one) for one, part in parts]
        except RuntimeError as error:
            raise self._group.failure(what, error) from error
        wait = functools.partial(_wait_all, works, parts)
        self._under_way = [work for work in self._under_way if work.ended_at is None]
        self._under_way.append(HostWork(self._group, wait, what, link=self._link, jobs=self._sends))

    def receive(self, origin: int, tag: int, what: str) -> Received:
        """Start receiving what a rank sends, or will send, under this tag."""
        return self._receive(functools.partial(_receive, origin=origin, tag=tag), what)

    def receive_tensors(self, origin: int, tag: int, types: Sequence[TensorType], what: str) -> Received:
        """Start receiving what `send_tensors` sends: a list of tensors of these shapes and types."""
        return self._receive(functools.partial(_receive_tensors, origin=origin, tag=tag, types=types), what)

    def _receive(self, call: Callable[[Any], Any], what: str) -> Received:
        box: list[Any] = []
        work = HostWork(self._group, lambda gloo: box.append(call(gloo)), what, link=self._link)
        return Received(work, box, self._device)

    def wait_for_sends(self) -> None:
        """Return when all that was sent has left: its tensors may change."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()


# -------------------------------------------------------------------- what is sent
def _described(value: Any) -> tuple[list[torch.Tensor], bytes]:
    leaves, tree = pytree.tree_flatten(value)
    tensors, marks = list[torch.Tensor](), list[Any]()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            marks.append((tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, _PLAIN):
            marks.append([leaf])
        else:
            raise UnsendableError(
                f"a {type(leaf).__module__}.{type(leaf).__qualname__} cannot be sent to another stage.\n"
                "Expected: tensors, numbers, strings and None, in tuples, lists and dicts."
            )
    if len(tensors) > MAX_TENSORS:
        raise UnsendableError(
            f"{len(tensors)} tensors cannot be sent to another stage: at most {MAX_TENSORS} can. Join some of them "
            "(torch.stack, torch.cat)."
        )
    try:
        return tensors, pickle.dumps((pytree.treespec_dumps(tree), marks))
    except Exception as error:  # whatever a class of the tree raises
        raise UnsendableError(f"a {type(value).__qualname__} cannot be sent to another stage: {error}") from error


def _header_parts(header: bytes) -> list[tuple[int, torch.Tensor]]:
    room = _HEADER_BYTES - _LENGTH_BYTES
    first = (len(header).to_bytes(_LENGTH_BYTES, "little") + header[:room]).ljust(_HEADER_BYTES, b"\0")
    rest = header[room:]
    return [(one, _bytes(data)) for one, data in ((0, first), (_REST, rest)) if data]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tensor_parts(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Return the tensors as bytes on the host: gloo does not know every type."""
    return [
        (number, tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8))
        for number, tensor in enumerate(tensors, _FIRST_TENSOR)
        if tensor.numel()
    ]


def _wait_all(works: Sequence[Any], parts: Sequence[Any], group: Any) -> None:
    """`parts` are kept until then."""
    for work in works:
        work.wait()


# -------------------------------------------------------------------- what is received, in a thread
def _receive(group: Any, *, origin: int, tag: int) -> Any:
    first = _receive_bytes(group, origin, tag * _STEP, _HEADER_BYTES)
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    header = first[_LENGTH_BYTES:][:length]
    if len(header) < length:
        header += _receive_bytes(group, origin, tag * _STEP + _REST, length - len(header))
    tree, marks = pickle.loads(header)
    types = [(mark[0], mark[1]) for mark in marks if isinstance(mark, tuple)]
    tensors = iter(_receive_tensors(group, origin=origin, tag=tag, types=types))
    leaves = [next(tensors).requires_grad_(mark[2]) if isinstance(mark, tuple) else mark[0] for mark in marks]
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(tree))


def _receive_bytes(group: Any, origin: int, tag: int, size: int) -> bytes:
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    work: Any = dist.irecv(data, group=group, group_src=origin, tag=tag)
    work.wait()
    return data.numpy().tobytes()


def _receive_tensors(group: Any, *, origin: int, tag: int, types: Sequence[TensorType]) -> list[torch.Tensor]:
    tensors = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in types]
    works: list[Any] = [
        dist.irecv(tensor.view(-1).view(torch.uint8), group=group, group_src=origin, tag=tag * _STEP + number)
        for number, tensor in enumerate(tensors, _FIRST_TENSOR)
        if tensor.numel()
    ]
    for work in works:
        work.wait()
    return tensors
