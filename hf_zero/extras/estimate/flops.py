"""Floating-point operations of a model's matrix products, counted as they run on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# A profile has one operator for every fused kernel of attention: it is counted as the kernels of devices are.
_ON_THE_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


class FlopCounter(TorchDispatchMode):
    """Counts in `total` while it is entered; an addition is an operation, and so is a multiplication."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and add its operations."""
        out = func(*args, **(kwargs or {}))
        kind = func._overloadpacket
        if (formula := flop_registry.get(_ON_THE_CPU.get(kind, kind))) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
