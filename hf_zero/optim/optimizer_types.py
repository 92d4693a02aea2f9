"""The optimizers that hf_zero knows: what each updates, and the keys that an `optimizer` block may have for it.

Plain data beside the classes in `optimizers/`, without torch, so that a configuration is checked without it. `config/`
takes BLOCKS from here, `registry.py` all the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_zero.config.conditions import (
    BF16_STATES,
    NATIVE,
    OFFLOAD_OPTIMIZER,
    PARAMS,
    STAGE,
    has_bf16_masters,
    medium,
    updates_natively,
)
from hf_zero.config.media import Medium
from hf_zero.config.schema import (
    Choice,
    Conflict,
    Count,
    Entry,
    Flag,
    Get,
    Key,
    Real,
    Reals,
    Text,
    When,
    show,
)
from hf_zero.config.typed_block import Type, TypedBlock, type_keys


class Updates(enum.Enum):
    """The unit that an optimizer updates, given its gradient."""

    ELEMENTS = enum.auto()  # each by itself, or ranges of them by a class that is written for shards
    PARAMETERS = enum.auto()  # unsharded, on the rank that owns one
    REPLICAS = enum.auto()  # all parameters on every rank: stage 0 only


@dataclass(frozen=True, kw_only=True)
class OptimizerType(Type):
    """One optimizer. An `optimizer` block can name it if it has `params`.

    Args:
        is_native: The native Adam does the same on offloaded states.
        states_in_fp32: Its states have fp32, whatever the type of the parameters.
        groups: With PARAMETERS, which param groups need them; all where it is None.
        fused: Where torch has a kernel without temporaries: its other ways need two or three times the memory of what
            they update.
    """

    updates: Updates = Updates.ELEMENTS
    is_native: bool = False
    states_in_fp32: bool = False
    groups: Callable[[Mapping[str, Any]], bool] | None = None
    fused: frozenset[str] = frozenset()


# ---------------------------------------------------------------- keys of `params`
_BY_TORCH = (
    When(lambda get: not updates_natively(get), "the native update of offloaded states has one way to run"),
    When(lambda get: get(f"{PARAMS}.bias_correction") is not False, "Adam without bias correction has one way to run"),
)
_NAMED_ADAM = When(lambda get: get("optimizer.type") == "Adam", "AdamW always decouples the weight decay")
_BY_GROUP = "signs travel through the process group"

# Keys that several types have. Only the four that TrainingArguments know may be "auto".
_SHARED: dict[str, Key] = {
    "lr": Real(auto=True, help="The learning rate, which a schedule starts from."),
    "betas": Reals(size=2, below=1, auto=True, help="The decays of the running averages of gradients and squares."),
    "eps": Real(auto=True, help="The number that is added to the denominator of an update."),
    "weight_decay": Real(auto=True, help="The factor of the weight decay."),
    "momentum": Real(help="The decay of the momentum; 0 is none."),
    "alpha": Real(help="The decay of the running average (RMSprop), or the power of the rate's decay (ASGD)."),
    "amsgrad": Flag(None, help="Divide by the largest running average of squares so far (AMSGrad)."),
    "maximize": Flag(None, help="Go up the gradient, not down."),
    "foreach": Flag(None, when=_BY_TORCH, help="Update many tensors per kernel (torch's foreach)."),
    "fused": Flag(None, when=_BY_TORCH, help="Update in one kernel without temporaries (torch's fused)."),
    "capturable": Flag(None, help="Keep step counts on the device, so that a step can be captured in a CUDA graph."),
    "differentiable": Flag(None, refused="Remove it: a step is part of no graph."),
    "decoupled_weight_decay": Flag(None, help="Decay weights apart from the gradient, as AdamW does."),
    "bias_correction": Flag(None, help="Correct the running averages for their start at zero."),
    "eps_inside_sqrt": Flag(None, help="Add eps before the square root is taken, not after."),
    "torch_adam": Flag(None, help="Update by torch's Adam, also where states are offloaded to the CPU."),
    "adam_w_mode": Flag(
        None, when=(_NAMED_ADAM,), help="Decay weights apart from the gradient; false adds the decay to the gradient."
    ),
    "fp32_optimizer_states": Flag(None, help="Keep offloaded moments in fp32; false keeps them in 16 bits."),
}


def _params(shared: str, **own: Key) -> dict[str, Entry]:
    return {**{name: _SHARED[name] for name in shared.split()}, **own}


_COMMON = "lr weight_decay foreach maximize capturable differentiable"
_ADAM = f"{_COMMON} betas eps amsgrad fused torch_adam adam_w_mode bias_correction fp32_optimizer_states"
_ONE_BIT = "bias_correction eps_inside_sqrt amsgrad"


def _torch_adam(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's "Adam" and "AdamW" as classes of torch.optim or hf_zero.optim with their arguments.

    "Adam" means AdamW unless adam_w_mode is false (or torch's decoupled_weight_decay is, where that is the one given),
    and the weight decay is 0 where none is given (torch's own default for AdamW is 0.01, which DeepSpeed takes only
    with torch_adam).
    """
    names = ("torch_adam", "adam_w_mode", "bias_correction", "fp32_optimizer_states")
    extras = {extra: params.pop(extra) for extra in names if extra in params}
    decoupled = name == "AdamW" or extras.get("adam_w_mode", params.pop("decoupled_weight_decay", True))
    if extras.get("bias_correction") is False:
        kept = {one: value for one, value in params.items() if one in ("lr", "betas", "eps", "weight_decay")}
        return {"type": "UncorrectedAdam", "params": {**kept, "adamw_mode": decoupled}}
    if not extras.get("torch_adam"):
        params.setdefault("weight_decay", 0.0)
    return {"type": "AdamW" if decoupled else "Adam", "params": params}


