"""What a forward costs, module by module: floating-point operations, as torch's FlopCounterMode counts them, and time.

Counted are products of matrices, convolutions and attention. What goes through single elements (activations, norms,
dropout, sums) is not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hf_zero.runtime.clocks import Clock

aten = torch.ops.aten


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Of a product per group, as experts have. A matrix has its rows or columns split among the groups."""
    rows = left[1:] if len(left) == 3 and len(right) == 2 else left
    return 2 * math.prod(rows) * right[-1]


# Torch's own registry lacks them: without these rows attention on a CPU, and experts, would count as nothing.
_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
}


class FlopCounter(FlopCounterMode):
    """Counts what runs inside it. Modules are told apart by ForwardCosts: torch's tracker would put hooks into the
    graph, and take a forward that has begun already for a broken one."""

    class _Everything:
        parents = frozenset({"Global"})

        def __enter__(self) -> None: ...

        def __exit__(self, *args: object) -> None: ...

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_FORMULAS)
        self.mod_tracker = self._Everything()  # type: ignore[assignment]


@dataclass
class Cost:
    """Of one module, with all that is inside it."""

    flops: int = 0
    spans: list[tuple[Any, Any]] = field(default_factory=list)  # marks of a clock


class ForwardCosts:
    """Of a model's forwards, from `begin`, which must be called before the modules inside it run, to its end.

    Several forwards add up. A module that runs inside itself counts once; a forward that fails leaves nothing.
    Compiled modules run as they are written meanwhile: torch.compile gives way to the counter, and with fullgraph it
    would raise for that.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.model = model
        self._clock = clock
        self._costs: dict[nn.Module, Cost] = {}
        self._running: dict[nn.Module, list[tuple[int, Any]]] = {}  # in this forward; a list for nested calls
        self._ended: list[tuple[nn.Module, int, tuple[Any, Any]]] = []
        self._counting = contextlib.ExitStack()
        self._counter: FlopCounter | None = None
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Count until the model's forward ends."""
        self.stop()
        before, after, ends = map(torch.compiler.disable, (self._before, self._after, self._ends))
        for module in self.model.modules():
            if module is not self.model:
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after))
        # Also where the forward raises: a mode that stays on would count for ever, and end another mode in its place.
        self._handles.append(self.model.register_forward_hook(ends, always_call=True))
        self._counting.enter_context(torch.compiler.set_stance("force_eager"))
        self._counter = self._counting.enter_context(FlopCounter())
        self._before(self.model, None)

    def stop(self) -> None:
        """Forget the forward under way, if there is one."""
        self._counting.close()
        self._counter = None
        while self._handles:
            self._handles.pop().remove()
        self._running.clear()
        self._ended.clear()

    def flops(self, module: nn.Module) -> int:
        """Of a module with all inside it; of one that is not called itself, as a ModuleList, those of its children."""
        cost = self._costs.get(module)
        return sum(map(self.flops, module.children())) if cost is None else cost.flops

    def seconds(self, module: nn.Module) -> float:
        """As `flops`. Waits for the device."""
        cost = self._costs.get(module)
        if cost is None:
            return sum(map(self.seconds, module.children()))
        return sum(self._clock.ms(start, end) for start, end in cost.spans) / 1000.0

    @property
    def is_known(self) -> bool:
        """Whether a forward came to its end."""
        return self.model in self._costs

    def _counted(self) -> int:
        return 0 if self._counter is None else int(self._counter.get_total_flops())

    def _before(self, module: nn.Module, args: Any) -> None:
        self._running.setdefault(module, []).append((self._counted(), self._clock.mark()))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        calls = self._running.get(module)
        if not calls:
            return  # it is inside a forward that began before
        counted, start = calls.pop()
        if not calls:
            self._ended.append((module, self._counted() - counted, (start, self._clock.mark())))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None:
            self._after(module, args, output)
            for one, flops, span in self._ended:
                cost = self._costs.setdefault(one, Cost())
                cost.flops += flops
                cost.spans.append(span)
        self.stop()
