"""The costs of a forward: floating-point operations of each module, as torch's FlopCounterMode counts them, and time.

Products of matrices, convolutions and attention are counted. Operations on single elements (activations, norms,
dropout, sums) are not.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hf_zero.extras.monitors.clocks import Clock, Stopwatch

WHOLE = "Global"  # torch's name for everything that is counted
aten = torch.ops.aten


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


def _grouped(left: Sequence[int], right: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a product per group, as experts have. A matrix has its rows or columns split among the groups."""
    rows = left[1:] if len(left) == 3 and len(right) == 2 else left
    return 2 * math.prod(rows) * right[-1]


# Torch's own registry lacks them: without these rows attention on a CPU, and experts, would count as nothing.
_FORMULAS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped,
}


class _Modules:
    """The modules that run now, instead of torch's tracker.

    That one would put hooks into the graph, and take a forward that has begun already for a broken one.
    """

    def __init__(self) -> None:
        self.parents = [WHOLE]

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


class FlopCounter(FlopCounterMode):
    """Counts the operations inside its block, by the names in `modules.parents`."""

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_FORMULAS)
        self.modules = self.mod_tracker = _Modules()  # type: ignore[assignment]


class ForwardCosts:
    """Adds up the forwards of a model, each from `begin`, which must come before the modules inside run, to its end.

    A module that runs inside itself counts once; a forward that fails leaves nothing. Compiled modules run as they
    are written meanwhile: torch.compile gives way to the counter, and with fullgraph it would raise for that.
    """

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self.flops: collections.Counter[str] = collections.Counter()  # name of a module, or WHOLE -> operations
        self.is_known = False  # a forward came to its end
        self._model = model
        self._clock = clock
        self._watch = Stopwatch(clock)
        self._counting = contextlib.ExitStack()
        self._counter: FlopCounter | None = None
        self._begun: Any = None

    def begin(self) -> None:
        """Count until the model's forward ends."""
        self.stop()
        put = self._counting.callback
        counter = FlopCounter()
        for name, module in self._model.named_modules():
            if module is not self._model:
                before, after = (
                    functools.partial(change, counter.modules.parents, name) for change in (_enter, _leave)
                )
                put(module.register_forward_pre_hook(torch.compiler.disable(before)).remove)
                put(module.register_forward_hook(torch.compiler.disable(after)).remove)
        # The hook runs where the forward raises too: a mode that stayed on would count for ever, and end another mode
        # in its place.
        put(self._model.register_forward_hook(torch.compiler.disable(self._ends), always_call=True).remove)
        self._counting.enter_context(torch.compiler.set_stance("force_eager"))
        self._counter = self._counting.enter_context(counter)
        self._begun = self._clock.mark()

    def stop(self) -> None:
        """Forget the forward under way, if there is one."""
        self._counting.close()
        self._counter = None

    def seconds(self) -> float:
        """Return the time of the model's forwards. Waits for the device."""
        return self._watch.read_ms() / 1000.0

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if output is not None and self._counter is not None:
            self.is_known = True
            self._watch.add(self._begun, self._clock.mark())
            for name, operations in self._counter.flop_counts.items():
                self.flops[name] += sum(operations.values())
        self.stop()


def _enter(parents: list[str], name: str, *hooked: Any) -> None:
    parents.append(name)


def _leave(parents: list[str], name: str, *hooked: Any) -> None:
    if name in parents:  # a forward that began before is not counted
        parents.remove(name)