# ---------------------------------------------------------------- the types
_EVERYWHERE = frozenset(["cpu", "accelerator"])
_ADAMS = OptimizerType(is_native=True, fused=_EVERYWHERE, form=_torch_adam)
_NATIVE_ONLY = OptimizerType(is_native=True)

# Module and name of the class; torch.optim's are in modules of their own there.
OPTIMIZERS: dict[str, OptimizerType] = {
    "torch.optim.Adam": replace(_ADAMS, params=_params(f"{_ADAM} decoupled_weight_decay")),
    "torch.optim.AdamW": replace(_ADAMS, params=_params(_ADAM)),
    # The fused kernel fails where one parameter has its momentum and another one, whose first gradient comes later,
    # has none yet: it is used without momentum only.
    "torch.optim.SGD": OptimizerType(
        params=_params(
            "lr weight_decay foreach maximize differentiable fused momentum",
            dampening=Real(help="The part of a gradient that is left out of the momentum."),
            nesterov=Flag(None, help="Look ahead along the momentum (Nesterov)."),
        ),
        fused=_EVERYWHERE,
    ),
    "torch.optim.Adadelta": OptimizerType(
        params=_params(f"{_COMMON} eps", rho=Real(high=1, help="The decay of the running average of squares."))
    ),
    "torch.optim.Adagrad": OptimizerType(
        params=_params(
            "lr weight_decay foreach maximize differentiable fused eps",
            lr_decay=Real(help="The factor by which the learning rate falls with the steps."),
            initial_accumulator_value=Real(help="The sum of squares before the first step."),
        ),
        fused=frozenset(["cpu"]),
    ),
    "torch.optim.Adafactor": OptimizerType(
        params=_params(
            "lr weight_decay foreach maximize",
            beta2_decay=Real(low=None, high=0, help="The power of the step that the running averages decay by."),
            # Two numbers of another meaning than the others' eps, so not TrainingArguments' either.
            eps=Reals(size=2, help="The least square, and the least root mean square of a parameter."),
            d=Real(low=1, help="The largest root mean square of an update before it is clipped."),
        ),
        updates=Updates.PARAMETERS,
    ),
    "torch.optim.Adamax": OptimizerType(params=_params(f"{_COMMON} betas eps")),
    "torch.optim.ASGD": OptimizerType(
        params=_params(
            f"{_COMMON} alpha",
            lambd=Real(help="The speed at which the learning rate decays."),
            t0=Real(help="The step at which averaging begins."),
        )
    ),
    "torch.optim.NAdam": OptimizerType(
        params=_params(
            f"{_COMMON} betas eps decoupled_weight_decay",
            momentum_decay=Real(help="The speed at which the momentum decays."),
        )
    ),
    "torch.optim.RAdam": OptimizerType(params=_params(f"{_COMMON} betas eps decoupled_weight_decay")),
    "torch.optim.RMSprop": OptimizerType(
        params=_params(
            f"{_COMMON} alpha eps momentum",
            centered=Flag(None, help="Divide by an estimate of the variance, not of the squares."),
        )
    ),
    "torch.optim.Rprop": OptimizerType(
        params=_params(
            "lr foreach maximize capturable differentiable",
            etas=Reals(size=2, low=None, help="The factors by which a step size shrinks and grows."),
            step_sizes=Reals(size=2, low=None, help="The smallest and the largest step size."),
        )
    ),
    "torch.optim.Muon": OptimizerType(updates=Updates.PARAMETERS),
    "transformers.optimization.Adafactor": OptimizerType(updates=Updates.PARAMETERS),
    "hf_zero.optim.optimizers.cpu_adam.CPUAdam": _NATIVE_ONLY,
    "hf_zero.optim.optimizers.uncorrected_adam.UncorrectedAdam": _NATIVE_ONLY,
    "hf_zero.optim.optimizers.lamb.Lamb": OptimizerType(
        params=_params(
            f"lr betas eps weight_decay {_ONE_BIT}",
            max_coeff=Real(help="The largest ratio of a parameter's norm to that of its update."),
            min_coeff=Real(help="The smallest ratio of a parameter's norm to that of its update."),
        ),
        states_in_fp32=True,
    ),
    "hf_zero.optim.optimizers.lion.Lion": OptimizerType(params=_params("lr betas weight_decay"), states_in_fp32=True),
    "hf_zero.optim.optimizers.muon.Muon": OptimizerType(
        params=_params(
            "lr betas eps weight_decay momentum torch_adam adam_w_mode fp32_optimizer_states",
            ns_method=Choice(
                choices=("gram", "standard"), help="The way in which the Newton-Schulz iteration is computed."
            ),
            muon_lr=Real(help="The learning rate of matrices, instead of lr."),
            adam_lr=Real(help="The learning rate of all that Adam updates, instead of lr."),
            per_head_muon=Flag(None, refused="Remove it: Muon takes full matrices."),
        ),
        not_taken=frozenset(["torch_adam", "fp32_optimizer_states", "per_head_muon"]),
        updates=Updates.PARAMETERS,
        states_in_fp32=True,
        groups=lambda group: bool(group["use_muon"]),
    ),
    "hf_zero.optim.optimizers.onebit.OneBitAdam": OptimizerType(
        params=_params(
            f"lr betas eps weight_decay {_ONE_BIT}",
            freeze_step=Count(low=1, help="The step at which the variance is frozen and signs are exchanged."),
            cuda_aware=Flag(None, no_effect=_BY_GROUP),
            comm_backend_name=Text(no_effect=_BY_GROUP),
        ),
        not_taken=frozenset([*_ONE_BIT.split(), "cuda_aware", "comm_backend_name"]),
        updates=Updates.REPLICAS,
        states_in_fp32=True,
    ),
}

