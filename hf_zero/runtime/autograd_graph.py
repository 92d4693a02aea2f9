"""Reads the graph that autograd makes.

Nodes have numbers, given in the order in which a thread makes them: torch.autograd._get_sequence_nr() is the next one.
So the nodes that a forward makes are those of a range.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_zero.runtime.nested import tensors_in
from hf_zero.sharding.unit import ShardUnit

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


def nodes_since(first: int, roots: Iterable[Any], up_to: Collection[int] = ()) -> Iterator[Any]:
    """The nodes that lead to `roots` (nodes too) and were made from number `first` on, each once.

    Nothing that leads to one of `up_to` only.
    """
    left = [root for root in roots if root is not None]
    seen = set(left)
    while left:
        node = left.pop()
        number = node._sequence_nr()
        if number < first:
            continue
        yield node
        if number in up_to:
            continue
        for above, _ in node.next_functions:
            if above is not None and above not in seen:
                seen.add(above)
                left.append(above)


class SavedViews:
    """Counts the views of one unit's unsharded memory that graphs keep for backward. See [Note: Whose memory].

    A view that a node saves cannot be told from one that the user keeps by counting alone. So the nodes of a call are
    looked through, once for every number of nodes and views that is met.
    """

    def __init__(self, unit: ShardUnit) -> None:
        self._flats = [flat for flat in unit.flats if flat.on_demand]
        self._known: set[tuple[int, ...]] = set()

    def note(self, output: Any, first: int) -> list[int]:
        """A call has ended whose nodes begin with `first`. Returns how much its graph has saved, by flat parameter."""
        saved = [flat.uses() - flat.in_graphs for flat in self._flats]
        key = (next_node() - first, *saved)
        if key not in self._known:
            if [len(views) for views in self._look(output, first)] != saved:
                return []  # somebody else keeps a view
            self._known.add(key)
        for flat, views in zip(self._flats, saved, strict=True):
            flat.in_graphs += views
        return saved

    def release(self, saved: list[int]) -> None:
        """Backward goes through the graph of a call for the last time."""
        for flat, views in zip(self._flats, saved, strict=True):
            flat.in_graphs -= views

    def _look(self, output: Any, first: int) -> list[set[int]]:
        """Return, by flat parameter, the views that the graph of `output` has saved and nobody else refers to."""
        found: dict[int, set[int]] = {flat.storage._cdata: set() for flat in self._flats}
        kept = []  # so that no id is used again
        for node in nodes_since(first, [tensor.grad_fn for tensor in tensors_in(output)]):
            for tensor in _saved_by(node):
                mine = found.get(tensor.untyped_storage()._cdata)
                if mine is not None and id(tensor) not in mine and not isinstance(tensor, nn.Parameter):
                    if sys.getrefcount(tensor) <= _references_to_saved():
                        mine.add(id(tensor))
                    kept.append(tensor)
        return list(found.values())


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node has saved, without the hooks that would compute them again."""
    for name in _saved_names(node.__class__):
        saved = getattr(node, name)
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            if isinstance(one.data, torch.Tensor) and one.data.layout is torch.strided:  # others have no one storage
                yield one.data


@functools.cache
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


@functools.cache
def _references_to_saved() -> int:
    """Python's count of references to a tensor that a node has saved and a loop names."""
    weight = torch.zeros(1, 1).t()
    node = (torch.zeros(1, 1, requires_grad=True) * weight).grad_fn  # no operation that profilers count
    del weight
    return max(sys.getrefcount(tensor) for tensor in _saved_by(node))
