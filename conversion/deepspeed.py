"""A ZeRO checkpoint of DeepSpeed as one of hf_zero: fp32 weights, optimizer states and what a run needs beside.

[Note: DeepSpeed's layout]
A folder holds `latest`, which names the tag, and in TAG/ for rank R of N:

    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   the rank's fp32 shards, and the optimizer's state of them
    mp_rank_00_model_states.pt                         stages 1 and 2: the model, written by rank 0
    zero_pp_rank_R_mp_rank_00_model_states.pt          stage 3: buffers, and shards of frozen parameters

Flat groups: stages 1 and 2 keep each parameter group as one flat tensor, its parameters one behind the other (with the
gaps of `param_alignment_paddings`), aligned at the end and cut into N equal parts. Of the last parts the alignment is
not saved. Stage 3 cuts each parameter into N parts of ceil(numel / N), the last one filled up, and keeps what a rank
has of a sub-group one behind the other; a parameter group is made of whole sub-groups. `param_shapes` names the
parameters of each flat group, in order.

Files are mapped and written on in pieces, so memory does not depend on the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_zero.checkpoint.client_state import encode_client_state
from hf_zero.checkpoint.folders import chosen
from hf_zero.checkpoint.format import MOST_NUMEL, zero_folder
from hf_zero.checkpoint.rank_reader import CHUNK_BYTES
from hf_zero.checkpoint.scheduler_state import plain
from hf_zero.checkpoint.writer import Chunked, Scalar
from hf_zero.conversion.pickles import StandIn, load_pickle
from hf_zero.conversion.target import NOTHING_KNOWN, ConvertedParam, write_checkpoint
from hf_zero.errors import CheckpointError

# DeepSpeed's pickles hold these of its own classes.
STAND_INS: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": StandIn,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": StandIn,
    "deepspeed.utils.tensor_fragment.fragment_address": StandIn,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
_OPTIM_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_FOREIGN = ("layer_*_model_states.pt", "expp_rank_*", "*expert_*_model_states.pt")
KINDS = ("exp_avg", "exp_avg_sq")  # Adam's and AdamW's
_ADAMS = frozenset(["adam", "adamw", "torch_adam", "fusedadam", "deepspeedcpuadam"])
# Everything in a file of model states that is not the user's client_state.
OWN_KEYS = frozenset(
    """module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info sparse_tensor_module_names""".split()
)
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

_DEEPSPEEDS_OWN = {"latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py"}
Kind = TypeVar("Kind")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """A summary of what was converted."""

    folder: Path  # of DeepSpeed's files
    stage: int
    world_size: int
    global_step: int
    num_params: int
    numel: int


@dataclass(frozen=True)
class Part:
    """A range of one rank's flat tensor."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class FlatGroup:
    """Parameters that lie in one flat tensor per rank. See [Note: DeepSpeed's layout]."""

    param_group: int
    shapes: Mapping[str, Shape]
    gaps: Sequence[int]  # elements behind each parameter; stages 1 and 2
    tensors: Sequence[Mapping[str, torch.Tensor]]  # by rank: "master" and the optimizer's state
    scalars: Mapping[str, Scalar]

    def sizes(self, kind: str) -> list[int]:
        return [held[kind].numel() for held in self.tensors]


@dataclass(frozen=True)
class Source:
    """The files of one checkpoint, mapped."""

    folder: Path
    stage: int
    optim_paths: Sequence[Path]
    optims: Sequence[Mapping[str, Any]]  # `optimizer_state_dict` of each rank
    model_path: Path
    models: Sequence[Mapping[str, Any]]  # one at stages 1 and 2, one of each rank at stage 3
    config: Mapping[str, Any] = field(default_factory=dict)  # DeepSpeed's JSON

    @property
    def world_size(self) -> int:
        return len(self.optims)

    @property
    def model(self) -> Mapping[str, Any]:
        return self.models[0]


