"""Linear layers whose products take 8-bit operands: torchao's, or those of TransformerEngine.

| layer | what becomes of it |
|---|---|
| nn.Linear with a weight of its own that trains | torchao's Float8Linear: inputs and weights e4m3, gradients e5m2 |
| nn.Linear whose weight another module uses too (a tied lm_head) | stays |
| nn.Linear that is frozen, subclasses of nn.Linear, all other layers | stay |
"""

from __future__ import annotations

import collections
import logging
import warnings
from typing import Any

import torch
from torch import nn

from hf_zero.config.resolved import Fp8Section
from hf_zero.errors import ConfigError

logger = logging.getLogger(__name__)

TORCHAO = "torchao>=0.18"  # the oldest version that was run
_MULTIPLE = 16  # of the sizes that float8 products of devices take
_TE = "transformer_engine"


def convert_linears(model: nn.Module, section: Fp8Section, device: torch.device) -> list[str]:
    """Replace the linear layers of `model` by torchao's in place, and return their names. Parameters stay the same.

    With `use_te` nothing is replaced: the names are those of TransformerEngine's modules.

    Raises:
        ConfigError: torchao, or with `use_te` TransformerEngine, is missing or too old, or the model has no such
            layers, or is a linear layer itself.
    """
    if section.use_te:
        return _te_modules(model)
    float8 = _torchao()
    chosen = _taken(model)
    if not chosen and not fp8_weights(model, section):
        raise ConfigError(
            "msamp.enabled = true: the model has no nn.Linear that trains and has a weight of its own, so nothing "
            "would be computed in FP8.\nRemove the msamp block, or build the model of nn.Linear."
        )
    if "" in chosen:
        raise ConfigError("msamp.enabled = true: the model is a nn.Linear itself: put it into a nn.Sequential.")
    emulated = [name for name, module in chosen.items() if not _fits(module, device)]
    for names, emulate in ((chosen.keys() - set(emulated), False), (set(emulated), True)):
        if names:
            config = float8.Float8LinearConfig(emulate=emulate, round_scales_to_power_of_2=True)
            float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)  # noqa: B023
    if emulated and device.type != "cpu":
        logger.warning(
            "%d linear layers have sizes that are no multiples of %d, which float8 products of %s take; they multiply "
            "the same 8-bit values in the type of their inputs: %s",
            len(emulated),
            _MULTIPLE,
            device.type,
            ", ".join(emulated[:5]),
        )
    return list(chosen)


def fp8_weights(model: nn.Module, section: Fp8Section) -> frozenset[torch.Tensor]:
    """Return the weights of layers that are converted, or will be: those whose gradients have 8 bits."""
    if not section.enabled:
        return frozenset()
    weights: set[torch.Tensor] = set() if section.use_te else {one.weight for one in _taken(model).values()}
    converted = [module for module in model.modules() if _is_fp8(module, use_te=section.use_te)]
    weights.update(param for module in converted for param in module.parameters(recurse=False) if param.dim() > 1)
    return frozenset(weights)


def _is_fp8(module: nn.Module, *, use_te: bool) -> bool:
    kind = type(module)
    return kind.__module__.startswith(_TE) if use_te else kind.__name__ == "Float8Linear"


def _taken(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers of `model` that are to be converted, by name."""
    uses: collections.Counter[torch.Tensor] = collections.Counter()
    for module in model.modules():
        uses.update(module.parameters(recurse=False))
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    return {name: one for name, one in linears.items() if one.weight.requires_grad and uses[one.weight] == 1}


def _fits(module: Any, device: torch.device) -> bool:
    """Whether the device multiplies operands of these sizes in 8 bits. Processors do it by emulation, at any size."""
    return device.type != "cpu" and module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _torchao() -> Any:
    """torchao.float8.

    Raises:
        ConfigError: It is missing or too old.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao import float8
    except ImportError as error:
        raise ConfigError(
            f"msamp.enabled = true: FP8 linear layers are torchao's, which cannot be imported ({error}).\n"
            f'Install it: pip install "{TORCHAO}".'
        ) from error
    if "round_scales_to_power_of_2" not in float8.Float8LinearConfig.__dataclass_fields__:
        raise ConfigError(f'msamp.enabled = true: torchao is too old.\nInstall another one: pip install "{TORCHAO}".')
    return float8


def _te_modules(model: nn.Module) -> list[str]:
    try:
        __import__(_TE)
    except ImportError as error:
        raise ConfigError(
            f"msamp.use_te = true: TransformerEngine cannot be imported ({error}).\n"
            "Install it, or set use_te to false: linear layers are then torchao's."
        ) from error
    names = [name for name, module in model.named_modules() if _is_fp8(module, use_te=True)]
    if not names:
        raise ConfigError(
            "msamp.use_te = true: the model has no module of TransformerEngine.\nBuild it of them, or set use_te to "
            "false."
        )
    return names
