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

from conversion.deepspeed import KINDS, part_lengths
from conversion.pickles import StandIn, save_anything
from conversion.target import new_folder
from conversion.universal import MODEL_FILE, RANK_MODEL_FILE, WEIGHTS, WRITTEN_FOR, Run, Written, read_state
from hf_zero.checkpoint.folders import LATEST_NAME, chosen
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
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
        """Of each flat group its parameter group, and its parameters in order."""
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
        """What a rank has of a flat group, and the size of its flat tensor."""
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
            _write(reader, run, target, folder / name)
            (folder / LATEST_NAME).write_text(name)
    remarks = [_ORDER, *run.remarks]
    if _scale(reader) != 1:
        remarks.append("The loss scale goes on where it was, with DeepSpeed's default window, hysteresis and minimum")
    return Written(Path(dst) / name, tuple(remarks), f"load it at stage {target.stage} on {ranks} ranks")


def _write(reader: CheckpointReader, run: Run, target: _Target, folder: Path) -> None:
    numels = {info.name: math.prod(info.shape) for info in reader.manifest.params}
    groups = target.groups(run, numels)
    config = {"zero_optimization": {"stage": target.stage}}
    own = {"ds_config": config, "ds_version": WRITTEN_FOR}
    prefix = "bf16_" if any(info.dtype == "bfloat16" for info in reader.manifest.params) else ""
    model = _model_state(reader, run, target, groups) | {"ds_config": config | _scheduler(reader, run)}
    for rank in range(target.world_size):
        if target.stage == 3:
            part = _module_of_stage_3(reader, run, target, rank)
            save_anything(model | part, folder / RANK_MODEL_FILE.format(rank))
        tensors = [_rank_tensors(reader, target, {name: numels[name] for name in names}, rank) for _, names in groups]
        states = (_stage_3 if target.stage == 3 else _stage_2)(reader, run, target, groups, tensors)
        path = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        save_anything({"optimizer_state_dict": states, **own}, path, _CLASSES)
    if target.stage < 3:
        save_anything(model | _module(reader, run, target.stage), folder / MODEL_FILE)


@dataclass(frozen=True)
class _RankTensors:
    """What a rank has of a flat group."""

    places: list[_Place]
    used: int  # elements that belong to parameters, from the start
    tensors: dict[str, torch.Tensor]  # WEIGHTS and the optimizer's states


def _rank_tensors(reader: CheckpointReader, target: _Target, numels: Mapping[str, int], rank: int) -> _RankTensors:
    places, size = target.places(numels, rank)
    places = [place for place in places if place.numel > 0]
    tensors = {kind: torch.zeros(size) for kind in (WEIGHTS, *KINDS)}
    for place in places:
        for kind, flat in tensors.items():
            flat[place.at : place.at + place.numel] = read_state(reader, place.name, kind, place.start, place.numel)
    return _RankTensors(places, max((place.at + place.numel for place in places), default=0), tensors)


def _optimizer(run: Run, groups: Sequence[tuple[int, list[str]]], held: Sequence[_RankTensors]) -> dict[str, Any]:
    """The state dict of torch's Adam or of DeepSpeed's, which look for different hyperparameters."""
    owned: dict[int, list[int]] = {number: [] for number in range(len(run.groups))}
    for index, (number, _) in enumerate(groups):
        owned[number].append(index)
    states = [{"step": torch.tensor(run.step), **{kind: one.tensors[kind] for kind in KINDS}} for one in held]
    options = [{"bias_correction": True, **group, "params": owned[n]} for n, group in enumerate(run.groups)]
    return {"state": dict(enumerate(states)), "param_groups": options}


def _stage_3(
    reader: CheckpointReader,
    run: Run,
    target: _Target,
    groups: Sequence[tuple[int, list[str]]],
    held: Sequence[_RankTensors],
) -> dict[str, Any]:
    return {
        "zero_stage": 3,
        **_loss_scale(reader),
        "partition_count": target.world_size,
        "optimizer_state_dict": _optimizer(run, groups, held),
        "fp32_flat_groups": [one.tensors[WEIGHTS] for one in held],
    }