def convert(source: str | Path, target: str | Path, tag: str | None = None) -> Summary:
    """Write the checkpoint of DeepSpeed in `source` as a checkpoint folder of hf_zero, `target`.

    Args:
        source: The folder with `latest`, or that of a tag.
        tag: Which checkpoint in `source`; None is the one that `latest` names.
    Raises:
        CheckpointError: `source` is no whole ZeRO checkpoint of Adam or AdamW, or `target` exists.
    """
    files = open_source(chosen(source, tag))
    groups = flat_groups(files)
    trained = [one for group in groups for one in _trainable(files, group)]
    params = [*trained, *_frozen(files, {one.name for one in trained})]
    group_of = {name: group.param_group for group in groups for name in group.shapes}
    return write_converted(files, Path(target), params, group_of, files.world_size)


def trainer_files(folder: Path) -> list[Path]:
    """Find the files that transformers' Trainer has put beside DeepSpeed's, without which it does not resume."""
    if not (folder / "trainer_state.json").is_file():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _DEEPSPEEDS_OWN)


# -------------------------------------------------------------------- files
def open_source(folder: Path) -> Source:
    """Map the files of all ranks, and check that all of them are there."""
    paths = _optim_paths(folder)
    optims = []
    for path in paths:
        optims.append(entry(load_pickle(path, STAND_INS), "optimizer_state_dict", dict, path))
    count = optims[0].get("partition_count")
    counts = count if isinstance(count, list) else [count]
    if not counts or any(type(one) is not int or one != len(paths) for one in counts):
        raise CheckpointError(
            f"{folder} holds the files of {len(paths)} ranks, and {paths[0].name} was written by "
            f"{'/'.join(dict.fromkeys(map(str, counts)))}: copy the files of all ranks of one save. (Expert "
            "parallelism, MiCS and hpZ cannot be converted.)"
        )
    one_file = folder / "mp_rank_00_model_states.pt"
    is_stage_3 = "fp32_flat_groups" in optims[0]
    names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(paths))]
    model_paths = [folder / name for name in names] if is_stage_3 else [one_file]
    models = [load_pickle(path, STAND_INS) for path in model_paths]
    config = models[0].get("ds_config")
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    named = zero.get("stage", 1) if isinstance(zero, dict) else 1
    stage: Any = optims[0].get("zero_stage", named)  # bf16 with fp32 gradients at stage 1 does not save it
    if type(stage) is not int or stage not in ((3,) if is_stage_3 else (1, 2)):
        raise CheckpointError(f"{paths[0]} says stage {stage!r}, which does not fit what it holds: expected 1, 2 or 3")
    if count_in(models[0], "mp_world_size", model_paths[0]) != 1:
        raise CheckpointError(f"{model_paths[0]} is of a run with tensor parallelism, which cannot be converted")
    return Source(folder, int(stage), paths, optims, model_paths[0], models, config)


def _optim_paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name the one that DeepSpeed saved into")
    if zero_folder(folder).is_dir():
        raise CheckpointError(f"{folder} is a checkpoint of hf_zero already: load it as it is")
    matches = [(match, path) for path in folder.iterdir() if (match := _OPTIM_FILE.fullmatch(path.name))]
    if not matches:
        raise CheckpointError(
            f"{folder} holds no ZeRO checkpoint of DeepSpeed: there is no zero_pp_rank_0_mp_rank_00_optim_states.pt. "
            "Name the folder with the file `latest`, or that of a tag (such as global_step500)."
        )
    foreign = [path.name for pattern in _FOREIGN for path in folder.glob(pattern)]
    foreign += [path.name for match, path in matches if int(match[2])]
    if foreign:
        raise CheckpointError(
            f"{folder} was written with experts, a pipeline or tensor parallelism ({min(foreign)}), which cannot be "
            "converted: only ZeRO's own sharding can"
        )
    found = {int(match[1]): path for match, path in matches}
    if len(found) < len(matches):
        raise CheckpointError(
            f"{folder} holds files of two saves, with and without the prefix bf16_: delete the older"
        )
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        lacking = ", ".join(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in missing[:4])
        raise CheckpointError(
            f"{folder} lacks the files of {len(missing)} ranks: {lacking}. Copy them from their nodes."
        )
    return [found[rank] for rank in range(len(found))]


def entry(content: Mapping[str, Any], key: str, kind: type[Kind], path: Path) -> Kind:
    """An entry of a file, of the type that DeepSpeed gives it."""
    found = content.get(key)
    if not isinstance(found, kind):
        raise CheckpointError(
            f"{path}: {key} is {type(found).__name__}, expected {kind.__name__}: the file is not as DeepSpeed's ZeRO "
            "optimizer writes it"
        )
    return found