# ---------------------------------------------------------------- what is refused by its name
# The class that a user brings -> what it needs that a shard has not.
_MATRIX, _BLOCKS = "the full matrix", "quantisation blocks that a shard cuts"
_NORM, _ALL = "the norm of the full parameter", "inner products over all parameters"
REFUSED: dict[str, str] = {
    "Adafactor": "row and column means of the full matrix",
    **dict.fromkeys(("Muon", "MuonWithAuxAdam"), "the full momentum matrix"),
    **dict.fromkeys(("LBFGS", "Prodigy", "DAdaptAdam"), _ALL),
    "SparseAdam": "sparse gradients",
    **dict.fromkeys(("Lamb", "LAMB", "FusedLamb", "LARS"), _NORM),
    **dict.fromkeys(("Lion8bit", "Adam8bit", "AdamW8bit"), _BLOCKS),
    **dict.fromkeys("Shampoo DistributedShampoo SOAP GaLoreAdamW GaLoreAdafactor APOLLOAdamW".split(), _MATRIX),
    "LOMO": "gradients inside backward",
    "AdaLomo": "row and column means of the full matrix",
    "ScheduleFreeWrapper": "a second copy of the parameters that it swaps itself",
}
INSTEAD = {
    **dict.fromkeys(("Lamb", "LAMB", "FusedLamb"), "hf_zero.optim.Lamb, which asks the other ranks for it"),
    "Adafactor": "the Adafactor of torch.optim or transformers, which gets full matrices",
    **dict.fromkeys(("Muon", "MuonWithAuxAdam"), "torch.optim.Muon or hf_zero.optim.Muon, which get full matrices"),
}
ELEMENTWISE_INSTEAD = "an elementwise optimizer (torch.optim.AdamW, Adam, SGD, ...)"
# Types that DeepSpeed or torch has and a block cannot have here.
_REFUSED_TYPES = "OneBitLamb ZeroOneAdam MuAdam MuAdamW MuSGD LBFGS SparseAdam".split()


# ---------------------------------------------------------------- keys that do not go together
# torch's Adam has these, and Adam without bias correction has not.
_NOT_UNCORRECTED = ("torch_adam", "amsgrad", "maximize", "capturable")


