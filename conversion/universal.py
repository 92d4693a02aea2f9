"""DeepSpeed's universal checkpoints, which it loads at any world size, to and from those of hf_zero.

[Note: universal format]
A folder holds `latest_universal`, which names the tag, and in TAG/:

    zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt   {"param": the full tensor}, and from stage 3 that tensor alone;
                                                        of frozen parameters there is but fp32.pt
    zero/PARAMETER/step.pt                              the optimizer's step; folders that come from stage 3 lack it
    zero/optimizer_state.pt                             hyperparameters; at stage 3 also the step, as rank 0 had it
    mp_rank_00_model_states.pt                          stages 1 and 2: buffers, counts, the scheduler's state
    zero_pp_rank_R_mp_rank_00_model_states.pt           the same at stage 3, of each rank R; rank 0's is read at a load

ds_to_universal.py of DeepSpeed writes such folders, and `"checkpoint": {"load_universal": true}` loads them. What is
written here has both names of the model's file, so every stage loads it.

One tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.client_state import decode_client_state
from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.format import STATE_MARK, Manifest, zero_folder
from hf_zero.checkpoint.optimizer_state import ATTACHED, restored
from hf_zero.checkpoint.reader import CheckpointReader, open_checkpoint
from hf_zero.checkpoint.writer import Chunked
from hf_zero.conversion.dcp import HOW, SAME_AS_ADAMW, group_for_torch
from hf_zero.conversion.deepspeed import (
    KINDS,
    OWN_KEYS,
    STAND_INS,
    Shape,
    Source,
    Summary,
    base_state,
    buffer_names,
    count_in,
    entry,
    frozen_param,
    is_sharded,
    shapes_of,
    shared_names,
    write_converted,
)
from hf_zero.conversion.pickles import load_anything, load_pickle, save_anything
from hf_zero.conversion.target import ConvertedParam, check_frozen_are_there, new_folder
from hf_zero.errors import CheckpointError
from hf_zero.layout import Piece
from hf_zero.progress import progress

LATEST = "latest_universal"
_PARAM, _STEP, WEIGHTS, _GLOBAL = "param", "step.pt", "fp32", "optimizer_state.pt"
MODEL_FILE, RANK_MODEL_FILE = "mp_rank_00_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"
_SUB_GROUP = 10**9  # DeepSpeed's default: so many elements are a group of their own at stage 3
WRITTEN_FOR = "0.19.8"  # the DeepSpeed whose format this is
_VERSION = {"universal_checkpoint_version": 0.4}


# -------------------------------------------------------------------- hf_zero -> universal
@dataclass(frozen=True)
class Written:
    """The result of a conversion to DeepSpeed: what it will not take from it, and how it is loaded."""

    folder: Path
    remarks: tuple[str, ...]
    how: str


def to_universal(src: str | Path, dst: str | Path) -> Written:
    """Write the checkpoint `src` of hf_zero as the universal checkpoint `dst`, which appears complete or not at all.

    Raises:
        CheckpointError: `src` is no complete checkpoint of Adam or AdamW with all its weights, or its parameters stand
            at different steps, which DeepSpeed cannot hold; `dst` exists.
    """
    with open_checkpoint(chosen(src)) as reader:
        reader.verify_before_reading()
        run = Run.of(reader)
        name = f"global_step{reader.manifest.global_step}_universal"
        with new_folder(Path(dst)) as folder:
            zero = folder / name / "zero"
            zero.mkdir(parents=True)
            with progress(f"Writing {name}", reader.manifest.nbytes) as reader.on_read:
                for param in (info.name for info in reader.manifest.params):
                    _write_param(reader, run, _param_folder(zero, param), param)
            save_anything(run.optimizer_state(reader), zero / _GLOBAL)
            model = run.model_state(reader)
            for file in (MODEL_FILE, RANK_MODEL_FILE.format(0)):
                save_anything(model, folder / name / file)
            (folder / LATEST).write_text(name)
        remarks = _universal_remarks(reader, run.groups)
    how = 'load it with "checkpoint": {"load_universal": true}'
    return Written(Path(dst) / name, (*remarks, *run.remarks), how)


def _write_param(reader: CheckpointReader, run: Run, folder: Path, name: str) -> None:
    folder.mkdir()
    shape = reader.shape(name)
    trained = name in run.group_of
    for kind in (WEIGHTS, *KINDS) if trained else (WEIGHTS,):
        value = read_state(reader, name, kind, 0, math.prod(shape))
        # DeepSpeed cuts it along the first dimension, so a number has one as well.
        save_anything({"cat_dim": 0, _PARAM: value.view(shape or (1,))}, folder / f"{kind}.pt")
    if trained:
        save_anything(torch.tensor(run.step), folder / _STEP)


def read_state(reader: CheckpointReader, name: str, kind: str, start: int, numel: int) -> torch.Tensor:
    """Read elements of a parameter's weights (WEIGHTS) or of an optimizer state, in fp32."""
    held = (reader.weight_kind(name) or "") if kind == WEIGHTS else kind
    if held in reader.kinds(name):
        return reader.read(name, held, [Piece(name, start, numel, 0, 0)]).float()
    return torch.zeros(numel)  # of no elements, or not updated so far: that is Adam's state at step 0