def count_in(content: Mapping[str, Any], key: str, path: Path) -> int:
    found = entry(content, key, int, path)
    if isinstance(found, bool) or not 0 <= found < MOST_NUMEL:
        raise CheckpointError(f"{path}: {key} is {found}: expected a count")
    return found


# -------------------------------------------------------------------- flat groups
def flat_groups(files: Source) -> list[FlatGroup]:
    """The flat groups of all parameter groups, in the order of `param_shapes`, with the tensors of all ranks."""
    shapes = [shapes_of(one, files.model_path) for one in entry(files.model, "param_shapes", list, files.model_path)]
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    masters = [entry(held, key, list, path) for held, path in zip(files.optims, files.optim_paths, strict=True)]
    bases = [base_state(files, rank) for rank in range(files.world_size)]
    owners = {index: number for number, group in enumerate(bases[0][1]) for index in group["params"]}
    same_groups = all(len(groups) == len(bases[0][1]) for _, groups in bases)
    if any(len(one) != len(shapes) for one in masters) or sorted(owners) != [*range(len(shapes))] or not same_groups:
        raise CheckpointError(
            f"{files.folder}: {files.model_path.name} names {len(shapes)} groups of parameters, the ranks hold "
            f"{[len(held) for held in masters]}, their optimizer {len(owners)}: these are not files of one save"
        )
    gaps = files.optims[0].get("param_alignment_paddings")
    gaps = [[0] * len(names) for names in shapes] if gaps is None else gaps
    if not isinstance(gaps, list) or len(gaps) != len(shapes) or not all(isinstance(one, list) for one in gaps):
        raise CheckpointError(
            f"{files.optim_paths[0]}: param_alignment_paddings does not fit its {len(shapes)} groups"
        )
    groups = []
    for index, names in enumerate(shapes):
        states = [state.get(index, {}) for state, _ in bases]
        held = [_rank_tensors(files, rank, index, masters[rank][index], states[rank]) for rank in range(len(bases))]
        if len({frozenset(one) for one in held}) > 1:
            raise CheckpointError(f"{files.folder}: the ranks hold different states of group {index}: not of one save")
        scalars = _scalars(files, index, states, [groups_[owners[index]] for _, groups_ in bases])
        if len(held[0]) > 1 and not scalars:
            raise CheckpointError(f"{files.optim_paths[0]}: the optimizer's step of group {index} is missing")
        groups.append(FlatGroup(owners[index], names, gaps[index], held, scalars if len(held[0]) > 1 else {}))
    return groups


def shapes_of(value: Any, path: Path) -> dict[str, Shape]:
    sound = isinstance(value, dict) and all(
        isinstance(name, str)
        and isinstance(shape, tuple | list)
        and all(isinstance(size, int) and size >= 0 for size in shape)
        and math.prod(shape) < MOST_NUMEL
        for name, shape in value.items()
    )
    if not sound:
        raise CheckpointError(f"{path}: param_shapes does not map names to shapes: it is not a ZeRO checkpoint")
    return {name: tuple(shape) for name, shape in value.items()}


def base_state(files: Source, rank: int) -> tuple[Mapping[int, Any], list[dict[str, Any]]]:
    """State and parameter groups of the optimizer that DeepSpeed's is around."""
    path, key = files.optim_paths[rank], "optimizer_state_dict" if files.stage == 3 else "base_optimizer_state"
    if isinstance(files.optims[rank].get(key), list):
        raise CheckpointError(
            f"{path} was saved with elastic_checkpoint, which leaves the hyperparameters out: save once more with "
            '"elastic_checkpoint": false'
        )
    base = entry(files.optims[rank], key, dict, path)
    groups = entry(base, "param_groups", list, path)
    for group in groups:
        indices = group.get("params") if isinstance(group, dict) else None
        if not isinstance(indices, list) or not all(isinstance(one, int) for one in indices):
            raise CheckpointError(f"{path}: the parameter groups are not those of a torch optimizer")
    return entry(base, "state", dict, path), groups


