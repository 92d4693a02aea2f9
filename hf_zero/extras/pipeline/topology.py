"""The map of ranks to stages of pipelines. Integers only: nothing here talks to other ranks."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

from hf_zero.errors import ConfigError


class ProcessTopology:
    """Ranks as points of a grid with named axes; along the last axis they are neighbours.

    Args:
        axes: Names of the axes, the slowest first.
        dims: The length of each.
    Raises:
        ConfigError: Not one length for each axis, or a length below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims) or any(not isinstance(dim, int) or dim < 1 for dim in dims):
            raise ConfigError(
                f"{type(self).__name__}: axes {list(axes)} have the lengths {list(dims)}: expected one number of at "
                "least 1 for each axis"
            )
        self.axes = list(axes)
        self.dims = list(dims)
        coord: Any = collections.namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]
        self.ProcessCoord = coord
        points = itertools.product(*(range(dim) for dim in self.dims))
        self.mapping: dict[Any, int] = {coord._make(point): rank for rank, point in enumerate(points)}
        self._coords = list(self.mapping)

    def get_rank(self, **coord_kwargs: int) -> int:
        """The rank at a point: a coordinate for every axis, as in get_rank(pipe=1, data=0).

        Raises:
            ValueError: An axis is missing or unknown, or a coordinate lies outside.
        """
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank({_named(coord_kwargs)}) needs a coordinate for each of {self.axes}; filter_match takes some"
            )
        rank = self.mapping.get(self.ProcessCoord(**coord_kwargs))
        if rank is None:
            raise ValueError(f"get_rank({_named(coord_kwargs)}) lies outside of {self._lengths()}")
        return rank

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_dim(self, axis: str) -> int:
        """The length of an axis, 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """The point of a rank, with an attribute for each axis.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"rank {rank} is not in the topology, which has {len(self._coords)} ranks")
        return self._coords[rank]

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The point of a rank as a part of file names, such as "model_01"; "" where all axes are left out.

        Raises:
            ValueError: There is no such rank.
        """
        coord = self.get_coord(rank)
        axes = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in axes)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The lines along an axis: lists of ranks that differ in this coordinate only. [] for an unknown axis."""
        if axis not in self.axes:
            return []
        lines: dict[Any, list[int]] = {}
        for coord, rank in self.mapping.items():
            lines.setdefault(coord._replace(**{axis: 0}), []).append(rank)
        return list(lines.values())

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """The ranks with these coordinates, in order."""
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == value for axis, value in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks whose coordinate on `axis` is `idx`."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)

    def _lengths(self) -> str:
        return _named(dict(zip(self.axes, self.dims, strict=True)))


class PipeDataParallelTopology(ProcessTopology):
    """`num_pp` stages of `num_dp` ranks each, which share data. Ranks of a stage are neighbours."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A PipeDataParallelTopology with a third axis for layers that are split between `num_mp` ranks."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


class PipelineGrid:
    """A rank's place: its stage, the ranks of its stage (which share data) and those of its pipeline.

    Args:
        topology: Has an axis "pipe", and may have "data"; others must have the length 1.
        rank: This process's rank.
        world_size: The number of processes.
    Raises:
        ConfigError: The topology has other axes, or does not fit the number of ranks.
    """

    def __init__(self, topology: ProcessTopology, rank: int, world_size: int) -> None:
        _check(topology, world_size)
        self._topo = topology
        self.global_rank = rank
        self.world_size = world_size
        self.pipe_parallel_size = topology.get_dim("pipe")
        self.data_parallel_size = max(topology.get_dim("data"), 1)
        self.model_parallel_size = 1
        self.slice_parallel_size = 1
        coord = topology.get_coord(rank)
        self.stage_id: int = coord.pipe
        self.data_parallel_id: int = getattr(coord, "data", 0)
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups = topology.get_axis_comm_lists("data") or [[other] for other in range(world_size)]
        self.dp_group = _line_of(rank, self.dp_groups)
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        self.pp_group = _line_of(rank, self.pipe_groups)
        self.p2p_groups = [self._with_next(other) for other in range(world_size)]

    def _with_next(self, rank: int) -> list[int]:
        """A rank and the one of the next stage in its pipeline; after the last comes the first."""
        line = _line_of(rank, self.pipe_groups)
        return [rank, line[(line.index(rank) + 1) % len(line)]]

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The rank of a stage in this rank's pipeline; `data` names another pipeline."""
        coord = self._topo.get_coord(self.global_rank)._asdict() | {"pipe": stage_id}
        alone = {axis: index for axis, index in kwargs.items() if axis not in coord and index == 0}
        return self._topo.get_rank(**coord | {axis: index for axis, index in kwargs.items() if axis not in alone})

    def topology(self) -> ProcessTopology:
        return self._topo

    def get_global_rank(self) -> int:
        return self.global_rank

    def get_stage_id(self) -> int:
        return self.stage_id

    def get_data_parallel_id(self) -> int:
        return self.data_parallel_id

    def get_pipe_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipeline_model_parallel_rank(self) -> int:
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_data_parallel_rank(self) -> int:
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        return self.data_parallel_size

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.dp_group

    # With DeepSpeed's words the ranks of one pipeline are model-parallel ones.
    def get_model_parallel_rank(self) -> int:
        return self.pp_group.index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        return self.pipe_parallel_size

    def get_slice_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_rank(self) -> int:
        return 0

    def get_slice_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1


def _check(topology: ProcessTopology, world_size: int) -> None:
    lengths = dict(zip(topology.get_axis_names(), topology.dims, strict=True))
    if "pipe" not in lengths:
        raise ConfigError(
            f'the topology has the axes {_named(lengths)}: expected one that is called "pipe", as in '
            "PipeDataParallelTopology(num_pp=2, num_dp=1)"
        )
    others = {axis: dim for axis, dim in lengths.items() if axis not in ("pipe", "data") and dim > 1}
    if others:
        raise ConfigError(
            f"the topology has {_named(others)}: layers are not split between ranks (no tensor parallelism). Use "
            "PipeDataParallelTopology(num_pp=..., num_dp=...), or 1 for that axis."
        )
    if topology.world_size() != world_size:
        raise ConfigError(
            f"the topology {_named(lengths)} is for {topology.world_size()} ranks, but there are {world_size}: its "
            f"lengths must multiply to the number of processes. Start {topology.world_size()} processes, or change it."
        )


def _line_of(rank: int, lines: list[list[int]]) -> list[int]:
    return next(line for line in lines if rank in line)


def _named(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