def _param_folder(zero: Path, name: str) -> Path:
    if name in ("", ".", "..", _GLOBAL) or Path(name).name != name or "\0" in name:
        raise CheckpointError(f"{zero.parent}: a parameter is called {name!r}, which cannot be the name of a folder")
    return zero / name


@dataclass(frozen=True)
class Run:
    """All that DeepSpeed needs to know of a run of hf_zero beside its tensors."""

    groups: list[dict[str, Any]]
    group_of: Mapping[str, int]  # of the trained parameters
    step: float
    remarks: list[str]

    @classmethod
    def of(cls, reader: CheckpointReader) -> Run:
        manifest = reader.manifest
        saved_by = manifest.optimizer
        if not manifest.param_groups or saved_by not in ("Adam", "AdamW", *SAME_AS_ADAMW):
            raise CheckpointError(
                f"{reader.folder} was saved with {saved_by or 'no optimizer'}: a checkpoint of DeepSpeed "
                "holds Adam and AdamW. For the weights alone use `hf-zero consolidate`."
            )
        check_frozen_are_there(reader)
        trained = [slot.name for layout in manifest.layouts if layout.trainable for slot in layout.slots]
        groups = [group_for_torch(reader, group) for group in manifest.param_groups]
        # DeepSpeed chooses itself how an update is computed.
        groups = [
            {"amsgrad": False, **{key: value for key, value in group.items() if key not in HOW}} for group in groups
        ]
        group_of = {name: manifest.param_group_of.get(name, 0) for name in trained}
        return cls(groups, group_of, _common_step(reader, trained), _remarks(reader))

    def frozen(self, reader: CheckpointReader) -> list[str]:
        """Return the names of parameters that are not trained."""
        return [info.name for info in reader.manifest.params if info.name not in self.group_of]

    def optimizer_state(self, reader: CheckpointReader) -> dict[str, Any]:
        groups = [{**group, "params": [number]} for number, group in enumerate(self.groups)]
        state = {number: {"step": torch.tensor(self.step)} for number in range(len(groups))}
        # DeepSpeed at stage 3 gives the first group's values to all groups, so there it gets those that all have.
        own = _differing(self.groups)
        common = [{key: value for key, value in group.items() if key not in own} for group in groups]
        return {
            "zero_stage": reader.manifest.stage,
            "ds_version": WRITTEN_FOR,
            "param_groups": groups,
            "optimizer_state_dict": {"state": state, "param_groups": common},  # where stage 3 looks
        }

    def model_state(self, reader: CheckpointReader) -> dict[str, Any]:
        manifest = reader.manifest
        shapes = {info.name: torch.Size(info.shape) for info in manifest.params}
        names: dict[int | None, list[str]] = {number: [] for number in (*range(len(self.groups)), None)}
        for name in shapes:
            names[self.group_of.get(name)].append(name)
        module = {info.name: torch.empty(0, dtype=getattr(torch, info.dtype)) for info in manifest.params}
        buffers = {info.name: reader.read_buffer(info.name) for info in manifest.buffers}
        kind = manifest.lr_scheduler_class
        named = {} if kind is None else {"scheduler": {"type": kind}}
        frozen = OrderedDict((name, shapes[name]) for name in names.pop(None))
        client = decode_client_state(manifest.client_state)
        given = client if isinstance(client, dict) else {}
        return {
            **{key: value for key, value in given.items() if key not in OWN_KEYS},
            "module": module | buffers,
            "buffer_names": list(buffers),
            "optimizer": None,
            "param_shapes": [OrderedDict((name, shapes[name]) for name in held) for held in names.values()],
            "frozen_param_shapes": frozen,
            "frozen_param_fragments": None,
            "shared_params": dict(manifest.tied),
            "lr_scheduler": _scheduler_state(manifest),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": manifest.skipped_steps,
            "global_steps": manifest.global_step,
            "dp_world_size": manifest.processes or manifest.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": {"zero_optimization": {"stage": manifest.stage}, **named},
            "ds_version": WRITTEN_FOR,
            "universal_checkpoint_info": dict(_VERSION),
        }