def _rank_tensors(files: Source, rank: int, index: int, master: Any, state: Any) -> dict[str, torch.Tensor]:
    path = files.optim_paths[rank]
    state = state if isinstance(state, dict) else {"the whole": state}
    tensors = {kind: value for kind, value in state.items() if kind != "step"}
    if not {*tensors} <= {*KINDS} or (tensors and len(tensors) < len(KINDS)):
        raise CheckpointError(
            f"{path}: the optimizer's state is {', '.join(map(str, sorted(state, key=str)))}: only that of Adam and "
            f"AdamW ({', '.join(KINDS)}, step) can be converted"
        )
    tensors = {"master": master, **tensors}
    for kind, value in tensors.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.is_contiguous():
            raise CheckpointError(f"{path}: {kind} of group {index} is no plain tensor of floats")
    return {kind: value.detach().reshape(-1) for kind, value in tensors.items()}


def _scalars(
    files: Source, index: int, states: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[str, Scalar]:
    """The step count, which DeepSpeed's optimizers keep in the state, and older ones in the parameter group."""
    found = set()
    for state, group in zip(states, groups, strict=True):
        step = state.get("step", group.get("step"))
        if isinstance(step, torch.Tensor) and step.numel() == 1:
            step = step.item()
        if step is not None and not isinstance(step, int | float):
            raise CheckpointError(f"{files.folder}: the step of group {index} is a {type(step).__name__}")
        found.add(step)
    if len(found) > 1:
        raise CheckpointError(f"{files.folder}: the ranks stand at steps {sorted(map(str, found))}: not of one save")
    step = found.pop()
    return {} if step is None else {"step": float(step)}


def parts_of(files: Source, group: FlatGroup) -> Iterator[tuple[str, list[Part]]]:
    """Yield for each parameter of the group where its elements are, in order.

    Raises:
        CheckpointError: The ranks' tensors do not have the sizes that the parameters need.
    """
    yield from (_stage_3_parts if files.stage == 3 else _stage_2_parts)(files, group)


def _stage_3_parts(files: Source, group: FlatGroup) -> Iterator[tuple[str, list[Part]]]:
    ranks = files.world_size
    numels = {name: math.prod(shape) for name, shape in group.shapes.items()}
    _check_sizes(files, group, sum(-(-numel // ranks) for numel in numels.values()))
    start = 0
    for name, numel in numels.items():
        part = -(-numel // ranks)
        lengths = part_lengths(numel, part, ranks)
        yield name, [Part(rank, start, length) for rank, length in enumerate(lengths) if length]
        start += part


def part_lengths(numel: int, part: int, ranks: int) -> list[int]:
    """Cut `numel` elements into parts of `part`, one for each rank: the last ones may have fewer, or none."""
    return [min(part, max(numel - rank * part, 0)) for rank in range(ranks)]


def _check_sizes(files: Source, group: FlatGroup, wanted: int) -> None:
    for kind in group.tensors[0]:
        if {*group.sizes(kind)} != {wanted}:
            raise _unfitting(files, group, f"the ranks hold {group.sizes(kind)} elements of {kind}, expected {wanted}")


def _stage_2_parts(files: Source, group: FlatGroup) -> Iterator[tuple[str, list[Part]]]:
    ranks = files.world_size
    if len(group.gaps) != len(group.shapes) or not all(isinstance(gap, int) and gap >= 0 for gap in group.gaps):
        raise _unfitting(files, group, f"there are {len(group.gaps)} gaps for {len(group.shapes)} parameters")
    used = sum(math.prod(shape) for shape in group.shapes.values()) + sum(group.gaps)
    part = max(size for kind in group.tensors[0] for size in group.sizes(kind))
    held = {kind: group.sizes(kind) for kind in group.tensors[0]}
    # Aligned to twice the world size: more elements than that are those of another model.
    if not used <= part * ranks < used + 2 * ranks:
        raise _unfitting(files, group, f"{ranks} ranks hold {held} elements, and {used} are in the model")
    for kind, sizes in held.items():
        needed = part_lengths(used, part, ranks)
        short = [rank for rank, size in enumerate(sizes) if size < needed[rank]]
        if short:
            raise _unfitting(files, group, f"rank {short[0]} holds {sizes[short[0]]} elements of {kind}")
    start = 0
    for (name, shape), gap in zip(group.shapes.items(), group.gaps, strict=True):
        end = start + math.prod(shape)
        cuts = [(rank, max(start, rank * part), min(end, (rank + 1) * part)) for rank in range(ranks)]
        yield name, [Part(rank, low - rank * part, high - low) for rank, low, high in cuts if low < high]
        start = end + gap


def _unfitting(files: Source, group: FlatGroup, what: str) -> CheckpointError:
    first = next(iter(group.shapes), "no parameter")
    return CheckpointError(
        f"{files.folder}: in the group of {first} {what}: these are not the files of one save, or states were kept on "
        "disk (offload to nvme): copy all files of one save"
    )


# -------------------------------------------------------------------- parameters and buffers
def _trainable(files: Source, group: FlatGroup) -> Iterator[ConvertedParam]:
    module = entry(files.model, "module", dict, files.model_path)
    for name, parts in parts_of(files, group):
        kinds = group.tensors[0] if parts else ()
        chunked = {kind: _chunked([held[kind] for held in group.tensors], parts) for kind in kinds}
        dtype = entry(module, name, torch.Tensor, files.model_path).dtype
        param = ConvertedParam(name, group.shapes[name], dtype, True, chunked, group.scalars if parts else {})
        if not is_sharded(param):
            raise CheckpointError(f"{files.model_path}: {name} has type {dtype}, which no optimizer trains")
        yield param


def _chunked(flats: Sequence[torch.Tensor], parts: Sequence[Part]) -> Chunked:
    def chunks() -> Iterator[torch.Tensor]:
        for part in parts:
            for piece in flats[part.rank][part.start : part.start + part.numel].split(CHUNK_BYTES // 4):
                yield piece.float()

    return Chunked(sum(part.numel for part in parts), torch.float32, chunks)


def _frozen(files: Source, trainable: set[str]) -> Iterator[ConvertedParam]:
    """Frozen parameters: in the model at stages 1 and 2, in parts of equal size at stage 3."""
    if files.stage < 3:
        other = {*buffer_names(files), *shared_names(files), *trainable}
        module = entry(files.model, "module", dict, files.model_path)
        for name, value in module.items():
            if name not in other and isinstance(value, torch.Tensor):
                yield frozen_param(files, name, tuple(value.shape), [value])
        return
    saved = files.model.get("frozen_param_shapes")
    shapes = {} if saved is None else shapes_of(saved, files.model_path)
    for name, shape in shapes.items():
        fragments = [entry(one, "frozen_param_fragments", dict, files.model_path) for one in files.models]
        values = [entry(one, name, torch.Tensor, files.model_path) for one in fragments]
        yield frozen_param(files, name, shape, values)


def frozen_param(files: Source, name: str, shape: Shape, values: Sequence[torch.Tensor]) -> ConvertedParam:
    numel, dtype = math.prod(shape), values[0].dtype
    flats = [_dense(files, name, value).reshape(-1) for value in values]
    lengths = part_lengths(numel, -(-numel // len(flats)), len(flats))
    if any(flat.numel() < length or flat.dtype != dtype for flat, length in zip(flats, lengths, strict=True)):
        raise CheckpointError(f"{files.folder}: the parts of {name} do not make up {shape}: not the files of one save")
    pieces = [flat[:length] for flat, length in zip(flats, lengths, strict=True)]
    tensors = {"param": Chunked(numel, dtype, partial(iter, pieces))} if numel else {}
    return ConvertedParam(name, shape, dtype, False, tensors)


def is_sharded(param: ConvertedParam) -> bool:
    """hf_zero keeps frozen integers, and packed numbers of one byte, beside the buffers."""
    return param.dtype.is_floating_point and param.dtype.itemsize > 1


def joined(param: ConvertedParam) -> torch.Tensor:
    return torch.cat([piece for tensor in param.tensors.values() for piece in tensor.chunks()]).view(param.shape)


def in_model_order(files: Source, params: Sequence[ConvertedParam]) -> list[ConvertedParam]:
    order = {name: place for place, name in enumerate(entry(files.model, "module", dict, files.model_path))}
    names = [one.name for one in params]
    if len({*names}) < len(names):
        raise CheckpointError(f"{files.model_path}: a parameter is named twice: it is not as DeepSpeed writes it")
    return sorted(params, key=lambda one: order.get(one.name, len(order)))


def buffer_names(files: Source) -> list[str]:
    found = entry(files.model, "buffer_names", list, files.model_path)
    if not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"{files.model_path}: buffer_names is no list of names")
    return found


def buffers_of(files: Source) -> dict[str, torch.Tensor]:
    module = entry(files.model, "module", dict, files.model_path)
    names = [name for name in buffer_names(files) if name in module]
    return {name: _dense(files, name, entry(module, name, torch.Tensor, files.model_path)) for name in names}


def _dense(files: Source, name: str, value: torch.Tensor) -> torch.Tensor:
    """`value`, if a file can hold it: not sparse, and no few bytes that are shown as many."""
    if value.layout != torch.strided or value.nbytes > max(value.untyped_storage().nbytes(), CHUNK_BYTES):
        raise CheckpointError(f"{files.model_path}: {name} is no dense tensor")
    return value.detach()


def shared_names(files: Source) -> dict[str, str]:
    found = entry(files.model, "shared_params", dict, files.model_path)
    if not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise CheckpointError(f"{files.model_path}: shared_params does not map names to names")
    return found


def tied_names(files: Source, names: set[str]) -> dict[str, str]:
    return {other: name for other, name in shared_names(files).items() if name in names and other not in names}


# -------------------------------------------------------------------- the run
def hyperparameters(files: Source) -> list[dict[str, Any]]:
    groups = base_state(files, 0)[1]
    named = files.config.get("optimizer")
    kind = named.get("type") if isinstance(named, dict) else None
    # Lamb and RAdam keep state under the same names as Adam; their hyperparameters differ.
    adam = all(("amsgrad" in group or "bias_correction" in group) and "max_coeff" not in group for group in groups)
    if not adam or (isinstance(kind, str) and kind.lower() not in _ADAMS):
        raise CheckpointError(
            f"{files.optim_paths[0]} is of {kind or 'an optimizer with ' + ', '.join(sorted(groups[0]))}: only Adam "
            "and AdamW can be converted"
        )
    return [{key: plain(value) for key, value in group.items() if key not in ("params", "step")} for group in groups]


def write_converted(
    files: Source, target: Path, params: Sequence[ConvertedParam], group_of: Mapping[str, int], processes: int
) -> Summary:
    """Write what was read of DeepSpeed's files as the checkpoint `target`.

    Args:
        group_of: Trained parameter -> number of its parameter group.
        processes: Ranks of the run that saved.
    """
    params = in_model_order(files, params)
    buffers = buffers_of(files) | {one.name: joined(one) for one in params if not is_sharded(one)}
    client = {key: value for key, value in files.model.items() if key not in OWN_KEYS}
    scheduler, named = files.model.get("lr_scheduler"), files.config.get("scheduler")
    kind = named.get("type") if isinstance(named, dict) else None
    scaler = files.optims[0].get("loss_scaler")
    held = vars(scaler) if isinstance(scaler, StandIn) else {}
    guard = {key: held[key] for key in _SCALER_KEYS if type(held.get(key)) in (int, float)}
    run = replace(
        NOTHING_KNOWN,
        stage=files.stage,
        tied=tied_names(files, {one.name for one in params}),
        param_groups=hyperparameters(files),
        global_step=count_in(files.model, "global_steps", files.model_path),
        client_state=encode_client_state(client),
        processes=processes,
        optimizer="AdamW",
        converted_from="DeepSpeed",
        param_group_of=dict(group_of) if len({*group_of.values()}) > 1 else {},
        lr_scheduler=plain(scheduler) if isinstance(scheduler, dict) else None,
        lr_scheduler_class=kind if isinstance(scheduler, dict) and isinstance(kind, str) else None,
        step_guard={**guard, "skipped_steps": count_in(files.model, "skipped_steps", files.model_path)},
    )
    sharded = [one for one in params if is_sharded(one)]
    write_checkpoint(target, sharded, buffers, run, beside=trainer_files(files.folder.parent))
    numel = sum(math.prod(one.shape) for one in params)
    return Summary(files.folder, files.stage, processes, run.global_step, len(params), numel)
