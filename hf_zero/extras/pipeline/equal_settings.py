"""Settings that all ranks of a pipeline must have alike: else a stage would train another model, or wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hf_zero.config import ResolvedConfig
from hf_zero.extras.pipeline.layer_table import LayerRow
from hf_zero.extras.pipeline.pipeline_section import PipelineSection

_MOST = 160  # characters of a value in a message
_NO_SETTING = ("params", "param_names")


def layers_settings(rows: Sequence[LayerRow], settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a PipelineModule, by their names in messages."""
    found = {"the number of layers": str(len(rows))}
    found |= {f"layer {row.index}": _described(row) for row in rows}
    return found | {name: repr(value) for name, value in settings.items()}


def batch_settings(config: ResolvedConfig) -> dict[str, str]:
    """The settings of an engine, by the keys of the configuration."""
    values = {
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": config.train_micro_batch_size_per_gpu,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization.stage": config.stage,
        **{f"pipeline.{name}": value for name, value in asdict(config.section("pipeline", PipelineSection)).items()},
        "optimizer": config.optimizer,
        "scheduler": config.scheduler,
        "the precision": config.precision,
    }
    return {name: repr(value) for name, value in values.items()}


def group_settings(optimizer: Any) -> dict[str, str]:
    """The hyperparameters of an optimizer's groups; {} if it has nothing to train."""
    groups = optimizer.param_groups
    if not any(group["params"] for group in groups):
        return {}
    found = {"the optimizer": type(optimizer).__name__, "the number of parameter groups": str(len(groups))}
    for number, group in enumerate(groups):
        found |= {f"{key} of parameter group {number}": repr(group[key]) for key in group if key not in _NO_SETTING}
    return found


def difference(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """The first thing in which a rank differs from the first that has any, for a message; None if all agree."""
    ranks = [rank for rank, mine in enumerate(everyone) if mine]
    for rank in ranks[1:]:
        first, mine = everyone[ranks[0]], everyone[rank]
        for name in {**first, **mine}:
            if first.get(name) != mine.get(name):
                value, other = _short(mine.get(name)), _short(first.get(name))
                return f"{name} is {value} on rank {rank}, and {other} on rank {ranks[0]}"
    return None


def _described(row: LayerRow) -> str:
    params = ", ".join(f"{one.canonical}[{one.numel}]{'' if one.requires_grad else ' frozen'}" for one in row.params)
    return f"{row.class_name}({params})"


def _short(value: str | None) -> str:
    if value is None:
        return "nothing"
    return value if len(value) <= _MOST else f"{value[:_MOST]}..."