def _differing(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name hyperparameters that are not the same in all groups."""
    keys = sorted({key for group in groups for key in group})
    return [key for key in keys if any(key not in one or one[key] != groups[0].get(key) for one in groups)]


def _common_step(reader: CheckpointReader, trained: list[str]) -> float:
    """The step that all parameters stand at: DeepSpeed has one for all.

    Raises:
        CheckpointError: There are several, or state that is not Adam's.
    """
    steps: dict[float, str] = {}
    for name in trained:
        if not math.prod(reader.shape(name)):
            continue
        held = {kind for kind in reader.kinds(name) if not kind.startswith(ATTACHED)} - {reader.weight_kind(name)}
        scalars = dict(restored(key, value) for key, value in reader.scalars(name).items())
        state = {*held, *scalars}
        if state not in (set(), {*KINDS, "step"}):
            raise CheckpointError(
                f"{reader.folder}: the optimizer's state of {name} is {', '.join(sorted(state))}: DeepSpeed's "
                f"universal format holds that of Adam ({', '.join(KINDS)}, step)"
            )
        steps.setdefault(float(scalars.get("step", 0)), name)
    odd = [info.name for info in reader.manifest.buffers if STATE_MARK in info.name]
    if odd:
        raise CheckpointError(f"{reader.folder}: the optimizer's state {odd[0]} is not of its parameter's shape")
    if len(steps) > 1:
        said = ", ".join(f"{name} at {step:.0f}" for step, name in sorted(steps.items()))
        raise CheckpointError(
            f"{reader.folder}: the optimizer's steps differ ({said}), as of parameters that were unfrozen later, and "
            "DeepSpeed keeps one for all. For the weights alone use `hf-zero consolidate`."
        )
    return next(iter(steps), 0.0)


def _universal_remarks(reader: CheckpointReader, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what DeepSpeed does not take from a universal checkpoint."""
    manifest = reader.manifest
    remarks = []
    frozen = sum(len(layout.slots) for layout in manifest.layouts if not layout.trainable)
    if frozen or manifest.buffers:
        remarks.append(
            f"DeepSpeed takes no buffers ({len(manifest.buffers)}) and no frozen parameters ({frozen}) from a "
            "universal checkpoint: load them into the model before deepspeed.initialize"
        )
    if len(groups) > 1 or sum(math.prod(info.shape) for info in manifest.params) > _SUB_GROUP:
        remarks.append(
            "DeepSpeed at stage 3 lets all parameter groups count up one and the same step. After load_checkpoint: "
            'for state in engine.optimizer.optimizer.state.values(): state["step"] = state["step"].clone()'
        )
    own = _differing(groups)
    if own:
        remarks.append(
            f"DeepSpeed at stage 3 does not take {', '.join(own)}, which differ between the parameter groups: its "
            "optimizer keeps those that it was made with"
        )
    if manifest.loss_scale != 1:
        remarks.append("left out: the loss scale; DeepSpeed starts at that of its configuration")
    return remarks


def _remarks(reader: CheckpointReader) -> list[str]:
    """Say what DeepSpeed takes from no file."""
    manifest = reader.manifest
    attached = sorted({kind for kinds in manifest.kinds.values() for kind in kinds if kind.startswith(ATTACHED)})
    remarks = [f"left out: {kind.removeprefix(ATTACHED)}, which is not the optimizer's" for kind in attached]
    if manifest.lr_scheduler is not None and _scheduler_state(manifest) is None:
        remarks.append(
            f"left out: the state of {manifest.lr_scheduler_class}; load with load_lr_scheduler_states=False"
        )
    client = decode_client_state(manifest.client_state)
    clash = sorted(OWN_KEYS & {*client}) if isinstance(client, dict) else ["the whole"] if client else []
    remarks += [f"left out: {key} of client_state, which is a name of DeepSpeed's own" for key in clash]
    return remarks


def _scheduler_state(manifest: Manifest) -> dict[str, Any] | None:
    """The scheduler's state, if JSON can hold it: nested, such as MultiStepLR's, it has lost the kinds of its keys."""
    state = manifest.lr_scheduler
    return None if state is None or any(isinstance(value, dict) for value in state.values()) else dict(state)


# -------------------------------------------------------------------- universal -> hf_zero
def from_universal(src: str | Path, dst: str | Path, tag: str | None = None) -> Summary:
    """Write the universal checkpoint `src` of DeepSpeed as the checkpoint `dst` of hf_zero.

    Args:
        src: The folder with `latest_universal`, or that of a tag.
        tag: Which checkpoint in `src`; None is the one that `latest_universal` names.
    Raises:
        CheckpointError: `src` is no whole universal checkpoint of Adam or AdamW, or `dst` exists.
    """
    files = _open(chosen(src, tag, LATEST))
    group_of: dict[str, int] = {}
    params = []
    owners = {index: number for number, group in enumerate(base_state(files, 0)[1]) for index in group["params"]}
    groups = entry(files.model, "param_shapes", list, files.model_path)
    if sorted(owners) != [*range(len(groups))]:
        raise CheckpointError(f"{files.folder}: {_GLOBAL} and {files.model_path.name} are not of one save")
    for index, group in enumerate(groups):
        for name, shape in shapes_of(group, files.model_path).items():
            group_of[name] = owners[index]
            params.append(_trained(files, index, name, shape))
    params += _frozen(files, group_of)
    return write_converted(
        files, Path(dst), params, group_of, count_in(files.model, "dp_world_size", files.model_path)
    )


def _open(folder: Path) -> Source:
    if zero_folder(folder).joinpath("manifest.json").is_file():
        raise CheckpointError(f"{folder} is a checkpoint of hf_zero already: load it as it is")
    path = folder / "zero" / _GLOBAL
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no universal checkpoint of DeepSpeed: there is no zero/{_GLOBAL}. Name the folder with "
            f"the file {LATEST}, or that of a tag. (What DeepSpeed's save_checkpoint wrote: from-deepspeed.)"
        )
    state = load_pickle(path, STAND_INS)
    one = folder / MODEL_FILE
    paths = [one if one.is_file() else folder / RANK_MODEL_FILE.format(0)]
    models = [load_pickle(paths[0], STAND_INS)]
    if not one.is_file():
        ranks = count_in(models[0], "dp_world_size", paths[0])
        others = [folder / RANK_MODEL_FILE.format(rank) for rank in range(1, ranks)]
        lacking = [path for path in others if not path.is_file()]
        if lacking and models[0].get("frozen_param_shapes"):
            raise CheckpointError(f"{folder} lacks {lacking[0].name}, which holds frozen parameters")
        models += [load_pickle(path, STAND_INS) for path in others if not lacking]
    if count_in(models[0], "mp_world_size", paths[0]) != 1 or len([*folder.glob("mp_rank_*_model_states.pt")]) > 1:
        raise CheckpointError(f"{folder} is of a run with tensor parallelism, which cannot be converted")
    stage: Any = state.get("zero_stage", 1 if one.is_file() else 3)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise CheckpointError(f"{path} says stage {stage!r}: expected 0, 1, 2 or 3")
    base = state.get("optimizer_state_dict")  # stage 3 keeps its optimizer's state there
    base = {**(base if isinstance(base, dict) else {"state": {}}), "param_groups": state.get("param_groups")}
    key = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    config = models[0].get("ds_config")
    optim = {"loss_scaler": state.get("loss_scaler"), key: base}
    return Source(folder, stage, [path], [optim], paths[0], models, config if isinstance(config, dict) else {})


