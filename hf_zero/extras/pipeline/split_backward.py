"""A backward in two halves: gradients of inputs first, those of weights when there is time (arXiv:2401.10241).

A node of the graph lies on the path of the inputs where a gradient goes through it to one of them. Weights come in at
such nodes, from the side: nn.Linear's x W^T gives a gradient to x and one to W. The first half runs the path alone,
and keeps what enters those nodes. The second half starts there, for each node or for those that share a weight.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[torch.Tensor | None, ...]


def can_split(
    outputs: Sequence[GradientEdge], weights: Sequence[torch.Tensor], apart_from: type[torch.autograd.Function]
) -> bool:
    """Whether a backward in two halves does what a whole one does.

    A function of Python, a compiled layer too, may compute both gradients at once: it would run twice, and may have
    changed what it has saved. A reentrant checkpoint takes no part in halves. Hooks behind a parameter's gradient, of
    which one is the runtime's, would not be called.

    Args:
        apart_from: Nodes of this function are no obstacle.
    """
    if any(len(getattr(weight, "_post_accumulate_grad_hooks", None) or ()) > 1 for weight in weights):
        return False
    nodes: list[Any] = list(_users_of([edge.node for edge in outputs]))
    return all(isinstance(node, apart_from._backward_cls) for node in nodes if isinstance(node, BackwardCFunction))


@dataclass
class _Entrance:
    """Nodes on the path of the inputs through which some weights come in, and what has entered them."""

    weights: list[int]  # their numbers
    nodes: list[Node]
    entered: dict[Node, Grads] = field(default_factory=dict)


class SplitBackward:
    """The backward of one graph in two halves. The graph is kept until both are over.

    Args:
        outputs: Of the graph, with the gradient that each gets.
        weights: Leaves that may be in it.
    """

    def __init__(
        self, outputs: Sequence[GradientEdge], grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
    ) -> None:
        self._outputs = outputs
        self._grads = grads
        self._edges = [get_gradient_edge(weight) for weight in weights]
        self._entrances: list[_Entrance] = []
        self._beside: dict[int, torch.Tensor | None] = {}  # gradients of weights that do not come in from the side

    def of_inputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The first half: gradients of `inputs`, leaves. Hooks on tensors run here."""
        users = _users_of([edge.node for edge in self._outputs])
        path = _above([get_gradient_edge(one).node for one in inputs], users)
        beside = self._find_entrances(users, path)
        handles = [
            node.register_prehook(_keep(entrance, node)) for entrance in self._entrances for node in entrance.nodes
        ]
        try:
            to: list[Any] = [*inputs, *(self._edges[number] for number in beside)]
            grads: Sequence[Any] = torch.autograd.grad(
                list(self._outputs),
                to,
                list(self._grads),
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        self._beside = dict(zip(beside, grads[len(inputs) :], strict=True))
        self._outputs, self._grads = (), ()
        return list(grads[: len(inputs)])

    def of_weights(self) -> list[torch.Tensor | None]:
        """The second half: gradients of the weights. Hooks on parameters do not run."""
        found = self._beside
        for entrance in self._entrances:
            grads = _through(entrance, [self._edges[number] for number in entrance.weights])
            found.update(zip(entrance.weights, grads, strict=True))
        self._entrances.clear()
        return [found.get(number) for number in range(len(self._edges))]

    def _find_entrances(self, users: dict[Node, list[Node]], path: set[Node]) -> list[int]:
        """Find the entrances of weights that come in at the path; return the numbers of the graph's other weights."""
        beside = []
        by_node: dict[Node, _Entrance] = {}
        for number, edge in enumerate(self._edges):
            if edge.node not in users:
                continue
            sides = _above([edge.node], users, stop_at=path)
            entered = [node for node in sides if node in path]
            if any(node not in path and not users[node] for node in sides) or not entered:
                beside.append(number)  # it is on a way to an output that no input is on
                continue
            joined = list({id(one): one for node in entered if (one := by_node.get(node)) is not None}.values())
            entrance = _Entrance([number], entered)
            for other in joined:
                entrance.weights += other.weights
                entrance.nodes += [node for node in other.nodes if node not in entrance.nodes]
            by_node.update(dict.fromkeys(entrance.nodes, entrance))
        self._entrances = list({id(one): one for one in by_node.values()}.values())
        return beside


def _users_of(outputs: Sequence[Node]) -> dict[Node, list[Node]]:
    """All nodes of a graph, and for each the nodes that hand it a gradient."""
    users: dict[Node, list[Node]] = {node: [] for node in outputs}
    left = collections.deque(users)
    while left:
        node = left.popleft()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in users:
                users[following] = []
                left.append(following)
            users[following].append(node)
    return users


def _above(starts: Sequence[Node], users: dict[Node, list[Node]], stop_at: set[Node] | None = None) -> set[Node]:
    """`starts` and what hands them gradients; of what is in `stop_at` not further."""
    found = {node for node in starts if node in users}
    left = collections.deque(found)
    while left:
        node = left.popleft()
        if stop_at is not None and node in stop_at:
            continue
        for user in users[node]:
            if user not in found:
                found.add(user)
                left.append(user)
    return found


def _keep(entrance: _Entrance, node: Node) -> Any:
    def hook(grads: Grads) -> None:
        entrance.entered[node] = grads

    return hook


def _through(entrance: _Entrance, weights: Sequence[GradientEdge]) -> Sequence[torch.Tensor | None]:
    """Compute the gradients of weights from the gradients that have entered the nodes next to them."""
    edges: list[GradientEdge] = []
    values: list[torch.Tensor] = []
    for node, grads in entrance.entered.items():
        for number, grad in enumerate(grads):
            if grad is not None:
                edges.append(GradientEdge(node, number))
                values.append(grad)
    if not edges:
        return [None] * len(weights)
    # One of these nodes may hand a gradient to another of them, which has it already.
    handles = [
        node.register_prehook(lambda given, kept=grads: kept)
        for node, grads in (entrance.entered.items() if len(entrance.nodes) > 1 else ())
    ]
    try:
        return torch.autograd.grad(edges, list(weights), values, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