def _stage_2(
    reader: CheckpointReader,
    run: Run,
    target: _Target,
    groups: Sequence[tuple[int, list[str]]],
    held: Sequence[_RankTensors],
) -> dict[str, Any]:
    return {
        **_loss_scale(reader),
        "base_optimizer_state": _optimizer(run, groups, held),
        # Without what fills up the last parts.
        "single_partition_of_fp32_groups": [one.tensors[WEIGHTS][: one.used].clone() for one in held],
        "zero_stage": target.stage,
        "group_paddings": [one.tensors[WEIGHTS].numel() - one.used for one in held],
        "param_alignment_paddings": [[0] * len(names) for _, names in groups],
        "partition_count": [target.world_size] * len(groups),
        "ds_version": WRITTEN_FOR,
        "param_slice_mappings": [
            OrderedDict((place.name, _Fragment(numel=place.numel, start=place.at)) for place in one.places)
            for one in held
        ],
    }


def _scale(reader: CheckpointReader) -> float:
    return float(reader.manifest.step_guard.get("cur_scale", 1))


def _loss_scale(reader: CheckpointReader) -> dict[str, Any]:
    guard = reader.manifest.step_guard
    scaler: StandIn = _LossScaler(cur_scale=_scale(reader), dynamic=False)
    dynamic = "cur_iter" in guard and _scale(reader) != 1
    if dynamic:
        known = {key: guard[key] for key in ("cur_iter", "last_overflow_iter", "cur_hysteresis") if key in guard}
        scaler = _DynamicLossScaler(
            cur_scale=_scale(reader),
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


# -------------------------------------------------------------------- the model
def _model_state(
    reader: CheckpointReader, run: Run, target: _Target, groups: Sequence[tuple[int, list[str]]]
) -> dict[str, Any]:
    """What the model's files hold but for its tensors."""
    state = run.model_state(reader)
    del state["universal_checkpoint_info"]
    shapes = [OrderedDict((name, torch.Size(reader.shape(name))) for name in names) for _, names in groups]
    frozen = {} if target.stage > 1 else {"frozen_param_shapes": None, "frozen_param_fragments": None}
    return {**state, **frozen, "param_shapes": shapes, "dp_world_size": target.world_size}


def _scheduler(reader: CheckpointReader, run: Run) -> dict[str, Any]:
    config: dict[str, Any] = run.model_state(reader)["ds_config"]
    return {key: value for key, value in config.items() if key == "scheduler"}


def _weights(reader: CheckpointReader, name: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
    """Elements of a parameter, in the model's type."""
    info = next(info for info in reader.manifest.params if info.name == name)
    count = math.prod(info.shape) - start if numel is None else numel
    dtype: torch.dtype = getattr(torch, info.dtype)
    return read_state(reader, name, WEIGHTS, start, count).to(dtype)


def _module(reader: CheckpointReader, run: Run, stage: int) -> dict[str, Any]:
    module = OrderedDict((i.name, _weights(reader, i.name).view(i.shape)) for i in reader.manifest.params)
    module.update((info.name, reader.read_buffer(info.name)) for info in reader.manifest.buffers)
    module.update((alias, module[name]) for alias, name in reader.manifest.tied.items())
    frozen = OrderedDict((name, module[name]) for name in run.frozen(reader))
    return {"module": module} | ({"frozen_param_fragments": frozen} if stage > 1 else {})


def _module_of_stage_3(reader: CheckpointReader, run: Run, target: _Target, rank: int) -> dict[str, Any]:
    """Parameters are empty in the model, and of frozen ones there is this rank's part, filled up."""
    types = {info.name: getattr(torch, info.dtype) for info in reader.manifest.params}
    types |= {alias: types[name] for alias, name in reader.manifest.tied.items()}
    module = OrderedDict((name, torch.empty(0, dtype=dtype)) for name, dtype in types.items())
    module.update((info.name, reader.read_buffer(info.name)) for info in reader.manifest.buffers)
    part = {"module": module, "frozen_param_fragments": OrderedDict(_fragments(reader, run, target, rank))}
    return part if rank == 0 else part | {"shared_params": {}}


def _fragments(reader: CheckpointReader, run: Run, target: _Target, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name in run.frozen(reader):
        numel = math.prod(reader.shape(name))
        [place], size = target.places({name: numel}, rank)
        values = _weights(reader, name, min(place.start, numel), place.numel)
        yield name, torch.cat([values, values.new_zeros(size - place.numel)])
