"""Checkpoint folders made by hand, without an engine or processes: every rank's part is cut out of whole tensors."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_zero.checkpoint.format import SaveInfo, TensorInfo
from hf_zero.checkpoint.reader import open_checkpoint
from hf_zero.checkpoint.stand_alone import scripts
from hf_zero.checkpoint.writer import (
    FileRecord,
    SliceState,
    build_manifest,
    check_info,
    commit,
    prepare_folder,
    write_rank_file,
)
from hf_zero.layout import Slice, UnitLayout


@dataclass
class WholeModel:
    """Every tensor of a model and of its optimizer, whole."""

    units: dict[str, tuple[str, bool, list[str]]]  # unit -> dtype, trainable, names
    params: dict[str, torch.Tensor]
    state: dict[str, dict[str, torch.Tensor]]  # name -> kind -> tensor of the parameter's shape
    scalars: dict[str, dict[str, Any]]
    buffers: dict[str, torch.Tensor]
    tied: dict[str, str] = field(default_factory=dict)

    def layouts(self, world_size: int, bucket: int | None = None) -> tuple[UnitLayout, ...]:
        return tuple(
            UnitLayout.build(
                f"{unit}/{dtype}",
                {name: self.params[name].shape for name in names},
                dtype=dtype,
                trainable=trainable,
                world_size=world_size,
                max_bucket_numel=bucket,
            )
            for unit, (dtype, trainable, names) in self.units.items()
        )

    def rank_states(self, layouts: tuple[UnitLayout, ...], rank: int) -> list[SliceState]:
        return [
            SliceState(
                run,
                {kind: cut(tensor, run) for kind, tensor in self.state[run.name].items()},
                self.scalars.get(run.name, {}),
            )
            for layout in layouts
            for run in layout.slices(rank)
        ]


def make_model(seed: int = 0, scale: int = 1) -> WholeModel:
    """Trainable fp32, bf16 and fp64 units and a frozen bf16 one, with awkward shapes (none, empty, odd)."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    units: dict[str, tuple[str, bool, list[str]]] = {}
    model = WholeModel(units, {}, {}, {}, {}, {"head.weight": "root.p0"})
    for unit, dtype, trainable in (
        ("root", "float32", True),
        ("layers.0", "bfloat16", True),
        ("layers.1", "float64", True),
        ("embedding", "bfloat16", False),
    ):
        shapes = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (rng.randrange(1, 60) * scale,), (rng.randrange(1, 9), 11)]
        rng.shuffle(shapes)
        names = [f"{unit}.p{index}" for index in range(len(shapes))]
        units[unit] = (dtype, trainable, names)
        master = torch.float64 if dtype == "float64" else torch.float32
        for name, shape in zip(names, shapes, strict=True):
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            if trainable:
                model.state[name] = {"master": weight.to(master)}
                model.params[name] = model.state[name]["master"].to(getattr(torch, dtype))
                if name != "root.p1":  # one that never had a gradient
                    for kind in ("exp_avg", "exp_avg_sq"):
                        model.state[name][kind] = torch.randn(shape, generator=generator).to(master)
                    model.scalars[name] = {"step": 7.0, "fused": False}
            else:
                model.params[name] = weight.to(torch.bfloat16)
                model.state[name] = {"param": model.params[name]}
    model.buffers = {
        "norm.running_mean": torch.randn(5, generator=generator),
        "norm.num_batches_tracked": torch.tensor(12),
        "mask": torch.tensor([[True, False, True], [False, False, True]]),
        "empty": torch.empty(0, 3),
    }
    return model


def cut(tensor: torch.Tensor, run: Slice) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return torch.cat([flat[piece.start : piece.end] for piece in run.pieces])


def save_info(model: WholeModel, layouts: tuple[UnitLayout, ...], **changes: Any) -> SaveInfo:
    params = tuple(TensorInfo(n, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for n, p in model.params.items())
    info = SaveInfo(
        world_size=layouts[0].world_size,
        stage=3,
        layouts=layouts,
        params=params,
        tied=model.tied,
        param_groups=[{"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None}],
        global_step=20,
        client_state={"epoch": 1.5, "losses": [float("inf"), 2.0]},
        converted_from="\u00e9",
    )
    return replace(info, **changes)


def with_unaligned_parts(layout: UnitLayout) -> UnitLayout:
    """Return the layout of flat parameters as they were padded at first: to the world size only."""
    used = layout.slots[-1].end if layout.slots else 0
    padded = used + -used % layout.world_size
    bucket = layout.bucket_numel if layout.bucket_numel < padded else max(padded, layout.world_size)
    return replace(layout, padded_numel=padded, bucket_numel=bucket)


def save(
    folder: Path,
    model: WholeModel,
    world_size: int,
    bucket: int | None = None,
    *,
    unaligned: bool = False,
    beside: Mapping[Path, bytes] | None = None,
    **changes: Any,
) -> SaveInfo:
    """All phases of a save, for all ranks one after the other."""
    layouts = model.layouts(world_size, bucket)
    if unaligned:
        layouts = tuple(map(with_unaligned_parts, layouts))
    info = save_info(model, layouts, **changes)
    check_info(info)
    save_id = prepare_folder(folder)
    records: list[FileRecord] = []
    for rank in range(world_size):
        buffers = model.buffers if rank == 0 else None
        states = model.rank_states(layouts, rank)
        records.append(write_rank_file(folder, rank, states, buffers, save_id=save_id, info=info))
    own = scripts(folder)
    commit(folder, build_manifest(info, records[::-1]), {**own, **(beside or {})})
    return info


def only_frozen(model: WholeModel) -> WholeModel:
    """A small part of the model: quick to save."""
    dtype, trainable, names = model.units["embedding"]
    names = names[:4]
    params = {name: model.params[name] for name in names}
    state = {name: model.state[name] for name in names}
    return WholeModel({"embedding": (dtype, trainable, names)}, params, state, {}, {})


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (got, want)]
    assert torch.equal(*as_bytes)


def assert_holds(folder: Path, model: WholeModel) -> None:
    """The folder holds this model, bit for bit."""
    with open_checkpoint(folder) as reader:
        reader.verify()
        for name, kinds in model.state.items():
            for kind, tensor in kinds.items():
                if tensor.numel():
                    whole = UnitLayout.build("x", {name: tensor.shape}, dtype="", trainable=True, world_size=1).slices(
                        0
                    )[0]
                    assert_same(reader.read(name, kind, whole), tensor.reshape(-1))
        for name, buffer in model.buffers.items():
            assert_same(reader.read_buffer(name), buffer)


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked child that runs `work`."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
