"""A checkpoint of hf_zero as the files that DeepSpeed itself writes and loads, at a chosen stage and world size.

The files and their layout: [Note: DeepSpeed's layout]. What is known of the run is put together as for the universal
format. One rank's states are in memory at a time, at stages 1 and 2 besides them the model in its own type.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.folders import LATEST_NAME, chosen
from hf_zero.checkpoint.format import Manifest
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.conversion.deepspeed import KINDS, part_lengths
from hf_zero.conversion.pickles import StandIn, save_anything
from hf_zero.conversion.target import new_folder
from hf_zero.conversion.universal import MODEL_FILE, RANK_MODEL_FILE, WEIGHTS, WRITTEN_FOR, Run, Written, read_state
from hf_zero.errors import CheckpointError

_SUB_GROUP = 10**9  # DeepSpeed's default of sub_group_size
_ALIGN = 2  # a flat group of stages 1 and 2 is aligned to so many elements of each rank
_ORDER = (
    "DeepSpeed knows parameters by their place: give it each parameter group in the order of "
    "model.named_parameters(), and leave sub_group_size, parameter_alignment and round_robin_gradients at their "
    "defaults"
)


class _LossScaler(StandIn):
    pass


class _DynamicLossScaler(StandIn):
    pass


class _Fragment(StandIn):
    pass


_CLASSES: dict[type, str] = {
    _LossScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    _DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    _Fragment: "deepspeed.utils.tensor_fragment.fragment_address",
}


@dataclass(frozen=True)
class _Place:
    """A range of a parameter in a rank's flat tensor."""

    name: str
    start: int  # in the flattened parameter
    numel: int
    at: int  # in the flat tensor


