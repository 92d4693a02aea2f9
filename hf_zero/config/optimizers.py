"""The `optimizer` and `scheduler` blocks: which types there are, their parameters, and torch's form of an optimizer.

The names are data, so that reading a configuration does not import torch; a test compares them with torch.optim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.conditions import CORRECTED, CYCLES_BETAS, DECAYS, NAMED_ADAM, NATIVE, NOT_NATIVE
from hf_zero.config.schema import (
    Block,
    Entry,
    Key,
    choice,
    count,
    flag,
    floats,
    no_effect,
    only,
    real,
    refused,
    text,
)


def _names(table: Mapping[str, str]) -> dict[str, frozenset[str]]:
    return {kind: frozenset(params.split()) for kind, params in table.items()}


_COMMON = "lr weight_decay foreach maximize capturable differentiable"
_ADAM = f"{_COMMON} betas eps amsgrad fused"
# Names DeepSpeed adds to Adam and AdamW.
_DEEPSPEED_ADAM = "torch_adam adam_w_mode bias_correction fp32_optimizer_states"

# torch.optim classes that are right on shards: an element depends on itself only, or parameters get owners.
TORCH_OPTIMIZERS = _names(
    {
        "Adam": f"{_ADAM} decoupled_weight_decay",
        "AdamW": _ADAM,
        "SGD": "lr weight_decay foreach maximize differentiable fused momentum dampening nesterov",
        "Adadelta": f"{_COMMON} rho eps",
        "Adagrad": "lr weight_decay foreach maximize differentiable fused lr_decay initial_accumulator_value eps",
        "Adafactor": "lr weight_decay foreach maximize beta2_decay eps d",
        "Adamax": f"{_COMMON} betas eps",
        "ASGD": f"{_COMMON} lambd alpha t0",
        "NAdam": f"{_COMMON} betas eps momentum_decay decoupled_weight_decay",
        "RAdam": f"{_COMMON} betas eps decoupled_weight_decay",
        "RMSprop": f"{_COMMON} alpha eps momentum centered",
        "Rprop": "lr foreach maximize capturable differentiable etas step_sizes",
    }
)
# Names that DeepSpeed's OneBitAdam takes and that change nothing there, or must be off.
_ONE_BIT = "bias_correction eps_inside_sqrt amsgrad cuda_aware comm_backend_name"

_DEEPSPEED_MUON = "torch_adam adam_w_mode fp32_optimizer_states"

# Types that torch does not have, or has in another form: classes of hf_zero.optim. The parameters are DeepSpeed's.
OWN_OPTIMIZERS = _names(
    {
        "Lamb": "lr betas eps weight_decay bias_correction eps_inside_sqrt max_coeff min_coeff amsgrad",
        "Lion": "lr betas weight_decay",
        "Muon": f"lr betas eps weight_decay momentum ns_method muon_lr adam_lr per_head_muon {_DEEPSPEED_MUON}",
        "OneBitAdam": f"lr betas eps weight_decay freeze_step {_ONE_BIT}",
    }
)
# Parameters of these that their classes do not take: they change nothing, or other values are refused.
NOT_TAKEN = {
    "OneBitAdam": frozenset(_ONE_BIT.split()),
    "Muon": frozenset(["torch_adam", "fp32_optimizer_states", "per_head_muon"]),
}

# Types that a shard of the elements is not enough for, or that nothing here computes: refused by name.
OTHER_OPTIMIZERS = (
    "OneBitLamb",
    "ZeroOneAdam",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "LBFGS",
    "SparseAdam",
)

OPTIMIZERS = (*TORCH_OPTIMIZERS, *OWN_OPTIMIZERS, *OTHER_OPTIMIZERS)

_BY_GROUP = "signs travel through the process group"

# Every parameter of every type with its range. Only the four that TrainingArguments know may be "auto".
OPTIMIZER_PARAMS: dict[str, Entry] = {
    "lr": real(auto=True),
    "betas": floats(size=2, low=0, below=1, auto=True),
    "eps": real(auto=True),
    "weight_decay": real(auto=True),
    "rho": real(high=1),
    **dict.fromkeys("momentum dampening lr_decay initial_accumulator_value alpha lambd t0".split(), real()),
    **dict.fromkeys("momentum_decay max_coeff min_coeff muon_lr adam_lr".split(), real()),
    "freeze_step": count(low=1),
    "beta2_decay": real(low=None, high=0),
    "d": real(low=1),
    "ns_method": choice(None, "gram", "standard"),
    "per_head_muon": refused(flag(None), "Remove it: Muon takes full matrices."),
    "cuda_aware": no_effect(flag(None), _BY_GROUP),
    "comm_backend_name": no_effect(text(), _BY_GROUP),
    "etas": floats(size=2),
    "step_sizes": floats(size=2),
    **dict.fromkeys("amsgrad maximize capturable nesterov centered".split(), flag(None)),
    "differentiable": refused(flag(None), "Remove it: a step is part of no graph."),
    **dict.fromkeys(("fused", "foreach"), only(flag(None), NOT_NATIVE, CORRECTED)),
    **dict.fromkeys(f"decoupled_weight_decay eps_inside_sqrt {_DEEPSPEED_ADAM}".split(), flag(None)),
    "adam_w_mode": only(flag(None), NAMED_ADAM),
}

_WARMUP = "warmup_num_steps warmup_type"
SCHEDULER_TYPES = _names(
    {
        "WarmupLR": f"warmup_min_lr warmup_max_lr {_WARMUP}",
        "WarmupDecayLR": f"warmup_min_lr warmup_max_lr {_WARMUP} total_num_steps",
        "WarmupCosineLR": f"warmup_min_ratio cos_min_ratio {_WARMUP} total_num_steps",
        "OneCycle": (
            "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
            "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
            "cycle_max_mom decay_mom_rate"
        ),
        "LRRangeTest": (
            "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase"
        ),
    }
)
SCHEDULERS = tuple(SCHEDULER_TYPES)

SCHEDULER_PARAMS: dict[str, Entry] = {
    "warmup_min_lr": floats(low=0, auto=True),
    "warmup_max_lr": floats(low=0, auto=True),
    "warmup_num_steps": count(auto=True),
    "total_num_steps": count(low=1, auto=True),
    "warmup_type": choice(None, "log", "linear"),
    "warmup_min_ratio": real(high=1),
    "cos_min_ratio": real(high=1),
    **dict.fromkeys("cycle_min_lr cycle_max_lr lr_range_test_min_lr".split(), floats(low=0)),
    **dict.fromkeys("cycle_min_mom cycle_max_mom".split(), only(floats(low=0, below=1), CYCLES_BETAS)),
    "decay_lr_rate": only(real(), DECAYS),
    "decay_mom_rate": only(real(), CYCLES_BETAS, DECAYS),
    "lr_range_test_step_rate": real(),
    "cycle_first_step_size": count(low=1),
    **dict.fromkeys("cycle_second_step_size decay_step_size".split(), count()),
    **dict.fromkeys("cycle_first_stair_count cycle_second_stair_count".split(), count()),
    "lr_range_test_step_size": count(low=1),
    "cycle_momentum": flag(None),
    "lr_range_test_staircase": flag(None),
}

_TYPE = {"optimizer": Key(kind="choice", choices=OPTIMIZERS), "scheduler": Key(kind="choice", choices=SCHEDULERS)}


def params_of(block: str, data: Mapping[str, Any]) -> Block:
    """The rows for `params` in an optimizer or scheduler block, narrowed to the type that stands beside them.

    Parameters of an optimizer that is refused by its name are not checked: the name is the mistake to mend.
    """
    rows = OPTIMIZER_PARAMS if block == "optimizer" else SCHEDULER_PARAMS
    given = data.get("type")
    kind = {name.lower(): name for name in _TYPE[block].choices}.get(given.lower()) if isinstance(given, str) else None
    if kind in OTHER_OPTIMIZERS:
        return Block(keys={}, free=True)
    names = TORCH_OPTIMIZERS.get(kind or "") or OWN_OPTIMIZERS.get(kind or "") or SCHEDULER_TYPES.get(kind or "")
    if names is None:
        return Block(keys=rows)
    if kind in NATIVE:
        names = names.union(_DEEPSPEED_ADAM.split())
    # Adafactor's are two numbers of another meaning, so not TrainingArguments' either.
    own = {"eps": floats(size=2, low=0)} if kind == "Adafactor" else {}
    return Block(keys={name: own.get(name, row) for name, row in rows.items() if name in names})


def torch_form(block: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer block as `{"type": a class of torch.optim or hf_zero.optim, "params": its arguments}`.

    DeepSpeed's rules hold: "Adam" means AdamW unless adam_w_mode is false (or torch's decoupled_weight_decay is, where
    that is the one given), and Adam's and AdamW's weight decay is 0 where none is given (torch's own default for AdamW
    is 0.01, which DeepSpeed takes only with torch_adam).
    """
    kind = block["type"]
    params = dict(block.get("params", {}))
    if kind in OWN_OPTIMIZERS:
        taken = params.keys() - NOT_TAKEN.get(kind, frozenset())
        return {"type": kind, "params": {name: value for name, value in params.items() if name in taken}}
    extras = {name: params.pop(name) for name in _DEEPSPEED_ADAM.split() if name in params}
    if kind in NATIVE:
        decoupled = kind == "AdamW" or extras.get("adam_w_mode", params.pop("decoupled_weight_decay", True))
        if extras.get("bias_correction") is False:
            kept = {name: value for name, value in params.items() if name in ("lr", "betas", "eps", "weight_decay")}
            return {"type": "UncorrectedAdam", "params": {**kept, "adamw_mode": decoupled}}
        if not extras.get("torch_adam"):
            params.setdefault("weight_decay", 0.0)
        kind = "AdamW" if decoupled else "Adam"
    return {"type": kind, "params": params}
