"""The parameters of a model: their names, which of them are shared, and which cannot be sharded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hf_zero.errors import ConfigError

# The classes that torch's data parallelism puts around a module or under it. By name: to import them takes long.
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Floating-point parameters under the names that a plain (not compiled) model gives them, shared ones once.

    Those of one byte are left alone, like integers: without the scale beside them they are not numbers to cast.
    """
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype.itemsize > 1:
            yield clean_name(name), param


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter -> the name under which hf_zero keeps it."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(param), clean_name(name))
        if known != clean_name(name):
            aliases[clean_name(name)] = known
    return aliases


def clean_name(name: str) -> str:
    """A name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """Refuse parameters that cannot be flattened, with `sharded` also packed ones; all in one message.

    A model under torch's data parallelism has none to give.
    """
    for path, module in model.named_modules():
        names = {kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")}
        if found := sorted(names & _DATA_PARALLEL):
            raise ConfigError(
                f"{path or 'the model'} is under torch's {found[0]}, and hf_zero is data parallel itself: gradients "
                "would be reduced twice.\nGive hf_zero the plain module, which has not been wrapped or fully_shard-ed "
                "(of DistributedDataParallel and DataParallel: model.module)."
            )
    problems = []
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            problems.append(f"{name} has no shape yet (a lazy module): run one forward of the plain model first")
            continue
        kind = type(param.data).__name__
        if param.is_meta:
            problems.append(f"{name} is on the meta device: load or initialise the weights first")
        elif kind == "DTensor":
            problems.append(f"{name} is a DTensor: tensor parallelism and hf_zero cannot shard the same parameter")
        elif param.is_complex():
            problems.append(f"{name} has complex type {param.dtype}: keep it as two real parameters")
        elif sharded and param.dtype.itemsize == 1 and param.dtype != torch.bool:
            problems.append(f"{name} is packed ({param.dtype}): use stage 2, or an unquantized model")
        elif param.is_sparse or param.layout != torch.strided:
            problems.append(f"{name} has layout {param.layout}: only dense parameters can be sharded")
    if problems:
        raise ConfigError("hf_zero cannot shard this model:\n  " + "\n  ".join(problems))