@dataclass(frozen=True)
class _Target:
    stage: int
    world_size: int

    def groups(self, run: Run, numels: Mapping[str, int]) -> list[tuple[int, list[str]]]:
        """Return (its parameter group, its parameters in order) for each flat group."""
        found: list[tuple[int, list[str]]] = []
        for number in range(len(run.groups)):
            names = [name for name in numels if run.group_of.get(name) == number]
            sizes = [-(-numels[name] // self.world_size) for name in names]
            if self.stage < 3 or sum(sizes) <= _SUB_GROUP:
                found.append((number, names))
                continue
            first = size = 0
            for index, one in enumerate(sizes):
                size += one
                if size >= _SUB_GROUP or index == len(names) - 1:
                    found.append((number, names[first : index + 1]))
                    first, size = index + 1, 0
        return found

    def places(self, numels: Mapping[str, int], rank: int) -> tuple[list[_Place], int]:
        """Return what a rank has of a flat group, and the size of its flat tensor."""
        places, at = [], 0
        if self.stage == 3:
            for name, numel in numels.items():
                part = -(-numel // self.world_size)
                places.append(_Place(name, rank * part, part_lengths(numel, part, self.world_size)[rank], at))
                at += part
            return places, at
        total = sum(numels.values())
        part = (total + -total % (_ALIGN * self.world_size)) // self.world_size
        low = rank * part
        for name, numel in numels.items():
            first, last = max(at, low), min(at + numel, low + part)
            places.append(_Place(name, first - at, last - first, first - low))
            at += numel
        return places, part


def to_deepspeed(
    src: str | Path, dst: str | Path, *, stage: int | None = None, world_size: int | None = None
) -> Written:
    """Write the checkpoint `src` of hf_zero as DeepSpeed's `dst`, which appears complete or not at all.

    Args:
        stage: Of the run that will load it: 1, 2 or 3; None: that of `src`.
        world_size: Ranks of that run; None: those of the run that saved `src`.
    Raises:
        CheckpointError: `src` is no complete checkpoint of Adam or AdamW with all its weights, or its parameters stand
            at different steps, which DeepSpeed cannot hold; `dst` exists.
    """
    with open_checkpoint(chosen(src)) as reader:
        reader.verify_before_reading()
        run, manifest = Run.of(reader), reader.manifest
        ranks = (manifest.processes or manifest.world_size) if world_size is None else world_size
        target = _Target(max(manifest.stage, 1) if stage is None else stage, ranks)
        if target.stage not in (1, 2, 3) or target.world_size < 1:
            raise CheckpointError(f"stage {target.stage} on {ranks} ranks: expected stage 1, 2 or 3 on 1 rank or more")
        name = f"global_step{manifest.global_step}"
        with new_folder(Path(dst)) as folder:
            (folder / name).mkdir()
            _Writer(reader, run, target).write(folder / name)
            (folder / LATEST_NAME).write_text(name)
    remarks = [_ORDER, *run.remarks]
    if manifest.loss_scale != 1:
        remarks.append("The loss scale goes on where it was, with DeepSpeed's default window, hysteresis and minimum")
    return Written(Path(dst) / name, tuple(remarks), f"load it at stage {target.stage} on {ranks} ranks")


@dataclass(frozen=True)
class _RankTensors:
    """The part of a flat group that one rank has."""

    places: list[_Place]
    used: int  # elements that belong to parameters, from the start
    tensors: dict[str, torch.Tensor]  # WEIGHTS and the optimizer's states


class _Writer:
    """Writes the files of one checkpoint."""

    def __init__(self, reader: CheckpointReader, run: Run, target: _Target) -> None:
        self._reader = reader
        self._run = run
        self._target = target
        self._infos = {info.name: info for info in reader.manifest.params}
        self._numels = {name: math.prod(info.shape) for name, info in self._infos.items()}
        self._groups = target.groups(run, self._numels)

    def write(self, folder: Path) -> None:
        target = self._target
        config = {"zero_optimization": {"stage": target.stage}}
        own = {"ds_config": config, "ds_version": WRITTEN_FOR}
        prefix = "bf16_" if any(info.dtype == "bfloat16" for info in self._infos.values()) else ""
        model = self._model_state(config)
        for rank in range(target.world_size):
            if target.stage == 3:
                save_anything(model | self._module_of_stage_3(rank), folder / RANK_MODEL_FILE.format(rank))
            held = [self._rank_tensors(names, rank) for _, names in self._groups]
            states = self._states_of_stage_3(held) if target.stage == 3 else self._states_of_stage_2(held)
            path = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            save_anything({"optimizer_state_dict": states, **own}, path, _CLASSES)
        if target.stage < 3:
            save_anything(model | self._module(), folder / MODEL_FILE)

    # ---------------------------------------------------------------- optimizer states of a rank
    def _rank_tensors(self, names: Sequence[str], rank: int) -> _RankTensors:
        places, size = self._target.places({name: self._numels[name] for name in names}, rank)
        places = [place for place in places if place.numel > 0]
        tensors = {kind: torch.zeros(size) for kind in (WEIGHTS, *KINDS)}
        for place in places:
            for kind, flat in tensors.items():
                values = read_state(self._reader, place.name, kind, place.start, place.numel)
                flat[place.at : place.at + place.numel] = values
        return _RankTensors(places, max((place.at + place.numel for place in places), default=0), tensors)

    def _optimizer(self, held: Sequence[_RankTensors]) -> dict[str, Any]:
        """Return the state dict of torch's Adam or of DeepSpeed's, which look for different hyperparameters."""
        run = self._run
        owned: dict[int, list[int]] = {number: [] for number in range(len(run.groups))}
        for index, (number, _) in enumerate(self._groups):
            owned[number].append(index)
        states = [{"step": torch.tensor(run.step), **{kind: one.tensors[kind] for kind in KINDS}} for one in held]
        options = [{"bias_correction": True, **group, "params": owned[n]} for n, group in enumerate(run.groups)]
        return {"state": dict(enumerate(states)), "param_groups": options}

    def _states_of_stage_3(self, held: Sequence[_RankTensors]) -> dict[str, Any]:
        return {
            "zero_stage": 3,
            **_loss_scale(self._reader.manifest),
            "partition_count": self._target.world_size,
            "optimizer_state_dict": self._optimizer(held),
            "fp32_flat_groups": [one.tensors[WEIGHTS] for one in held],
        }

    def _states_of_stage_2(self, held: Sequence[_RankTensors]) -> dict[str, Any]:
        return {
            **_loss_scale(self._reader.manifest),
            "base_optimizer_state": self._optimizer(held),
            # Elements that fill up the last parts are left out.
            "single_partition_of_fp32_groups": [one.tensors[WEIGHTS][: one.used].clone() for one in held],
            "zero_stage": self._target.stage,
            "group_paddings": [one.tensors[WEIGHTS].numel() - one.used for one in held],
            "param_alignment_paddings": [[0] * len(names) for _, names in self._groups],
            "partition_count": [self._target.world_size] * len(self._groups),
            "ds_version": WRITTEN_FOR,
            "param_slice_mappings": [
                OrderedDict((place.name, _Fragment(numel=place.numel, start=place.at)) for place in one.places)
                for one in held
            ],
        }

    # ---------------------------------------------------------------- the model
    def _model_state(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return all that the model's files hold but for its tensors."""
        state = self._run.model_state(self._reader)
        del state["universal_checkpoint_info"]
        named = {key: value for key, value in state["ds_config"].items() if key == "scheduler"}
        infos = self._infos
        shapes = [OrderedDict((name, torch.Size(infos[name].shape)) for name in names) for _, names in self._groups]
        frozen = {} if self._target.stage > 1 else {"frozen_param_shapes": None, "frozen_param_fragments": None}
        own = {"param_shapes": shapes, "dp_world_size": self._target.world_size, "ds_config": config | named}
        return {**state, **frozen, **own}

    def _weights(self, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements of a parameter, in the model's type."""
        count = self._numels[name] - start if numel is None else numel
        dtype: torch.dtype = getattr(torch, self._infos[name].dtype)
        return read_state(self._reader, name, WEIGHTS, start, count).to(dtype)

    def _module(self) -> dict[str, Any]:
        manifest = self._reader.manifest
        module = OrderedDict((name, self._weights(name).view(info.shape)) for name, info in self._infos.items())
        module.update((info.name, self._reader.read_buffer(info.name)) for info in manifest.buffers)
        module.update((alias, module[name]) for alias, name in manifest.tied.items())
        frozen = OrderedDict((name, module[name]) for name in self._run.frozen(self._reader))
        return {"module": module} | ({"frozen_param_fragments": frozen} if self._target.stage > 1 else {})

    def _module_of_stage_3(self, rank: int) -> dict[str, Any]:
        """Return a model of empty parameters, and this rank's part of frozen ones, filled up."""
        manifest = self._reader.manifest
        types = {name: getattr(torch, info.dtype) for name, info in self._infos.items()}
        types |= {alias: types[name] for alias, name in manifest.tied.items()}
        module = OrderedDict((name, torch.empty(0, dtype=dtype)) for name, dtype in types.items())
        module.update((info.name, self._reader.read_buffer(info.name)) for info in manifest.buffers)
        part = {"module": module, "frozen_param_fragments": OrderedDict(self._fragments(rank))}
        return part if rank == 0 else part | {"shared_params": {}}

    def _fragments(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._run.frozen(self._reader):
            numel = self._numels[name]
            [place], size = self._target.places({name: numel}, rank)
            values = self._weights(name, min(place.start, numel), place.numel)
            yield name, torch.cat([values, values.new_zeros(size - place.numel)])


def _loss_scale(manifest: Manifest) -> dict[str, Any]:
    guard, scale = manifest.step_guard, manifest.loss_scale
    scaler: StandIn = _LossScaler(cur_scale=scale, dynamic=False)
    dynamic = "cur_iter" in guard and scale != 1
    if dynamic:
        known = {key: guard[key] for key in ("cur_iter", "last_overflow_iter", "cur_hysteresis") if key in guard}
        scaler = _DynamicLossScaler(
            cur_scale=scale,
            dynamic=True,
            **{"cur_iter": 0, "last_overflow_iter": -1, "cur_hysteresis": 2, **known},
            scale_factor=2.0,
            scale_window=1000,
            min_scale=1,
            delayed_shift=2,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=True,
            dtype=torch.float16,
        )
    return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}
