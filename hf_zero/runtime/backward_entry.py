"""Finds the layers that a backward enters otherwise than through what they returned.

[Note: Entering a layer]
A hook on what a layer returned gathers it in backward. A loss may come from inside: from an activation that a forward
hook has kept, or that the layer put into a list or an object. Then no hook fires before the layer's weights are read.
So before a backward its graph is looked through, from the loss to the nearest outputs of layers; the first time that
layers are called in some order, all of it. A layer that is reached while none of its outputs is, is gathered at the
start and held to the end. One that returned nothing with a gradient stays unsharded from its forward on.
Autograd runs the nodes made last first. So where an output is reached too, it comes before whatever lies inside.
A backward inside a backward (of a function that keeps a graph of its own) is looked through too, where it runs in the
thread of the forward: nodes have numbers by thread, and a recomputed graph is none of the forward's. On an accelerator
autograd has threads of its own.
"""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hf_zero.errors import StateError
from hf_zero.runtime.autograd_graph import next_node, nodes_since
from hf_zero.runtime.nested import tensors_in
from hf_zero.sharding.unit import ShardUnit, UnitState


class Call:
    """A call of a unit's module, from forward to backward. It lives as long as hooks on what it returned."""

    __slots__ = ("__weakref__", "end", "first", "returned", "saved", "unit")

    def __init__(self, unit: ShardUnit) -> None:
        self.unit = unit
        self.first = next_node()  # that it makes
        self.end = 0  # the first node after it
        self.returned: list[int] = []  # the nodes of what it returned
        self.saved: list[int] = []  # how many views of the unit's memory its graph keeps, by flat parameter

    def over(self, output: Any) -> list[torch.Tensor]:
        """The forward has ended with `output`. Returns the tensors there that have a gradient."""
        self.end = next_node()
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self.returned = [tensor.grad_fn._sequence_nr() for tensor in tensors if tensor.grad_fn is not None]
        return tensors


class BackwardEntries:
    """Looks at the graphs of one model's backwards before they run.

    Args:
        enter: Gathers a unit and holds it until the end of backward. All ranks call it, for the same units.
    """

    def __init__(self, enter: Callable[[ShardUnit], None]) -> None:
        self._enter = enter
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._known: dict[tuple[int, ...], list[ShardUnit]] = {}  # found in all of a graph, by the order of calls
        self._thread = 0  # that of the forward
        _watchers.add(self)
        _watch()

    def remove(self) -> None:
        _watchers.discard(self)
        _watch()

    def add(self, call: Call) -> None:
        """The forward of `call` has ended."""
        self._thread = threading.get_ident()
        if call.returned:
            self._calls.add(call)
        elif call.end != call.first:
            self._enter(call.unit)  # which is unsharded

    def before_backward(self, roots: Iterable[Any]) -> None:
        """Enter the units that the backward of `roots`, tensors or edges, reaches from inside."""
        calls = self._in_order()
        is_inner = torch._C._current_graph_task_id() != -1
        if not calls or (is_inner and self._thread != threading.get_ident()):
            return
        nodes = [root.node if isinstance(root, torch.autograd.graph.GradientEdge) else root.grad_fn for root in roots]
        key = (is_inner, *(id(call.unit) for call in calls))
        if key not in self._known:
            self._known[key] = _reached_inside(nodes, calls, through=True)
        for unit in dict.fromkeys([*self._known[key], *_reached_inside(nodes, calls, through=False)]):
            self._enter(unit)

    def _in_order(self) -> list[Call]:
        return sorted(self._calls, key=lambda call: call.first)

    def unit_names(self) -> list[str]:
        """The units that are sharded."""
        units = dict.fromkeys(call.unit for call in self._in_order())
        return [unit.name for unit in units if unit.state is UnitState.SHARDED]


def _reached_inside(roots: Iterable[Any], calls: Sequence[Call], *, through: bool) -> list[ShardUnit]:
    """The units of calls that have a node on the way from `roots`, and no output there.

    `through`: Go on above outputs.
    """
    returned = {number: call for call in calls for number in call.returned}
    firsts, last = [call.first for call in calls], max(call.end for call in calls)
    reached, noticed = set[Call](), set[Call]()
    for node in nodes_since(firsts[0], roots, up_to=frozenset() if through else returned.keys()):
        number = node._sequence_nr()
        if number in returned:
            noticed.add(returned[number])
        elif number < last:
            at = bisect.bisect(firsts, number) - 1
            while at >= 0 and number >= calls[at].end:
                at -= 1
            if at >= 0:
                reached.add(calls[at])
    return [call.unit for call in calls if call in reached and call not in noticed]


_watchers: weakref.WeakSet[BackwardEntries] = weakref.WeakSet()
_FREED = ("out of bounds for storage of size 0", "data is not allocated yet")  # what torch says of freed memory
_NAME = "_engine_run_backward"
_plain_backward: Callable[..., Any] = vars(torch.autograd.graph)[_NAME]


def _watch() -> None:
    """Let torch call us before a backward, as long as anybody watches."""
    function = _watched_backward if _watchers else _plain_backward
    for module in (torch.autograd, torch.autograd.graph):  # the first has imported it from the second
        if vars(module)[_NAME] in (_plain_backward, _watched_backward):  # else somebody has wrapped ours
            setattr(module, _NAME, function)


def _watched_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _plain_backward(roots, *args, **kwargs)
    watchers = list(_watchers)
    for watcher in watchers:
        watcher.before_backward(roots)
    try:
        return _plain_backward(roots, *args, **kwargs)
    except RuntimeError as error:
        if not any(text in str(error) for text in _FREED):
            raise
        names = [name for watcher in watchers for name in watcher.unit_names()]
        raise StateError(
            "backward needed a weight of a layer that is sharded, through something that the layer made and did not "
            f"return. One of these: {', '.join(names[:5])} ({len(names)} in all).\nReturn it from the layer's "
            "forward, call backward in the thread of the forward, or run both inside "
            "`with hf_zero.gathered_params(model):`."
        ) from error
