"""The `pipeline` block of the configuration: its keys, and what stages cannot do. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_zero.config.conditions import STAGE, is_known
from hf_zero.config.schema import Block, Choice, Conflict, Count, Flag, Get, Text, When, key, keys_of
from hf_zero.extras.pipeline.stage_schedules import SCHEDULES

_MANY = 1 << 16  # more stages, or chunks of layers, are a mistake
PARTITIONS = (
    'expected "parameters", "uniform", "type:REGEX" (of class names), "profile" or a list of numbers of layers'
)
_IN_PIPELINE = When(lambda get: get("@pipeline"), "the model is not a hf_zero.PipelineModule")
_SPLIT = "it is about layers that are split between ranks (tensor parallelism)"


Partition = str | tuple[int, ...]  # the name of a method, or the number of layers of each part


@dataclass(frozen=True)
class PartitionKey(Text):
    """The name of a way to divide layers, or the number of layers of each part."""

    words = "a text or a list of numbers of layers"

    def _canonical(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else super()._canonical(value)


@dataclass(frozen=True)
class PipelineSection:
    """The split and the schedule of a PipelineModule. `schedule` and `virtual_stages` are hf_zero's own."""

    stages: int | None = key(
        "The number of stages; by default as the module says, or one per process.",
        Count(low=1, high=_MANY, auto=True),
    )
    partition: str | tuple[int, ...] = key(
        'The way in which layers are divided, or the number of layers of each stage; "best" is as the module says.',
        PartitionKey("best"),
    )
    seed_layers: bool = key(
        "Seed the random numbers before each layer is built, whatever the module says.", Flag(False)
    )
    activation_checkpoint_interval: int = key(
        "The number of layers that are recomputed at a time in backward; 0 is as the module says.", Count(0)
    )
    schedule: str = key(
        "The order in which a stage computes its micro-batches.", Choice("1f1b", choices=tuple(SCHEDULES))
    )
    virtual_stages: int = key(
        "The number of chunks of layers of each stage; 1 is as the module says.", Count(1, low=1, high=_MANY)
    )


def partition_fault(method: Partition) -> str | None:
    """The fault of a partition_method; None if it has none."""
    if not isinstance(method, str):
        wrong = [one for one in method if type(one) is not int or one < 1]
        return f"{wrong[0]!r} is no number of layers: each part has at least one" if wrong else None
    kind, _, pattern = method.partition(":")
    if kind.lower() == "type" and pattern:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            return f"{pattern!r} is no regular expression: {error}"
    elif kind.lower() not in ("uniform", "parameters", "profile") or pattern:
        return f"no method has this name: {PARTITIONS}"
    return None


def _conflicts(get: Get) -> Iterator[Conflict]:
    """Yield the settings that do not go together. With a PipelineModule, its own settings are those of the block."""
    schedule, chunks, partition = (get(f"pipeline.{name}") for name in ("schedule", "virtual_stages", "partition"))
    if partition != "best" and (fault := partition_fault(partition)) is not None:
        yield Conflict("pipeline.partition", fault, 'Correct it, or write "best", the module\'s own.')
    if schedule == "interleaved" and chunks < 2:
        yield Conflict(
            "pipeline.schedule",
            "it needs pipeline.virtual_stages of 2 or more",
            'Write "virtual_stages": 2 beside it, or use "1f1b".',
        )
    if schedule == "zero_bubble" and chunks > 1:
        yield Conflict(
            "pipeline.schedule",
            f"it goes with pipeline.virtual_stages 1, not {chunks}",
            'Remove virtual_stages, or use "interleaved".',
        )
    is_split = (get("pipeline.stages") or 1) > 1
    if is_split and is_known(get, "@model") and not get("@pipeline"):
        yield Conflict(
            "pipeline.stages",
            f"{get('@model')} has no stages: expected a hf_zero.PipelineModule",
            "Make one of it (hf_zero.pipeline.from_transformers does, of language models) and call "
            "hf_zero.initialize, or remove the block.",
        )
    if not is_split and not is_known(get, "@pipeline"):
        return
    if get(STAGE) > 1:
        yield Conflict(
            STAGE,
            "a pipeline takes 0 or 1. Several micro-batches are in a stage at once, and each of their backwards would "
            "have to reduce gradients (stage 2) or gather parameters (stage 3) again, which costs more than the "
            "memory is worth",
            "Set it to 0 or 1, and add stages to the pipeline where memory is short.",
        )
    if get("flops_profiler.enabled") is True:
        yield Conflict("flops_profiler.enabled", "it counts one model in one process", "Turn it off for a pipeline.")


BLOCKS = {
    "pipeline": Block(
        always=True,
        keys={
            **keys_of(PipelineSection, _IN_PIPELINE),
            "pipe_partitioned": Flag(True, no_effect=_SPLIT),
            "grad_partitioned": Flag(True, no_effect=_SPLIT),
            "use_reentrant": Flag(True, no_effect="layers are recomputed with and without inputs that need gradients"),
        },
        conflicts=_conflicts,
    )
}
