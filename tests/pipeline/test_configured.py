"""The pipeline block of the configuration, DeepSpeed's names, and modules that are split among real processes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import ConfigError
from hf_zero.extras.pipeline.layer_spec import LayerSpec
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.pipeline_section import PipelineSection
from hf_zero.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from tests.harness.ranks import run_ranks


def layers(count: int = 4) -> list[LayerSpec]:
    return [LayerSpec(nn.Linear, 2, 2) for _ in range(count)]


def section(**block: Any) -> Any:
    return ZeroConfig.load({"pipeline": block}).section("pipeline", PipelineSection)


def test_the_block_of_the_documents_log_is_taken_as_it_is() -> None:
    """DeepSpeed's defaults, as its log prints them."""
    block = {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
    }
    loaded = ZeroConfig.load({"train_batch_size": 16, "pipeline": block})
    resolved = loaded.resolve(model=nn.Linear(2, 2))
    made = resolved.section("pipeline", PipelineSection)
    assert made == loaded.section("pipeline", PipelineSection) == section()
    assert made.stages is None and made.schedule == "1f1b"
    assert not any("pipeline" in notice for notice in resolved.notices)
    apart = ZeroConfig.load({"pipeline": {"pipe_partitioned": False}}).resolve()
    assert any("pipeline.pipe_partitioned" in notice for notice in apart.notices)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"stages": 0}, r"pipeline.stages = 0: expected an integer of at least 1"),
        ({"schedule": "zb"}, '"1f1b", "gpipe", "interleaved" or "zero_bubble"'),
        ({"virtual_stages": 0}, r"pipeline.virtual_stages = 0: expected an integer of at least 1"),
        ({"chunks": 2}, r"pipeline.chunks"),
    ],
)
def test_what_the_block_cannot_hold_is_refused(block: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ZeroConfig.load({"pipeline": block}).resolve()


def test_a_model_without_stages_is_told_so() -> None:
    config = ZeroConfig.load({"pipeline": {"stages": 2}})
    with pytest.raises(ConfigError, match=r"pipeline.stages = 2.*Linear has no stages: expected a hf_zero.Pipelin"):
        config.resolve(model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Linear has no stages.*\n.*call hf_zero.initialize, or remove the block"):
        hf_zero.initialize(model=nn.Linear(2, 2), config={"pipeline": {"stages": 2}})
    assert config.resolve(model=PipelineModule(layers())).settings["pipeline.stages"] == 2


def test_a_module_follows_the_block() -> None:
    module = PipelineModule(layers())
    module.configure(section(partition="uniform", seed_layers=True, activation_checkpoint_interval=2))
    assert module.num_stages == 1 and module.is_built and module.partition_method == "uniform"
    assert module.seed_layers and module.activation_checkpoint_interval == 2
    module.configure(section())
    assert module.seed_layers and module.activation_checkpoint_interval == 2, "defaults ask for nothing"
    split = PipelineModule(layers(), 2, stage=0, virtual_stages=2, partition_method="uniform")
    split.configure(section(stages=2, virtual_stages=2, partition="uniform"))
    for block in ({"stages": 3}, {"virtual_stages": 3}, {"partition": "parameters"}):
        ((name, value),) = block.items()
        with pytest.raises(ConfigError, match=rf"pipeline.{name} is {value!r}, but the PipelineModule was split"):
            split.configure(section(**block))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("pipe", "LayerSpec PipeDataParallelTopology PipeModelDataParallelTopology PipelineModule ProcessTopology"),
        ("pipeline", "LayerSpec PipeDataParallelTopology PipelineGrid PipelineModule TiedLayerSpec"),
        ("runtime.pipe", "LayerSpec PipelineModule ProcessTopology TiedLayerSpec"),
        ("runtime.pipe.module", "LayerSpec PipelineModule TiedLayerSpec"),
        ("runtime.pipe.topology", "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology"),
    ],
)
def test_names_are_where_scripts_import_them_from(path: str, names: str) -> None:
    found = importlib.import_module(f"hf_zero.{path}")
    for name in names.split():
        assert getattr(found, name).__module__.startswith("hf_zero.extras.pipeline."), name
    assert hf_zero.PipelineModule is PipelineModule and hf_zero.pipe.LayerSpec is LayerSpec
    assert hf_zero.pipeline.PipelineModule is PipelineModule
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        hf_zero.pipeline.Nothing  # noqa: B018


class Sleepy(nn.Linear):
    """Layers of different times on different ranks: rank 0's count."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(500 if torch.distributed.get_rank() == 0 else 1):
            x = super().forward(x)
        return x


def split_among_processes() -> dict[str, Any]:
    two = PipelineModule(layers(), 2)
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=2))
    assert (grid.dp_group, grid.pp_group) == (two.grid.dp_group, two.grid.pp_group)
    sleepy = [LayerSpec(Sleepy, 2, 2), *layers(4)]
    measured = PipelineModule(sleepy, 2, partition_method="profile")
    auto = PipelineModule(layers())
    auto.configure(section())
    problems = []
    for options in ({"num_stages": 3}, {"num_stages": 2, "partition_method": "profile", "profile_inputs": 5}):
        with pytest.raises(ConfigError) as raised:
            PipelineModule(layers(), **options)
        problems.append(str(raised.value))
    return {
        "place": (two.stage_id, two.grid.data_parallel_id, two.grid.dp_group, two.grid.pp_group),
        "names": list(two.state_dict()),
        "measured": measured.parts,
        "auto": (auto.num_stages, auto.stage_id),
        "problems": problems,
    }


def test_processes_agree_on_the_stages() -> None:
    found = run_ranks(split_among_processes, 4)
    assert [one["place"] for one in found] == [
        (0, 0, [0, 1], [0, 2]),
        (0, 1, [0, 1], [1, 3]),
        (1, 0, [2, 3], [0, 2]),
        (1, 1, [2, 3], [1, 3]),
    ]
    for rank, one in enumerate(found):
        first = 0 if rank < 2 else 2
        assert one["names"] == [f"{i}.{name}" for i in (first, first + 1) for name in ("weight", "bias")]
        assert one["measured"] == [0, 1, 5], "rank 0's times"
        assert one["auto"] == (4, rank)
        assert one["problems"] == found[0]["problems"]
    assert "num_stages=3 does not divide the number of processes, 4" in found[0]["problems"][0]
    assert '"profile": layer 0 raised' in found[0]["problems"][1]
