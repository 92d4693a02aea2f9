"""Decides which parameters form a unit.

A unit is a module whose forward runs: its parameters are unsharded before and resharded after. Decoder layers, by the
model's own `_no_split_modules`; for any other module, a size rule. What is in no layer forms the root unit.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_zero.errors import ConfigError

# The size rule: a module whose own parameters (units below it not counted) reach this share of the model is a unit.
# The layers of a deeper stack are smaller than that, so it is lowered while some unit would take together more than
# _MAX_TOGETHER of the model from modules below it: a unit is gathered as a whole.
_MIN_UNIT_SHARE = 1 / 32
_MAX_TOGETHER = 1 / 4
_LOWER = 0.9  # at least so much at a time
_MIN_UNIT_NUMEL = 1 << 14
# The classes that torch's data parallelism puts around a module or under it. By name: to import them takes long.
_DATA_PARALLEL = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"})
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class UnitKind(enum.Enum):
    LAYER = "layer"  # gathered around the forward and the backward of its module
    ROOT = "root"  # gathered from root forward to the end of backward
    PERSISTENT = "persistent"  # always unsharded: parameters too small to be worth a gather


@dataclass(frozen=True)
class UnitSpec:
    """A unit before memory exists: its name, the module around whose forward it is unsharded, and its parameters."""

    name: str
    kind: UnitKind
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]


def partition(
    model: nn.Module, *, persistence_threshold: int = 0, model_persistence_threshold: int | None = None
) -> list[UnitSpec]:
    """The units of `model`: layers in registration order, the root unit (perhaps empty), the persistent one if any.

    Args:
        persistence_threshold: Parameters of at most this many elements stay unsharded
            (`stage3_param_persistence_threshold`).
        model_persistence_threshold: Most elements that stay unsharded in all (`stage3_model_persistence_threshold`).
    """
    unit_paths = _unit_paths(model)
    owners = _owners(model, unit_paths)
    kept_whole = persistent_parameters(model, persistence_threshold, model_persistence_threshold)
    persistent = {id(param) for param in kept_whole.values()}
    grouped: dict[str, list[tuple[str, nn.Parameter]]] = {path: [] for path in unit_paths}
    root: list[tuple[str, nn.Parameter]] = []
    kept: list[tuple[str, nn.Parameter]] = []
    for name, param in named_parameters(model):
        if id(param) in persistent:
            kept.append((name, param))
        else:
            grouped.get(owners[id(param)], root).append((name, param))
    modules = dict(model.named_modules(remove_duplicate=False))
    specs = [
        UnitSpec(clean_name(path), UnitKind.LAYER, modules[path], tuple(params))
        for path, params in grouped.items()
        if params
    ]
    specs.append(UnitSpec("root", UnitKind.ROOT, model, tuple(root)))
    if kept:
        specs.append(UnitSpec("persistent", UnitKind.PERSISTENT, model, tuple(kept)))
    return specs


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


def persistent_parameters(model: nn.Module, threshold: int, total: int | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters of at most `threshold` elements, while their sum is within `total`. Works on meta too."""
    chosen: dict[str, nn.Parameter] = {}
    used = 0
    for name, param in named_parameters(model):
        if param.numel() <= threshold and (total is None or used + param.numel() <= total):
            chosen[name] = param
            used += param.numel()
    return chosen


def _unit_paths(model: nn.Module) -> list[str]:
    """Return the paths of the modules that become layer units, in registration order."""
    names = no_split_classes(model)
    paths: list[str] = []
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        inside = any(path.startswith(outer + ".") for outer in paths)
        if path and not inside and id(module) not in seen and _class_name(module) in names:
            paths.append(path)
            seen.add(id(module))
    return paths or _by_size(model)


def no_split_classes(model: nn.Module) -> set[str]:
    """Class names in the `_no_split_modules` of the model or of anything inside it (transformers' convention)."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _class_name(module: nn.Module) -> str:
    return type(getattr(module, "_orig_mod", module)).__name__


def _by_size(model: nn.Module) -> list[str]:
    """Return the paths of the units by the size rule, in registration order."""
    total = sum(param.numel() for param in model.parameters())
    enough = max(int(total * _MIN_UNIT_SHARE), _MIN_UNIT_NUMEL)
    found = _at_least(model, enough)
    while found.together > total * _MAX_TOGETHER and found.next_size >= _MIN_UNIT_NUMEL:
        # Not size by size where all of many modules have their own.
        enough = max(min(found.next_size, int(enough * _LOWER)), _MIN_UNIT_NUMEL)
        found = _at_least(model, enough)
    return [path for path, _ in model.named_modules() if path in found.paths]


@dataclass
class _BySize:
    """The units of at least a size."""

    paths: set[str]
    together: int = 0  # the most elements that one of them, or the root unit, has of modules below it
    next_size: int = 0  # of the largest modules that are too small


def _at_least(model: nn.Module, enough: int) -> _BySize:
    """Post-order: a module becomes a unit once the parameters under it, without those of units below, are enough."""
    found = _BySize(set())
    seen: set[int] = set()

    def visit(path: str, module: nn.Module, parent: nn.Module | None) -> int:
        if id(module) in seen:
            return 0
        seen.add(id(module))
        below = 0
        for name, child in module.named_children():
            below += visit(f"{path}.{name}" if path else name, child, module)
        left = below + sum(param.numel() for param in module.parameters(recurse=False))
        runs = _forward_runs(path, module, parent)
        if runs and (not path or left >= enough):
            found.paths.add(path)
            found.together = max(found.together, below)
            return 0
        if runs:
            found.next_size = max(found.next_size, left)
        return left

    visit("", model, None)
    found.paths.discard("")  # the root unit
    return found


def _forward_runs(path: str, module: nn.Module, parent: nn.Module | None) -> bool:
    """Whether calling the model calls this module: not containers, nor the inside of MultiheadAttention."""
    if isinstance(parent, nn.MultiheadAttention) or ".parametrizations" in f".{path}":
        return False
    return parent is None or not isinstance(module, _CONTAINERS)


def _owners(model: nn.Module, unit_paths: list[str]) -> dict[int, str]:
    """id(parameter) -> path of its unit, "" for the root.

    A parameter that several units reach belongs to the innermost unit that holds all its places, else to the root.
    """
    owners: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for param in module.parameters(recurse=False):
            here = _innermost(path, unit_paths)
            known = owners.setdefault(id(param), here)
            while known and here != known and not here.startswith(known + "."):
                known = _innermost(known.rpartition(".")[0], unit_paths)
            owners[id(param)] = known
    return owners


def _innermost(path: str, unit_paths: list[str]) -> str:
    best = ""
    for unit in unit_paths:
        if (path == unit or path.startswith(unit + ".")) and len(unit) > len(best):
            best = unit
    return best
