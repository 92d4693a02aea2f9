"""Checkpoints of a pipeline: the format is that of one model, whose layers lie in the files of their stages.

The files of stage s are those with the numbers from s * W on, where W ranks of a stage write one each; `first_rank` of
a layout says so. All else is as if one process had all layers: names, shapes, tied names, optimizer state. So a
checkpoint loads with another number of stages, in another pipeline schedule, and without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.contents import CheckpointContents
from hf_zero.checkpoint.format import TensorInfo
from hf_zero.checkpoint.scheduler_state import plain
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.checkpointing import Checkpointing
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import CheckpointError
from hf_zero.extras.pipeline.batch_run import StageLocation
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.layout import UnitLayout
from hf_zero.runtime.build import BuiltUnits


@dataclass(frozen=True)
class _Stage:
    """The part of a checkpoint that a stage writes, as far as all ranks know it."""

    stage: int
    writers: int
    layouts: tuple[UnitLayout, ...]
    infos: tuple[TensorInfo, ...]
    groups: list[dict[str, Any]]
    shapes_in_no_unit: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class StageContents(CheckpointContents):
    """The CheckpointContents over all ranks of a run (`comm`), each of which has the layers of a stage."""

    place: StageLocation = field(kw_only=True)
    data_rank: int = field(kw_only=True)  # among the ranks of the stage
    aliases: dict[str, str] = field(kw_only=True)  # other name -> name, of tied parameters of all stages
    all_stages: Sequence[_Stage] = field(default=(), kw_only=True)

    def of_this_stage(self) -> _Stage:
        return _Stage(
            self.place.stage,
            super().num_writers,
            super().layouts,
            super().tensor_infos(),
            [{key: plain(value) for key, value in one.items() if key != "params"} for one in super().groups()],
            super().shapes_in_no_unit(),
        )

    @property
    def _writers(self) -> int:
        """The number of writers of each stage, which write a file each."""
        return max(stage.writers for stage in self.all_stages)

    @property
    def num_writers(self) -> int:
        return self._writers * len(self.all_stages)

    @property
    def file_number(self) -> int | None:
        return self.place.stage * self._writers + self.data_rank if self.data_rank < self._writers else None

    @property
    def saves_copies(self) -> bool:
        return self.data_rank == 0

    @property
    def layouts(self) -> tuple[UnitLayout, ...]:
        return tuple(
            replace(layout, name=f"stage {stage.stage}: {layout.name}", first_rank=stage.stage * self._writers)
            for stage in self.all_stages
            for layout in stage.layouts
        )

    def tensor_infos(self) -> tuple[TensorInfo, ...]:
        infos = [info for stage in self.all_stages for info in stage.infos]
        return tuple(sorted(infos, key=lambda info: _layer_of(info.name)))

    def tied(self) -> dict[str, str]:
        names = {info.name for stage in self.all_stages for info in stage.infos}
        return {alias: name for alias, name in self.aliases.items() if alias != name and name in names}

    def groups(self) -> list[dict[str, Any]]:
        """Stages have equal groups, but for those in which all is frozen."""
        return max((stage.groups for stage in self.all_stages), key=len)

    def shapes_in_no_unit(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for stage in self.all_stages for name, shape in stage.shapes_in_no_unit.items()}

    def in_first_file(self, copies: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        everyone = self.comm.all_gather_object({name: value.cpu() for name, value in copies.items()}, "buffers")
        if self.comm.rank:
            return {}
        return {name: value for given in everyone for name, value in given.items()}


def _layer_of(name: str) -> tuple[int, str]:
    first = name.partition(".")[0]
    return (int(first), "") if first.isdecimal() else (1 << 31, name)


class StageCheckpointing(Checkpointing):
    """Saves and loads a pipeline. All ranks of the run must call each method.

    Args:
        world: All ranks of the run.
        others: As for Checkpointing.
    """

    def __init__(
        self,
        model: PipelineModule,
        built: BuiltUnits,
        schedule: StepSchedule,
        config: ResolvedConfig,
        check_model: Callable[[], None],
        *,
        world: Comm,
        place: StageLocation,
    ) -> None:
        super().__init__(model, built, schedule, config, check_model, comm=world)
        self._module = model
        self._place = place
        self._aliases = model.canonical_names

    def _write(self, folder: Path, client_state: Any, exclude_frozen: bool, beside: Mapping[Path, bytes]) -> None:
        describe = self._description if self._comm.rank == 0 else None
        files = self._comm.agree("description of the model", describe, CheckpointError)[0]
        own = {folder / name: content for name, content in files.items()}
        super()._write(folder, client_state, exclude_frozen, {**own, **beside})

    def _description(self) -> dict[str, bytes]:
        try:
            return self._module.description()
        except OSError as error:
            raise CheckpointError(f"cannot describe the model: {error}") from error

    def contents(self) -> CheckpointContents:
        own = super().contents()
        parts = {one.name: getattr(own, one.name) for one in fields(own)}
        data_rank = self._built.comm.rank
        contents = StageContents(**parts, place=self._place, data_rank=data_rank, aliases=self._aliases)
        everyone = self._comm.all_gather_object(contents.of_this_stage() if not data_rank else None, "stages")
        stages = sorted((one for one in everyone if one is not None), key=lambda one: one.stage)
        return replace(contents, all_stages=tuple(stages))
