"""Weight files of a sharded model that all ranks write: every rank gathers and writes some of the files, in turns.

transformers decides everything: names, tied weights, conversions, how the weights split into files, the index. It runs
over tensors without data ("meta"), once on every rank without writing, which gives the plan, and at the end on rank 0,
where its call that writes a file becomes a rename of the file that a rank has written. So nothing of
`save_pretrained` is copied here.

[Note: Which save] All ranks take this way, or all take the other one (rank 0 gathers and writes everything), by
answers that each rank gives and all hear. The other way is for what this one cannot do:
- ranks that do not see the folder of rank 0, and saves where not rank 0 alone writes (`save_on_each_node`):
  rank 0 has to rename what others write;
- one file: there is nothing to share out;
- a module inside the engine's model: the state dict has other names;
- PEFT, quantized, offloaded and tensor-parallel models, and models with a `save_pretrained` of their own: they do not
  save what the state dict holds;
- wrapped modules and shared buffers: transformers would look for them in vain, or take them for tied;
- conversions that compute (split or stack weights): without data there is no result, a file's tensors may be spread;
- `push_to_hub=True`: the upload looks for what has changed in the folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, modeling_utils

from hf_zero.engine.engine import ZeroEngine
from hf_zero.hf.local_files import on_all_ranks, writing
from hf_zero.hf.models.peft import is_peft_model
from hf_zero.hf.patching import instead, replaced
from hf_zero.runtime.full_weights import own_tensors

_METADATA = {"format": "pt"}  # what transformers writes into files of models that are not quantized
_Plan = dict[str, dict[str, str]]  # file -> name of a tensor there -> name in the model


class WrittenFiles(dict[str, torch.Tensor]):
    """A state dict without data, for `save_pretrained` on rank 0: `files`, by name, hold the data already."""

    def __init__(self, state: Mapping[str, torch.Tensor], files: Mapping[str, Path]) -> None:
        super().__init__(state)
        self.files = files


@contextlib.contextmanager
def shard_files(
    model: Any, engine: ZeroEngine, original: Callable[..., Any], call: Mapping[str, Any], writes: bool
) -> Iterator[WrittenFiles | None]:
    """Write weight files from all ranks, if that is possible ([Note: Which save]). All ranks must enter.

    Inside, rank 0 publishes them: `publish`. What was not published is deleted at the end.

    Args:
        call: The arguments of `original`, the model's save_pretrained, by name.
        writes: This rank is the main process of the save.
    Yields:
        None, on every rank, if it is not possible; then nothing was written.
    Raises:
        CheckpointError: On every rank, if any rank could not write. The folder keeps the index that it had.
    """
    comm = engine.comm
    plan = _plan_of_all(model, engine, original, call, writes)
    if plan is None:
        yield None
        return
    folder = Path(call["save_directory"])
    written: dict[str, Path] = {name: folder / f".{name}.partial" for name in plan}
    try:
        _write_files(engine, plan, written)
        yield WrittenFiles(engine.weights.without_data(), written)
    finally:
        for index, partial in enumerate(written.values()):
            if index % comm.world_size == comm.rank:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)


def publish(original: Callable[..., Any], call: Mapping[str, Any], written: WrittenFiles) -> Any:
    """transformers saves on rank 0: configurations, the files, which are there already, and then the index."""

    def rename(tensors: dict[str, torch.Tensor], filename: str, metadata: dict[str, str]) -> None:
        if metadata != _METADATA:
            raise AssertionError(f"{filename} was written with the metadata {_METADATA}, not {metadata}")
        os.replace(written.files[Path(filename).name], filename)

    with replaced(modeling_utils, "safe_save_file", rename), _finding_buffers(original):
        return original(**{**call, "is_main_process": True, "state_dict": dict(written)})


def _plan_of_all(
    model: Any, engine: ZeroEngine, original: Callable[..., Any], call: Mapping[str, Any], writes: bool
) -> _Plan | None:
    """Return what all ranks are to write; None, on all of them, where not all can."""
    comm = engine.comm
    if not engine.is_sharded or comm.world_size == 1:
        return None
    answers = comm.all_gather_object(_fits(model, engine, original, call, writes), "how weights are saved")
    if not all(answers):
        return None
    folder = Path(call["save_directory"])
    if not _all_see(engine, folder):
        return None
    plan = on_all_ranks(comm, writing(folder), lambda: _plan(engine, original, call))
    return plan if all(comm.all_gather_object(len(plan) > 1, "how weights are saved")) else None


def _fits(model: Any, engine: ZeroEngine, original: Any, call: Mapping[str, Any], writes: bool) -> bool:
    """Return whether all ranks can write, as far as this rank alone knows."""
    placed = set(getattr(model, "hf_device_map", {}).values())
    return (
        writes == (engine.rank == 0)
        and model is engine.module
        and getattr(original, "__func__", None) is PreTrainedModel.save_pretrained
        and not is_peft_model(model)
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
        and getattr(model, "_tp_size", None) is None
        and getattr(model.config, "distributed_config", None) is None
        and not placed & {"cpu", "disk"}
        and not call.get("push_to_hub")
        and not call.get("distributed_checkpoint")
        and not os.path.isfile(call["save_directory"])
        and _finds_its_tensors(model)
    )


def _finds_its_tensors(model: Any) -> bool:
    """Whether transformers, which looks into the model where a tensor has no data, finds what belongs together there.

    Wrapped modules (`_orig_mod`) have other names than they are saved under. A buffer with two names is saved twice.
    """
    own = dict(own_tensors(model))
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    buffers = [id(tensor) for tensor in own.values() if not isinstance(tensor, nn.Parameter)]
    return own.keys() <= known and len(set(buffers)) == len(buffers)


def _all_see(engine: ZeroEngine, folder: Path) -> bool:
    """Whether every rank sees the folder of rank 0, which is made where there is none."""
    comm = engine.comm
    mark = folder / f".{comm.all_gather_object(secrets.token_hex(8), 'a file name')[0]}.seen"

    def touch() -> None:
        if comm.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()

    on_all_ranks(comm, writing(folder), touch)
    try:
        return all(comm.all_gather_object(mark.exists(), "who sees the folder"))
    finally:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink()


def _plan(engine: ZeroEngine, original: Callable[..., Any], call: Mapping[str, Any]) -> _Plan:
    """Return what transformers would write; it is empty where that computes values that are not here."""
    placeholders = engine.weights.without_data()
    names = {id(tensor): name for name, tensor in placeholders.items()}
    plan: _Plan = {}
    split_up = modeling_utils.split_torch_state_dict_into_shards

    def split(state_dict: dict[str, torch.Tensor], **how: Any) -> Any:
        # A conversion that changed a tensor made a new one, or raised the version of the old one.
        if all(id(tensor) in names and tensor._version == 0 for tensor in state_dict.values()):
            for file, inside in split_up(state_dict, **how).filename_to_tensors.items():
                plan[file] = {name: names[id(state_dict[name])] for name in inside}
        raise _Planned  # up to transformers 5.12 what comes next would write

    with (
        replaced(modeling_utils, "split_torch_state_dict_into_shards", split),
        _finding_buffers(original),
        contextlib.suppress(_Planned),
    ):
        original(**{**call, "is_main_process": False, "state_dict": dict(placeholders)})
    return plan


class _Planned(Exception):
    """Leaves `save_pretrained` when the plan is there."""


@contextlib.contextmanager
def _finding_buffers(original: Any) -> Iterator[None]:
    """Inside, `get_parameter` of the model finds buffers too: transformers up to 5.12 asks it for any tensor."""
    model = original.__self__
    with instead(model, "get_parameter", dict(own_tensors(model)).__getitem__):
        yield


def _write_files(engine: ZeroEngine, plan: _Plan, written: Mapping[str, Path]) -> None:
    """Write one file for each rank in turn, so that no rank holds more than one. All ranks must call."""
    comm, files = engine.comm, list(plan)
    for start in range(0, len(files), comm.world_size):
        batch = files[start : start + comm.world_size]
        tensors = engine.weights_for_ranks([set(plan[file].values()) for file in batch])

        def write(batch: list[str] = batch, tensors: dict[str, torch.Tensor] = tensors) -> None:
            if comm.rank < len(batch):
                file = batch[comm.rank]
                inside = {name: tensors[own].contiguous() for name, own in plan[file].items()}
                with writing(written[file].with_name(file)):
                    save_file(inside, written[file], metadata=_METADATA)

        on_all_ranks(comm, writing(files[start]), write)
        del tensors, write  # before the next round gathers
