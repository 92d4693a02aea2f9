"""Each rank is the stage that it should be: against the coordinates that the axes' order gives, and what
does not fit.
"""

from __future__ import annotations

import pytest

from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


def test_the_last_axis_is_the_fastest() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.world_size() == 12 and topology.get_axis_names() == ["pipe", "data", "model"]
    for rank in range(12):
        coord = topology.get_coord(rank)
        assert (coord.pipe, coord.data, coord.model) == (rank // 6, rank // 2 % 3, rank % 2)
        assert topology.get_rank(pipe=coord.pipe, data=coord.data, model=coord.model) == rank
    assert topology.get_axis_comm_lists("pipe") == [[rank, rank + 6] for rank in range(6)]
    assert topology.get_axis_list("data", 1) == [2, 3, 8, 9]
    assert topology.filter_match(pipe=1, model=0) == [6, 8, 10]
    assert (
        topology.get_rank_repr(7) == "model_01" and topology.get_rank_repr(7, ("data",), "", "/") == "pipe01/model01"
    )
    assert topology.get_dim("none") == 0


def test_a_coordinate_that_is_not_there_is_named() -> None:
    topology = PipeDataParallelTopology(2, 2)
    with pytest.raises(ValueError, match=r"needs a coordinate for each of \['pipe', 'data'\]"):
        topology.get_rank(pipe=0)
    with pytest.raises(ValueError, match=r"pipe=2, data=0.* lies outside of pipe=2, data=2"):
        topology.get_rank(pipe=2, data=0)
    with pytest.raises(ValueError, match="rank 4 is not in the topology"):
        topology.get_coord(4)
    with pytest.raises(ConfigError, match="one number of at least 1 for each axis"):
        ProcessTopology(["pipe"], [0])


def test_a_grid_has_the_lines_through_its_rank() -> None:
    grid = PipelineGrid(PipeDataParallelTopology(num_pp=3, num_dp=2), rank=3, world_size=6)
    assert (grid.stage_id, grid.data_parallel_id) == (1, 1)
    assert grid.dp_group == [2, 3] and grid.pp_group == [1, 3, 5]
    assert [grid.stage_to_global(stage) for stage in range(3)] == [1, 3, 5]
    assert grid.stage_to_global(2, data=0) == 4
    assert grid.p2p_groups[3] == [3, 5] and grid.p2p_groups[5] == [5, 1]
    assert not grid.is_first_stage and not grid.is_last_stage
    with pytest.raises(ValueError, match=r"pipe=1, data=2.* lies outside"):
        grid.stage_to_global(1, data=2)


def test_a_topology_of_stages_alone_has_one_pipeline() -> None:
    grid = PipelineGrid(ProcessTopology(["pipe"], [3]), rank=1, world_size=3)
    assert (grid.data_parallel_size, grid.data_parallel_id, grid.dp_group) == (1, 0, [1])
    assert grid.stage_to_global(2, data=0) == 2
    with pytest.raises(ValueError, match="needs a coordinate"):
        grid.stage_to_global(2, data=1)


@pytest.mark.parametrize(
    ("topology", "world_size", "problem"),
    [
        (ProcessTopology(["data"], [2]), 2, 'expected one that is called "pipe"'),
        (PipeModelDataParallelTopology(1, 2, 1), 2, "model=2: layers are not split between ranks"),
        (PipeDataParallelTopology(2, 2), 2, "is for 4 ranks, but there are 2"),
    ],
)
def test_a_topology_that_does_not_fit_is_refused(topology: ProcessTopology, world_size: int, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PipelineGrid(topology, 0, world_size)
