"""A model as a row of layers, split into stages. Each rank builds and keeps the layers of its own stage."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from hf_zero.config import ZeroConfig
from hf_zero.distributed.processes import agree, all_ranks_give, join_processes, wrong_on_all
from hf_zero.errors import ConfigError, StateError
from hf_zero.extras.activations.checkpoint import non_reentrant_checkpoint
from hf_zero.extras.pipeline.equal_settings import difference, layers_settings
from hf_zero.extras.pipeline.layer_partition import split_layers
from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec
from hf_zero.extras.pipeline.layer_table import Layer, describe_layers
from hf_zero.extras.pipeline.layer_times import measure_layers
from hf_zero.extras.pipeline.pipeline_section import Partition, PipelineSection
from hf_zero.extras.pipeline.random_states import random_states_kept, seed_all
from hf_zero.extras.pipeline.topology import PipeDataParallelTopology, PipelineGrid, ProcessTopology
from hf_zero.logs import log_start

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have a copy of."""

    name: str  # canonical: in the first layer that has it
    stages: list[int]
    param: nn.Parameter | None  # this rank's copy, if its stage is one of them


class PipelineModule(nn.Module):
    """Layers in a row: each is called with what the one before returns. A stage has some of them in a row.

    Layers are modules, functions, LayerSpecs or TiedLayerSpecs, or an nn.Sequential. Specs are built on the ranks that
    own them; modules that were built before are dropped on the others. Names of parameters are those of an
    nn.Sequential of all layers ("0.weight"). A parameter that several layers share, by a TiedLayerSpec or because
    their modules share it, has the name that it has in the first of them, also on stages without that layer.

    What specs are initialized with depends on torch's seed and the layer only, not on the number of stages. The
    random number generators go on alike on all ranks.

    With `virtual_stages` = v each stage has v chunks of layers: chunk c of stage s is part c * num_stages + s.

    Args:
        num_stages: How many stages; divides the number of processes. Without it and `topology` nothing is built until
            `build` is called, by the engine with what its configuration says.
        topology: Which rank has which stage, instead of num_stages.
        loss_fn: Called on the last stage as loss_fn(outputs, labels).
        seed_layers: Seed the random number generators before each layer is built, with base_seed + its index, and
            before it runs, with base_seed * (micro_offset + 1) + its index.
        seed_fn: Called with the seed, instead of seeding Python's, numpy's and torch's generators.
        partition_method: "parameters" (equal numbers of trainable ones), "uniform" (of layers), "type:REGEX" (of
            layers whose class name matches), "profile" (equal times of a forward and backward, measured on rank 0), or
            the numbers of layers of each stage, or with virtual_stages of each chunk, in order.
        activation_checkpoint_interval: Recompute in backward so many layers at a time. 0: none.
        activation_checkpoint_func: Does it: called as func(function, *inputs).
        checkpointable_layers: Class names. Only groups of such layers are recomputed; None: those with parameters.
        dynamic_shape: Taken for compatibility: shapes of inputs may always change.
        stage: Build this stage without other processes, to look at it or test it.
        profile_inputs: What the first layer takes, for "profile".
    Raises:
        ConfigError: The layers cannot be split as asked.
    All ranks must call, with the same layers.
    """

    engine_class = "hf_zero.extras.pipeline.pipeline_engine:PipelineEngine"  # what hf_zero.initialize makes for it

    def __init__(
        self,
        layers: nn.Sequential | Iterable[Layer],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = non_reentrant_checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        virtual_stages: int = 1,
        stage: int | None = None,
        profile_inputs: Any = None,
    ) -> None:
        super().__init__()
        self._given: list[Any] = list(layers)  # those of other stages become None
        self._loss_fn = [loss_fn]  # in a list: a module with parameters is the last stage's alone
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.partition_method: Partition = _partition(partition_method)
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = None if checkpointable_layers is None else list(checkpointable_layers)
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.dynamic_shape = dynamic_shape
        self.running_layer: int | None = None  # which one raised, after an error
        self.micro_offset = 0  # the number of the micro-batch that runs next; who runs them sets it
        self.virtual_stages = virtual_stages
        self.num_stages: int | None = None
        self.stage_id: int | None = None
        self.parts: list[int] = []
        self._grid: PipelineGrid | None = None
        self._profile_inputs = profile_inputs
        self._stand_in = [nn.Parameter(torch.empty(0, device="cpu"))]  # in a list: not registered
        with wrong_on_all("pipeline module"):
            self._rows = describe_layers(self._given)
        if num_stages is not None or topology is not None:
            self.build(num_stages, topology=topology, stage=stage)

    def build(
        self,
        num_stages: int | None = None,
        *,
        topology: ProcessTopology | None = None,
        virtual_stages: int | None = None,
        partition_method: str | Sequence[int] | None = None,
        stage: int | None = None,
    ) -> None:
        """Split the layers and build this rank's. All ranks must call, with equal arguments.

        What is None stays as the constructor had it; one of num_stages and topology is needed.

        Raises:
            ConfigError: The layers cannot be split as asked.
            StateError: It was done before.
        """
        if self.is_built:
            raise StateError(
                f"this PipelineModule has its {self.num_stages} stages already: leave out num_stages and topology "
                "where it is made, or the other place where they are given."
            )
        if virtual_stages is not None:
            self.virtual_stages = virtual_stages
        if partition_method is not None:
            self.partition_method = _partition(partition_method)
        with wrong_on_all("pipeline module"):
            self._grid = _place(num_stages, topology, stage)
            self.parts = self._split(self._grid.pipe_parallel_size, is_alone=stage is not None)
        if stage is None:
            self._agree()
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.stage_id
        self._build_layers()
        if self._grid.global_rank == 0:
            for line in self.stage_lines():
                log_start(line)
            logger.info("%s", "\n".join(self.layer_lines()))

    def ranks_with_data(self, config: ZeroConfig) -> int:
        """Follow the pipeline block of `config`, as `configure` does; return how many ranks have their own batches."""
        self.configure(config.section("pipeline", PipelineSection))
        return self.grid.data_parallel_size

    def configure(self, section: PipelineSection) -> None:
        """Follow the configuration's pipeline block: build, or see that it asks for what there is.

        All ranks must call, before the first forward. Raises ConfigError as `build`, or names what does not agree.
        """
        if section.seed_layers:
            self.seed_layers = True
        if section.activation_checkpoint_interval:
            self.set_checkpoint_interval(section.activation_checkpoint_interval)
        virtual_stages = section.virtual_stages if section.virtual_stages > 1 else None
        partition = None if section.partition == "best" else section.partition
        if not self.is_built:
            self.build(section.stages or join_processes(), virtual_stages=virtual_stages, partition_method=partition)
            return
        asked = {
            "stages": (section.stages, self.num_stages),
            "virtual_stages": (virtual_stages, self.virtual_stages),
            "partition": (partition, self.partition_method),
        }
        for name, (wanted, there) in asked.items():
            if wanted not in (None, there):
                with wrong_on_all("pipeline block"):
                    raise ConfigError(
                        f"pipeline.{name} is {wanted!r}, but the PipelineModule was split with {there!r} when it was "
                        "made. Make the two equal; or leave num_stages and topology out where it is made: the "
                        "configuration then decides."
                    )

    @property
    def is_built(self) -> bool:
        """Whether this rank has its stage."""
        return self._grid is not None and self.num_stages is not None

    @property
    def grid(self) -> PipelineGrid:
        """This rank's place among the stages. Raises StateError before `build`."""
        if self._grid is None:
            raise StateError(
                "this PipelineModule is not built yet: give num_stages= (or topology=) where it is made, or "
                '"pipeline": {"stages": ...} in the configuration.'
            )
        return self._grid

    @property
    def loss_fn(self) -> Callable[..., Any] | None:
        """The loss function as it was given. A module is registered on the last stage only."""
        return self._loss_fn[0]

    @loss_fn.setter
    def loss_fn(self, function: Callable[..., Any] | None) -> None:
        self._loss_fn[0] = function

    @property
    def _num_layers(self) -> int:
        """The number of layers of all stages."""
        return len(self._rows)

    @property
    def canonical_names(self) -> dict[str, str]:
        """The names of every parameter of every layer: as its layer has it, and the one that it goes by.

        They differ for the second and further layers of a tie. Equal on all ranks.
        """
        return {param.name: param.canonical for row in self._rows for param in row.params}

    @property
    def ties(self) -> list[Tie]:
        """The parameters that more than one stage has a copy of, in one order on all ranks."""
        stages: dict[str, set[int]] = {}
        for row in self._rows:
            for param in row.params:
                stages.setdefault(param.canonical, set()).add(self.stage_owner(row.index))
        own = dict(self.named_parameters())
        return [Tie(name, sorted(on), own.get(name)) for name, on in stages.items() if len(on) > 1]

    def chunk_layers(self, chunk: int = 0) -> list[int]:
        """The indices of the layers of one of this stage's chunks."""
        return self._part_layers(self.grid.stage_id, chunk)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the module's parameters. If this stage has nothing to train, one without elements comes too: torch
        makes no optimizer of an empty list, so `AdamW(stage.parameters())` would fail on this stage alone."""
        yield from super().parameters(recurse)
        if self.is_built and not any(param.requires_grad for param in super().parameters()):
            yield from self._stand_in

    def leave_out_stand_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what only `parameters` gives out of an optimizer."""
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param is not self._stand_in[0]]

    def forward(self, inputs: Any, chunk: int = 0) -> Any:
        """Run the layers of a chunk: of one stage's, in a row.

        Args:
            inputs: Of the first of them: a tensor, or a tuple of what tensors are in.
        """
        layers, interval = self.chunk_layers(chunk), self.activation_checkpoint_interval
        if interval == 0 or not torch.is_grad_enabled():
            return self._run(layers, self.micro_offset, inputs)
        for start in range(0, len(layers), interval):
            group = layers[start : start + interval]
            # The number goes along: at the recomputation another micro-batch's may be set.
            run = functools.partial(self._run, group, self.micro_offset)
            inputs = self._recomputed(run, inputs) if self._is_checkpointable(group) else run(inputs)
        return inputs

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile for each of this rank's layers."""
        for index in self._own_layers():
            if isinstance(module := self._modules.get(str(index)), nn.Module):
                module.compile(*args, **kwargs)

    def set_checkpoint_interval(self, interval: int) -> None:
        """Recompute `interval` layers at a time from the next forward on. 0: none."""
        if not isinstance(interval, int) or interval < 0:
            raise ConfigError(f"activation_checkpoint_interval={interval!r}: expected a number of layers, 0 for none")
        self.activation_checkpoint_interval = interval

    def topology(self) -> ProcessTopology:
        return self.grid.topology()

    def mpu(self) -> PipelineGrid:
        return self.grid

    def num_pipeline_stages(self) -> int:
        return self.grid.pipe_parallel_size

    def partitions(self) -> list[int]:
        """The bounds of the parts: part i has the layers parts[i] up to parts[i + 1]."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage of a layer."""
        if not 0 <= layer_idx < self._num_layers:
            raise ConfigError(f"layer {layer_idx}: there are {self._num_layers}, counted from 0")
        stages = self.grid.pipe_parallel_size
        part = next(part for part, stop in enumerate(self.parts[1:]) if layer_idx < stop)
        return part % stages

    def description(self) -> dict[str, bytes]:
        """Files, by name, that belong into a checkpoint's folder beside the weights. Called on one rank."""
        return {}

    def layer_title(self, layer_idx: int) -> str:
        """A layer for messages: "3 (GPT2Block)"."""
        return f"{layer_idx} ({self._rows[layer_idx].class_name})"

    def get_additional_losses(self) -> dict[str, Any] | None:
        """Losses to report beside the loss, by name: what a subclass returns. None: there are none."""
        return None

    def stage_lines(self) -> list[str]:
        """A line for each stage: its layers and its numbers of trainable parameters."""
        params = [self._stage_params(stage) for stage in range(self.grid.pipe_parallel_size)]
        total = sum(sum(one.values()) for one in params)
        unique = sum({name: numel for one in params for name, numel in one.items()}.values())
        lines = []
        for stage, own in enumerate(params):
            chunks = [self._part_layers(stage, chunk) for chunk in range(self.virtual_stages)]
            bounds = " ".join(f"[{chunk[0]}, {chunk[-1] + 1})" for chunk in chunks)
            numbers = {"STAGE_PARAMS": sum(own.values()), "TOTAL_PARAMS": total, "UNIQUE_PARAMS": unique}
            rank = self.topology().filter_match(pipe=stage)[0]
            lines.append(
                f"RANK={rank} STAGE={stage} LAYERS={sum(map(len, chunks))} {bounds} "
                + " ".join(f"{name}={value} ({value / 1e6:0.3f}M)" for name, value in numbers.items())
            )
        return lines

    def layer_lines(self) -> list[str]:
        """The layers of each stage, by index and class."""
        lines = [f"partitioned by {self.partition_method!r} into {self.num_stages} stages"]
        for stage in range(self.grid.pipe_parallel_size):
            layers = [i for chunk in range(self.virtual_stages) for i in self._part_layers(stage, chunk)]
            lines.append(f"stage={stage} layers={len(layers)}")
            lines += [f"    {index:2d}: {self._rows[index].class_name}" for index in layers]
        return lines

    # Splitting and building

    def _agree(self) -> None:
        """Raise ConfigError, on all ranks, unless they have the same layers in the same stages."""
        settings = {
            "the split into stages": self.parts,
            "virtual_stages": self.virtual_stages,
            "seed_layers": self.seed_layers,
            "base_seed": self.base_seed,
        }
        if found := difference(all_ranks_give(layers_settings(self._rows, settings), "PipelineModule")):
            raise ConfigError(
                f"PipelineModule: {found}.\nAll ranks must make it alike, from the same layers, stages and options."
            )

    def _split(self, num_stages: int, *, is_alone: bool) -> list[int]:
        if not isinstance(self.virtual_stages, int) or self.virtual_stages < 1:
            raise ConfigError(f"virtual_stages={self.virtual_stages!r}: expected the number of chunks of each stage")
        num_parts = num_stages * self.virtual_stages
        if num_parts > self._num_layers:
            chunks = f" with {self.virtual_stages} chunks each" if self.virtual_stages > 1 else ""
            raise ConfigError(
                f"PipelineModule has {self._num_layers} layers for {num_stages} stages{chunks}: stage "
                f"{self._num_layers % num_stages} would have none. Use at most {self._num_layers} stages in all, or "
                "split the model into more layers."
            )
        measured = functools.partial(self._measured, is_alone=is_alone)
        return split_layers(self.partition_method, self._rows, num_parts, measured)

    def _measured(self, *, is_alone: bool) -> list[float]:
        """The seconds that each layer takes, by rank 0's clock."""
        measures = is_alone or not dist.is_initialized() or dist.get_rank() == 0
        measure = functools.partial(measure_layers, self._given, self._profile_inputs)
        return agree("times of layers", measure if measures else None, ConfigError, is_alone=is_alone)[0]

    def _build_layers(self) -> None:
        """Register the modules of this rank's layers and those that stand for tied ones; let go of all else."""
        seed = int(torch.randint(1 << 31, (), device="cpu"))  # one draw on every rank, whatever it builds
        own, modules = self._own_layers(), dict[int, nn.Module]()
        with random_states_kept():
            for index in own:
                first = self._rows[index].first
                if isinstance(self._given[first], nn.Module | LayerSpec):
                    if first not in modules:
                        modules[first] = self._built(first, seed)
                    modules[index] = modules[first]
        self._hold_shared(own, modules)
        for index in sorted(modules):
            self.add_module(str(index), modules[index])
        for index, layer in enumerate(self._given):
            if index not in own or isinstance(layer, nn.Module):
                self._given[index] = None
        if isinstance(self.loss_fn, nn.Module) and self.grid.is_last_stage:
            self.add_module("loss_module", self.loss_fn)

    def _built(self, index: int, seed: int) -> nn.Module:
        layer = self._given[index]
        if isinstance(layer, nn.Module):
            return layer
        if self.seed_layers:
            self._seed(self.base_seed + index)
        else:
            seed_all(seed + index)
        module: nn.Module = layer.build()
        return module

    def _hold_shared(self, own: Sequence[int], modules: dict[int, nn.Module]) -> None:
        """Give parameters of own layers that belong to a layer elsewhere the names that they have there."""
        for index in own:
            for param in self._rows[index].params:
                first, _, path = param.canonical.partition(".")
                if int(first) in own:
                    continue
                holder = modules.setdefault(int(first), nn.Module())
                *parents, last = path.split(".")
                for name in parents:
                    if name not in holder._modules:
                        holder.add_module(name, nn.Module())
                    holder = holder.get_submodule(name)
                shared = modules[index].get_parameter(param.name.partition(".")[2])
                holder.register_parameter(last, shared)

    # Running

    def _run(self, layers: Sequence[int], micro_offset: int, inputs: Any) -> Any:
        with random_states_kept() if self.seed_layers else contextlib.nullcontext():
            for index in layers:
                self.running_layer = index
                if self.seed_layers:
                    self._seed(self.base_seed * (micro_offset + 1) + index)
                inputs = self._call(index, inputs)
        self.running_layer = None
        return inputs

    def _call(self, index: int, inputs: Any) -> Any:
        module, given = self._modules.get(str(index)), self._given[index]
        if module is None:
            return given(inputs)
        if isinstance(given, TiedLayerSpec) and given.forward_fn is not None:
            return given.forward_fn(module, inputs)
        return module(inputs)

    def _recomputed(self, run: Callable[[Any], Any], inputs: Any) -> Any:
        tensors = [one for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        function = self.activation_checkpoint_func
        if not any(tensor.requires_grad for tensor in tensors):
            function = non_reentrant_checkpoint  # a reentrant one would give no gradient at all
        if isinstance(inputs, tuple):
            return function(lambda *leaves: run(leaves), *inputs)
        return function(run, inputs)

    def _is_checkpointable(self, layers: Sequence[int]) -> bool:
        if self.checkpointable_layers is not None:
            return all(self._rows[index].class_name in self.checkpointable_layers for index in layers)
        return any(self._rows[index].params for index in layers)

    def _seed(self, seed: int) -> None:
        (self.seed_fn or seed_all)(seed)

    def _own_layers(self) -> list[int]:
        return [index for chunk in range(self.virtual_stages) for index in self.chunk_layers(chunk)]

    def _part_layers(self, stage: int, chunk: int) -> list[int]:
        if not 0 <= chunk < self.virtual_stages:
            raise ConfigError(f"chunk {chunk}: a stage has {self.virtual_stages} (virtual_stages), counted from 0")
        part = chunk * self.grid.pipe_parallel_size + stage
        return list(range(self.parts[part], self.parts[part + 1]))

    def _stage_params(self, stage: int) -> dict[str, int]:
        """The number of elements of each trainable parameter of a stage, by name."""
        layers = [index for chunk in range(self.virtual_stages) for index in self._part_layers(stage, chunk)]
        return {p.canonical: p.numel for index in layers for p in self._rows[index].params if p.requires_grad}


def _partition(method: str | Sequence[int]) -> Partition:
    return method if isinstance(method, str) else tuple(method)


def _place(num_stages: int | None, topology: ProcessTopology | None, stage: int | None) -> PipelineGrid:
    """Find the place of this process in the pipelines.

    Args:
        stage: Without other processes, the stage to be.
    """
    if topology is not None and num_stages not in (None, topology.get_dim("pipe")):
        raise ConfigError(
            f"num_stages={num_stages}, but the topology has {topology.get_dim('pipe')} stages: leave num_stages out"
        )
    if topology is None and (isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1):
        raise ConfigError(f"num_stages={num_stages!r}: expected the number of stages, at least 1, or a topology")
    if stage is not None:
        stages = num_stages if topology is None else topology.get_dim("pipe")
        assert stages is not None
        if not 0 <= stage < stages:
            raise ConfigError(f"stage={stage}: there are {stages} stages, counted from 0")
        return PipelineGrid(PipeDataParallelTopology(stages, 1), stage, stages)
    world_size = join_processes()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if topology is None:
        assert num_stages is not None
        if world_size % num_stages:
            raise ConfigError(
                f"num_stages={num_stages} does not divide the number of processes, {world_size}: every stage runs on "
                f"equally many. Start a multiple of {num_stages} processes, or change num_stages. (stage= builds one "
                "stage without the others.)"
            )
        topology = PipeDataParallelTopology(num_stages, world_size // num_stages)
    return PipelineGrid(topology, rank, world_size)