def _trained(files: Source, index: int, name: str, shape: Shape) -> ConvertedParam:
    folder = _param_folder(files.folder / "zero", name)
    dtype = _dtype(files, name)
    held = [kind for kind in KINDS if (folder / f"{kind}.pt").is_file()]
    foreign = sorted(
        {path.name for path in folder.glob("*.pt")} - {f"{kind}.pt" for kind in (WEIGHTS, *KINDS, "step")}
    )
    if not (folder / f"{WEIGHTS}.pt").is_file() or foreign or len(held) not in (0, len(KINDS)):
        found = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise CheckpointError(
            f"{folder} holds {found}: expected {WEIGHTS}.pt, {', '.join(f'{kind}.pt' for kind in KINDS)} of Adam or "
            "AdamW. Copy all files of one conversion."
        )
    tensors = {"master": _chunked(folder, WEIGHTS, shape, torch.float32)}
    tensors |= {kind: _chunked(folder, kind, shape, torch.float32) for kind in held}
    scalars = {"step": _step(files, folder, index)} if held else {}
    param = ConvertedParam(name, shape, dtype, True, *((tensors, scalars) if math.prod(shape) else ({}, {})))
    if not is_sharded(param):
        raise CheckpointError(f"{files.model_path}: {name} has type {dtype}, which no optimizer trains")
    return param


