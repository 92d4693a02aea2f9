r"""Grows a job from 8 to 10,000 ranks: a table and a picture of what a rank does, and of what a checkpoint takes.

    python scripts/growth.py --plot docs/images/growth.svg

The engine's own code runs on a pretended group of hosts with 8 ranks each, without data: it makes units and shards of
a model, follows a training step through its gathers and reduces, and builds, writes and reads the manifest of a
checkpoint from the records that so many ranks would give. The model is Llama 3 8B at stage 3 in bf16, with micro-
batches of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hf_zero.checkpoint.format import FileInfo, SaveInfo, TensorInfo, decode_manifest, encode_manifest, rank_contents
from hf_zero.checkpoint.writer import FileRecord, build_manifest
from hf_zero.config import ResolvedConfig, ZeroConfig
from hf_zero.estimate import Profile, measure, plan_model
from hf_zero.extras.cli.meta_model import make_batch
from hf_zero.extras.cli.text import table
from hf_zero.extras.estimate.pretend import PretendedComm
from hf_zero.layout import UnitLayout
from hf_zero.runtime.unit_specs import BuildSettings, flat_param_specs
from recipes.pictures import LINES, picture

PER_HOST = 8
RANKS = (8, 64, 512, 2048, 10_000)
STATES = {"master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}


@dataclasses.dataclass(frozen=True)
class Grown:
    """The numbers of one rank, or of its checkpoint. Bytes are in MB, times in seconds."""

    ranks: int
    operations: int  # of a step
    inside: float  # from the ranks of its host, in a step
    across: float  # from other hosts, in a step, at sharding_group "all"
    across_in_groups: float  # the same at sharding_group "host"
    memory: float  # of its GPU, at the peak
    messages: int  # that it sends for the agreement on a step: reckoned, see tests/distributed/test_many_ranks.py
    message: float  # the size of each, in kB: reckoned
    python: float  # seconds of the engine's own code for two steps and the layouts
    files: int  # in a checkpoint
    records: float  # that rank 0 gathers for it
    manifest: float
    writing: float  # seconds of rank 0 to build and encode the manifest
    reading: float  # seconds to decode and check it, and to locate every tensor


def big_model() -> nn.Module:
    """Make Llama 3 8B on the meta device."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))
        return model.to(torch.bfloat16)


def resolved(model: nn.Module, ranks: int, group: str) -> ResolvedConfig:
    zero = {"stage": 3, "sharding_group": group}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    return ZeroConfig.load(config).resolve(model=model, world_size=ranks)


def records_of(layouts: list[UnitLayout], ranks: int) -> Iterator[FileRecord]:
    """Yield what each rank tells of its file: the parameters of which it has a slice."""
    for rank in range(ranks):
        numels = {one.name: one.numel for layout in layouts for one in layout.slices(rank)}
        file = FileInfo(f"rank-{rank:05d}.safetensors", 12 * sum(numels.values()), rank)
        scalars = {name: {"step": 1000.0} for name in numels}
        yield FileRecord(rank, file, numels, dict.fromkeys(numels, STATES), scalars, (), {})


def grown(model: nn.Module, profile: Profile, ranks: int) -> Grown:
    config = resolved(model, ranks, "all")
    begun = time.perf_counter()
    plan = plan_model(model, config, per_host=PER_HOST, profile=profile)
    python = time.perf_counter() - begun
    groups = plan_model(model, resolved(model, ranks, "host"), per_host=PER_HOST, profile=profile)

    comm = PretendedComm(0, ranks, on_host=False, per_host=PER_HOST)
    drafted = flat_param_specs(model, BuildSettings.of(config), comm)
    layouts = [flat.layout for _, flats in drafted for flat in flats]
    shapes = {slot.name: slot.shape for layout in layouts for slot in layout.slots}
    infos = tuple(TensorInfo(name, shape, "bfloat16") for name, shape in shapes.items())
    info = SaveInfo(world_size=ranks, stage=3, layouts=tuple(layouts), params=infos, param_groups=[{"lr": 1e-4}])
    records = list(records_of(layouts, ranks))
    begun = time.perf_counter()
    written = encode_manifest(build_manifest(info, records))
    writing = time.perf_counter() - begun
    begun = time.perf_counter()
    rank_contents(decode_manifest(written))
    reading = time.perf_counter() - begun
    vote = 8 * (1 + len(layouts) + len(shapes) + 4)  # norm, late gradients, gradients, two digests twice
    return Grown(
        ranks=ranks,
        operations=sum(one.traffic.operations for one in plan.passes),
        inside=sum(one.traffic.inside for one in plan.passes) / 1e6,
        across=sum(one.traffic.across for one in plan.passes) / 1e6,
        across_in_groups=sum(one.traffic.across for one in groups.passes) / 1e6,
        memory=plan.device_peak / 1e6,
        messages=math.ceil(math.log2(ranks)),
        message=vote / 1e3,
        python=python,
        files=ranks,
        records=sum(len(pickle.dumps([one])) for one in records) / 1e6,
        manifest=len(written) / 1e6,
        writing=writing,
        reading=reading,
    )


def draw(path: Path, rows: list[Grown]) -> None:
    """Draw each number beside its value at the least ranks, both axes logarithmic."""
    curves = {
        "bytes from other ranks": [one.inside + one.across for one in rows],
        "messages of an agreement": [float(one.messages) for one in rows],
        "memory of a rank": [one.memory for one in rows],
        "the engine's Python": [one.python for one in rows],
        "manifest": [one.manifest for one in rows],
        "records at rank 0": [one.records for one in rows],
    }
    ranks = [one.ranks for one in rows]
    with picture(path, figsize=(6.4, 3.6)) as (axes,):
        for (name, values), style in zip(curves.items(), LINES, strict=False):
            axes.plot(ranks, [value / values[0] for value in values], label=name, **style)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=f"times as much as with {ranks[0]} ranks")
        axes.set_title("Llama 3 8B, stage 3, hosts of 8 ranks")
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, metavar="OUT.svg")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N")
    args = parser.parse_args()
    model = big_model()
    profile = measure(model, resolved(model, RANKS[0], "all"), make_batch(model, 1, 2048), on_host=False)
    grown(model, profile, RANKS[0])  # the first time loads code
    rows = [grown(model, profile, ranks) for ranks in args.ranks]
    columns = [[field.name for field in dataclasses.fields(Grown)]]
    columns += [
        [f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}" for value in dataclasses.astuple(one)] for one in rows
    ]
    print("\n".join(table([list(line) for line in zip(*columns, strict=True)])))
    if args.plot:
        draw(args.plot, rows)


if __name__ == "__main__":
    main()
