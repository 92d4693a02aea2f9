"""Which optimizer a configuration's `optimizer` block names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config.optimizers import OWN_OPTIMIZERS
from hf_zero.optim.optimizers.lamb import Lamb
from hf_zero.optim.optimizers.lion import Lion
from hf_zero.optim.optimizers.muon import Muon
from hf_zero.optim.optimizers.onebit import OneBitAdam
from hf_zero.optim.optimizers.uncorrected_adam import UncorrectedAdam

_OWN = {"Lamb": Lamb, "Lion": Lion, "Muon": Muon, "OneBitAdam": OneBitAdam, "UncorrectedAdam": UncorrectedAdam}
# Parts of names of matrices that are Adam's under Muon: DeepSpeed's set_optimizer_flags.
_NOT_MUON = ("embed", "lm_head")
assert _OWN.keys() >= OWN_OPTIMIZERS.keys()
# What torch updates in one kernel without temporaries: its other ways need two or three times the memory of what they
# update. Adagrad's kernel is for the CPU only. SGD's fails where one parameter has its momentum and another one, whose
# first gradient comes later, has none yet: it is fused without momentum only.
_FUSED = frozenset(["Adam", "AdamW", "SGD"])
_FUSED_ON_CPU = _FUSED | {"Adagrad"}
_CHOICES = ("fused", "foreach", "capturable", "differentiable")  # of the block's own


def optimizer_of(block: Mapping[str, Any], model: nn.Module) -> tuple[Any, dict[str, Any]]:
    """(class, keyword arguments) of a resolved `optimizer` block, for parameters of `model` or groups of them."""
    kind = _OWN.get(block["type"]) or getattr(torch.optim, block["type"])
    arguments = dict(block.get("params", {}))
    if kind is Muon:
        named = model.named_parameters()
        arguments["others"] = [param for name, param in named if any(part in name.lower() for part in _NOT_MUON)]
    fused = _FUSED if torch.accelerator.is_available() else _FUSED_ON_CPU
    chosen = arguments.keys() & set(_CHOICES) or arguments.get("momentum")
    if block["type"] in fused and not chosen and can_be_fused(model.parameters()):
        arguments["fused"] = True
    return kind, arguments


def can_be_fused(params: Iterable[Any]) -> bool:
    """Whether torch's fused kernels take these parameters, or param groups of them."""
    groups = [one if isinstance(one, Mapping) else {"params": [one]} for one in params]
    members = [group["params"] for group in groups]
    flat = [p for one in members for p in ([one] if isinstance(one, torch.Tensor) else one)]
    return all(param.is_floating_point() for param in flat if param.requires_grad)