def _dtype(files: Source, name: str) -> torch.dtype:
    module = entry(files.model, "module", dict, files.model_path)
    return entry(module, name, torch.Tensor, files.model_path).dtype


def _chunked(folder: Path, kind: str, shape: Shape, dtype: torch.dtype) -> Chunked:
    """The tensor of a file, which is opened when it is written on."""
    path, numel = folder / f"{kind}.pt", math.prod(shape)

    def chunks() -> Iterator[torch.Tensor]:
        held = load_anything(path)
        held = held.get(_PARAM) if isinstance(held, dict) else held  # from stage 3 it is the tensor alone
        if (
            not isinstance(held, torch.Tensor)
            or not held.is_floating_point()
            or held.layout != torch.strided
            or held.numel() != numel
            or held.nbytes > held.untyped_storage().nbytes()
        ):
            raise CheckpointError(f"{path} holds no tensor of {numel} floats, as {shape} of the parameter asks for")
        yield held.detach().reshape(-1).to(dtype)

    return Chunked(numel, dtype, chunks)


def _step(files: Source, folder: Path, index: int) -> float:
    """Its own file has it, or the state of rank 0's optimizer, or its parameter group."""
    path = folder / _STEP
    if path.is_file():
        found = load_anything(path)
    else:
        path = files.optim_paths[0]
        state, groups = base_state(files, 0)
        own = state.get(index)
        found = own.get("step") if isinstance(own, dict) else None
        if found is None:
            found = next((group.get("step") for group in groups if index in group["params"]), None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 2**53:
        raise CheckpointError(f"{path}: the optimizer's step is {found!r}: expected a count")
    return float(found)


def _frozen(files: Source, trained: Mapping[str, int]) -> Iterator[ConvertedParam]:
    """Frozen parameters: in the model's file, in a file of their own, or at stage 3 in parts in those of the ranks."""
    saved = files.model.get("frozen_param_shapes")
    shapes = {} if saved is None else shapes_of(saved, files.model_path)
    module = entry(files.model, "module", dict, files.model_path)
    if saved is None and len(files.models) == 1:  # stage 1 does not name them
        other = {*buffer_names(files), *shared_names(files), *trained}
        full = {name: value for name, value in module.items() if isinstance(value, torch.Tensor) and value.numel()}
        shapes = {name: tuple(value.shape) for name, value in full.items() if name not in other}
    for name, shape in shapes.items():
        if name in trained:
            raise CheckpointError(f"{files.model_path}: {name} is named as trained and as frozen")
        numel, folder = math.prod(shape), _param_folder(files.folder / "zero", name)
        value = entry(module, name, torch.Tensor, files.model_path)
        if value.numel() == numel:
            yield frozen_param(files, name, shape, [value])
        elif (folder / f"{WEIGHTS}.pt").is_file():
            chunked = _chunked(folder, WEIGHTS, shape, value.dtype)
            yield ConvertedParam(name, shape, value.dtype, False, {"param": chunked})
        else:
            fragments = [entry(one, "frozen_param_fragments", dict, files.model_path) for one in files.models]
            values = [entry(one, name, torch.Tensor, files.model_path) for one in fragments]
            yield frozen_param(files, name, shape, values)
