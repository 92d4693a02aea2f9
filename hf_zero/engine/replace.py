"""Replaces the engine of a model and reshards it in place: from inference to training, and after changes.

What has changed in a model since its engine was made (adapters were added, layers frozen, embeddings resized, the
model wrapped in another module) takes effect here: units are built again, and shards that stay the same are reused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.engine.engine import ZeroEngine, end_unless_shared, engine_of
from hf_zero.errors import StateError
from hf_zero.runtime.build import build_units
from hf_zero.runtime.unit_specs import BuildSettings
from hf_zero.sharding.model_params import clean_name
from hf_zero.sharding.param_index import ParamIndex
from hf_zero.sharding.reshard import LayoutChange


def engines_inside(model: nn.Module) -> list[ZeroEngine]:
    """Return the engine of `model`, or those of modules inside it: of a model in a wrapper, or of several."""
    own = engine_of(model)
    if own is not None:
        return [own]
    return [
        engine for module in model.modules() if (engine := engine_of(module)) is not None and engine.module is module
    ]


def _drop_optimizer(engine: ZeroEngine) -> None:
    """Give up optimizer state and gradients; masters have the last update. All ranks must call."""
    if engine.optimizer is not None:
        engine.params.reshard_all()
        engine.finish_updates()
        engine.optimizer.zero_grad()
        engine.optimizer.close()
        engine.optimizer = None


def replace_engines(
    model: nn.Module,
    engines: Sequence[ZeroEngine],
    config: ResolvedConfig,
    *,
    managed: bool = False,
    train: bool = True,
    drop_optimizers: bool = False,
) -> ZeroEngine:
    """Make an engine for `model` that replaces `engines`: their shards are resharded in place. All ranks must call.

    Optimizer state would not follow: it is given up with `drop_optimizers`, else none may have an optimizer.
    The memory beside the shards is in the table of sharding/reshard.py.
    """
    for engine in engines:
        if drop_optimizers:
            _drop_optimizer(engine)
        elif engine.optimizer is not None:
            raise StateError(
                f"rank {engine.rank}: parameters cannot be resharded while an optimizer refers to their shards.\n"
                "Change the model (resize embeddings, add adapters) before it meets its optimizer."
            )
    comm = engines[0].comm
    if any(engine.is_sharded for engine in engines):
        check = functools.partial(_refuse_nan, model, ParamIndex(unit for engine in engines for unit in engine.units))
        comm.agree("the model's new parameters", check, StateError)
    for engine in engines:
        engine.uninstall()
    layout_change = LayoutChange((unit for engine in engines for unit in engine.units), comm)
    settings = BuildSettings.of(config, train=train)
    built = build_units(model, settings, comm, layout_change.initialize, reuse=layout_change.reuse)
    layout_change.finish()
    for engine in engines:
        engine.placements.close()
    replacement = ZeroEngine(model, config, managed=managed, built=built, train=train)
    for other in dict.fromkeys(engine.comm for engine in engines if engine.comm is not comm):
        end_unless_shared(other)
    return replacement


def _refuse_nan(model: nn.Module, index: ParamIndex) -> None:
    """Raise StateError if something that was made while the model was in shards holds NaN, as placeholders do."""
    named = [*model.named_parameters(), *model.named_buffers()]
    plain = [(name, one) for name, one in named if one not in index and one.is_floating_point() and not one.is_meta]
    found = [clean_name(name) for name, one in plain if one.layout is torch.strided and bool(torch.isnan(one).any())]
    if found:
        raise StateError(
            f"{len(found)} parameter(s) or buffer(s) that were made beside a sharded model hold NaN: "
            f"{', '.join(found[:5])}.\nThey were computed from sharded parameters, which have no values between uses. "
            "Make them inside `with hf_zero.gathered_params(model):`, on all ranks."
        )


def engine_for_part(engine: ZeroEngine, model: nn.Module) -> ZeroEngine:
    """Make an engine for inference of `model`, a part of the model of `engine`, in its place. All ranks must call.

    Optimizer state, gradients, and parameters that `model` does not have are given up.
    """
    return replace_engines(model, [engine], engine.config, managed=engine.managed, train=False, drop_optimizers=True)
