"""Which optimizer a configuration's `optimizer` block names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config.optimizers import OWN_OPTIMIZERS
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.lion import Lion
from hf_zero.optim.muon import Muon
from hf_zero.optim.onebit import OneBitAdam
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

_OWN = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon, "OneBitAdam": OneBitAdam, "UncorrectedAdam": UncorrectedAdam}
# Parts of names of matrices that are Adam's under Muon: DeepSpeed's set_optimizer_flags.
_NOT_MUON = ("embed", "lm_head")
assert _OWN.keys() >= OWN_OPTIMIZERS.keys()


def optimizer_of(block: Mapping[str, Any], model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """(class, keyword arguments) of a resolved `optimizer` block, for parameters of `model` or groups of them."""
    kind = _OWN.get(block["type"]) or getattr(torch.optim, block["type"])
    arguments = dict(block.get("params", {}))
    if kind is Muon:
        named = model.named_parameters()
        arguments["others"] = [param for name, param in named if any(part in name.lower() for part in _NOT_MUON)]
    return kind, arguments
