"""Operations and times of modules: a net of which each number is known, what torch does not count, broken passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hf_zero.extras.monitors.clocks import HostClock
from hf_zero.extras.monitors.module_costs import WHOLE, FlopCounter, ForwardCosts


class Net(nn.Module):
    """Has a module that runs twice, a list that is never called, and one that is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 10)])
        self.unused = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        y = self.layers[0](self.layers[0](self.conv(x)))
        if fails:
            raise ValueError("on purpose")
        return self.layers[1](y)


CONV = 2 * (5 * 4 * 6 * 6) * (3 * 3 * 3)  # 2 x elements of the output x what each is a sum of; 5 images of 6 x 6
TWICE = 2 * (2 * (5 * 4 * 6) * 6 * 6)
LAST = 2 * (5 * 4 * 6) * 6 * 10


def test_each_module_has_its_operations() -> None:
    net, images = Net(), torch.ones(5, 3, 6, 6)
    costs = ForwardCosts(net, HostClock())
    for times in (1, 2):
        costs.begin()
        output = net(images)
        assert _get_current_dispatch_mode() is None and not net.conv._forward_hooks and not net._forward_hooks
        flops = [costs.flops[one] for one in ("conv", "layers.0", "layers.1", "unused", WHOLE)]
        assert flops == [times * n for n in (CONV, TWICE, LAST, 0, CONV + TWICE + LAST)]
    assert costs.seconds() > 0
    with FlopCounter() as counter:
        output.sum().backward()
    assert counter.get_total_flops() == CONV + 2 * (TWICE + LAST), "the images have no gradient"


def test_a_forward_that_fails_is_forgotten() -> None:
    net, images = Net(), torch.ones(5, 3, 6, 6)
    costs = ForwardCosts(net, HostClock())
    costs.begin()
    with pytest.raises(ValueError, match="on purpose"):
        net(images, fails=True)
    assert not costs.is_known and _get_current_dispatch_mode() is None and not net.conv._forward_hooks
    costs.begin()
    net(images)
    assert costs.flops[WHOLE] == CONV + TWICE + LAST


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def test_compiled_layers_are_counted_and_stay_compiled() -> None:
    frames = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(graph)
        return graph.forward

    net = nn.Sequential(Layer(), nn.Linear(6, 10))
    net[0].compile(backend=backend, fullgraph=True)  # which raises where torch.compile gives way to a counter
    costs = ForwardCosts(net, HostClock())
    outputs = []
    for number in range(3):
        if number == 1:
            costs.begin()
        outputs.append(net(torch.ones(5, 6)))
    assert [costs.flops[one] for one in ("0", WHOLE)] == [2 * 5 * 6 * 6, 2 * 5 * 6 * (6 + 10)]
    assert len(frames) == 1 and all(one.equal(outputs[0]) for one in outputs)


def test_attention_on_the_cpu_and_grouped_products_are_counted() -> None:
    query = torch.ones(2, 4, 8, 16, requires_grad=True)  # batch, heads, tokens, width
    with FlopCounter() as counter:
        attended = F.scaled_dot_product_attention(query, query, query)
    one = 2 * (2 * 4) * 8 * 8 * 16
    assert counter.get_total_flops() == 2 * one
    with FlopCounter() as counter:
        attended.sum().backward()
    assert counter.get_total_flops() == 5 * one, "the scores are computed again"
    rows = torch.ones(12, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.ones(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    with FlopCounter() as counter:
        product = torch._grouped_mm(rows, experts, offs=torch.tensor([4, 8, 12], dtype=torch.int32))
    assert counter.get_total_flops() == 2 * 12 * 16 * 32
    with FlopCounter() as counter:
        product.backward(torch.ones_like(product))
    assert counter.get_total_flops() == 2 * (2 * 12 * 16 * 32)
