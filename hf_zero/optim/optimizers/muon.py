"""`Muon`: orthogonalized momentum for matrices, AdamW for everything else (Jordan 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from hf_zero.errors import ConfigError
from hf_zero.optim.optimizers.base import SeparateUpdates, adam_update
from hf_zero.optim.optimizers.orthogonal import METHODS, orthogonalized, rows_to_columns

_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "adam_w_mode": True}


class Muon(SeparateUpdates):
    """DeepSpeed's "Muon": two kinds of param groups, told apart by `use_muon`, which a group may set itself.

    Groups without `use_muon` are split: parameters of two or more dimensions are Muon's, except those in `others`; the
    rest is AdamW's. Settings of a group go before `muon_lr` and `adam_lr`, these before the shared ones. hf_zero gives
    Muon's parameters to one owner each at stages 1-3; AdamW's are updated where they lie.

    Muon: m = momentum m + (1 - momentum) g; u = momentum m + (1 - momentum) g (Nesterov), orthogonalized and times
    sqrt(max(1, rows / columns)); p = p (1 - lr weight_decay) - lr u. Weights of convolutions are matrices of their
    first and all other dimensions; the factor is that of their last two, as in DeepSpeed.

    Args:
        others: Parameters of two or more dimensions for AdamW: embeddings and the output layer.
        ns_method: "gram" or "standard", see orthogonal.py.
        adam_w_mode: False adds weight_decay * p to the gradient instead of decoupled decay.
    State: `momentum_buffer`; of AdamW's `step`, `exp_avg`, `exp_avg_sq`.
    Raises:
        ConfigError: A value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float | None = None,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        momentum: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        ns_method: str | None = None,
        adam_w_mode: bool = True,
        others: Iterable[torch.Tensor] = (),
    ) -> None:
        shared = {**locals(), "betas": None if betas is None else tuple(betas)}
        self._halves = {True: _settings(_MUON, shared, muon_lr), False: _settings(_ADAM, shared, adam_lr)}
        self._others = {id(param) for param in others}
        groups: list[Any] = list(params)
        if not isinstance(groups[0] if groups else None, dict):
            groups = [{"params": groups}]
        super().__init__([half for group in groups for half in self._split(group)], {})

    def _split(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        if "use_muon" in group:
            kinds = [(bool(group["use_muon"]), params)]
        else:
            mine = [param for param in params if param.dim() >= 2 and id(param) not in self._others]
            chosen = {id(param) for param in mine}
            kinds = [(True, mine), (False, [param for param in params if id(param) not in chosen])]
        return [
            {**self._halves[kind], **{name: value for name, value in group.items() if name != "params"}}
            | {"params": half, "use_muon": kind}
            for kind, half in kinds
            if half
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "use_muon" not in param_group:
            raise ConfigError("Muon: a param group that is added needs use_muon: true for matrices, else false")
        kind = bool(param_group["use_muon"])
        super().add_param_group({**self._halves[kind], **param_group})

    def problems_of(self, group: Mapping[str, Any]) -> list[str]:
        wrong = super().problems_of(group)
        method = group.get("ns_method", METHODS[0])
        if method not in METHODS:
            wrong.append(f"ns_method={method!r}: expected one of {', '.join(METHODS)}")
        flat = [tuple(param.shape) for param in group["params"] if group.get("use_muon") and param.dim() < 2]
        if flat:
            wrong.append(f"use_muon is for matrices, not for parameters of shapes {flat[:5]}")
        return wrong

    def update(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        if group["use_muon"]:
            self._muon(group, param, grad)
        else:
            adam_update(group, param, grad, self.state[param], decoupled=group["adam_w_mode"], corrected=True)

    def _muon(self, group: Mapping[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"])
        matrix = update.flatten(1) if update.dim() == 4 else update
        update = orthogonalized(matrix, group["ns_method"]).to(grad.dtype).reshape(param.shape)
        update.mul_(rows_to_columns(param.size(-2), param.size(-1)))
        param.mul_(1 - float(group["lr"]) * group["weight_decay"])
        param.add_(update.to(param.dtype), alpha=-float(group["lr"]))


def _settings(defaults: Mapping[str, Any], shared: Mapping[str, Any], lr: float | None) -> dict[str, Any]:
    given = {name: value for name, value in shared.items() if name in defaults and value is not None}
    return {**defaults, **given, **({} if lr is None else {"lr": lr})}