def _conflicts(get: Get) -> Iterator[Conflict]:
    kind, where = get("optimizer.type"), medium(get, OFFLOAD_OPTIMIZER)
    offload = f"{OFFLOAD_OPTIMIZER}.device = {show(get(f'{OFFLOAD_OPTIMIZER}.device'))}"
    if kind in NATIVE:
        yield from _of_adam(get, kind, where, offload)
    if has_bf16_masters(get) and get(BF16_STATES) is True and _has_fp32_states(get, kind):
        yield Conflict(
            BF16_STATES, "this optimizer keeps its states in fp32", 'Remove it, or use torch\'s "AdamW" or "SGD".'
        )
    yield from _of_torch_arguments(get)
    if kind == "Lamb" and not where.is_device:
        yield Conflict(
            "optimizer.type",
            f"Lamb does not go with {offload}: its update needs norms over all ranks",
            'Remove offload_optimizer, or use "AdamW".',
        )
    if kind not in (None, *NATIVE, *_REFUSED_TYPES, "Lamb", "OneBitAdam") and where.needs_folder:
        yield Conflict(
            "optimizer.type",
            f"it does not go with {offload}: what is on disk is updated by native code, which is Adam's",
            'Use "AdamW", or offload to "cpu".',
        )
    if kind in ("Lamb", "OneBitAdam") and get(f"{PARAMS}.amsgrad") is True:
        yield Conflict(f"{PARAMS}.amsgrad", f"{kind} does not have it", "Remove it.")
    if kind == "OneBitAdam":
        yield from _of_one_bit_adam(get)


def _has_fp32_states(get: Get, kind: Any) -> bool:
    known = _TYPES.get(kind)
    uncorrected = get(f"{PARAMS}.bias_correction") is False  # as a class of its own: see _torch_adam
    return uncorrected or (isinstance(known, OptimizerType) and known.states_in_fp32)


def _of_adam(get: Get, kind: str, where: Medium, offload: str) -> Iterator[Conflict]:
    decoupled, mode = (get(f"{PARAMS}.{name}") for name in ("decoupled_weight_decay", "adam_w_mode"))
    if kind == "Adam" and None not in (decoupled, mode) and decoupled is not mode:
        yield Conflict(
            f"{PARAMS}.decoupled_weight_decay",
            f"adam_w_mode = {'true' if mode else 'false'} says the opposite of it",
            "Remove one of them.",
        )
    if get(f"{PARAMS}.torch_adam") is True and where.needs_folder:
        yield Conflict(
            f"{PARAMS}.torch_adam",
            f"it does not go with {offload}: what is on disk is updated by native code",
            'Remove it, or offload to "cpu".',
        )
    if get(f"{PARAMS}.bias_correction") is False:
        for name in _NOT_UNCORRECTED:
            if get(f"{PARAMS}.{name}") is True:
                yield Conflict(
                    f"{PARAMS}.{name}", "it does not go with bias_correction = false", "Remove one of them."
                )


def _of_torch_arguments(get: Get) -> Iterator[Conflict]:
    """Yield the conflicts that torch's classes refuse when they are made."""
    if get(f"{PARAMS}.fused") is True and get(f"{PARAMS}.foreach") is True:
        yield Conflict(f"{PARAMS}.foreach", "it does not go with fused = true", "Remove one of them.")
    if get(f"{PARAMS}.nesterov") is True and (not get(f"{PARAMS}.momentum") or get(f"{PARAMS}.dampening")):
        yield Conflict(f"{PARAMS}.nesterov", "it needs a momentum above 0 and no dampening", "Remove it.")
    etas = get(f"{PARAMS}.etas")
    if etas is not None and not 0 < etas[0] < 1 < etas[1]:
        yield Conflict(
            f"{PARAMS}.etas", "expected a factor between 0 and 1, and one above 1", "Write [0.5, 1.2], the default."
        )


def _of_one_bit_adam(get: Get) -> Iterator[Conflict]:
    if get(STAGE) not in (None, 0):
        yield Conflict(
            "optimizer.type",
            f"it does not go with ZeRO ({STAGE} = {get(STAGE)}): it compresses momenta of unsharded parameters",
            'Set the stage to 0, or use "AdamW".',
        )
    if get(f"{PARAMS}.eps_inside_sqrt") is True:
        yield Conflict(f"{PARAMS}.eps_inside_sqrt", "OneBitAdam adds eps to the square root", "Remove it.")
    if get("gradient_allreduce_op") == "sum":
        yield Conflict(
            "gradient_allreduce_op", "OneBitAdam exchanges means of momenta", 'Set it to "mean", or use "AdamW".'
        )


_TYPES = {
    **{path.rpartition(".")[2]: one for path, one in OPTIMIZERS.items() if one.params},
    **dict.fromkeys(_REFUSED_TYPES, Type(refused=True)),
}
BLOCKS = {
    "optimizer": TypedBlock(
        keys={
            **type_keys(
                _TYPES,
                help="The class of the optimizer.",
                instead="Use AdamW, Adam, Lamb, Lion or SGD, which are right on shards.",
            ),
            "legacy_fusion": Flag(False, no_effect="torch's optimizers are used"),
        },
        types=_TYPES,
        missing='Write "type": "AdamW" in it, or remove the block.',
        conflicts=_conflicts,
    )
}
