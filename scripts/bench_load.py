"""Loading a checkpoint in shards: hf_zero beside a plain from_pretrained, FSDP2 and DeepSpeed, in turn.

    python scripts/bench_load.py FOLDER                       # a 518 M parameter (2.07 GB) checkpoint is made there
    python scripts/bench_load.py FOLDER --rounds 5 --peers-python ~/peers/bin/python
    python scripts/bench_load.py FOLDER --memory --ranks 4 --layers 12 --hidden 1280    # peak memory only

Every load is a job of new processes. "plain" is one process whose weights end in memory of its own, as training needs
them (from_pretrained alone only maps the files); "fsdp2" reads its slices with torch's DCP; "deepspeed" goes through
transformers. All read files that are in the page cache. Peak memory is the highest resident size over the one before
the load, per rank. Medians over rounds; ratios are taken within a round. Exit status 1 if a target is missed: time at
most 0.7 of plain's and below the peers', peak at most size / ranks + the largest tensor + 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import benchlib

PLAIN_TARGET = 0.7
PEAK_SLACK = 1.1


# ---------------------------------------------------------------- one rank of one load
def load_plain(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    for param in model.parameters():
        param.data = param.data.clone()
    return model


def load_ours(folder: str) -> Any:
    from transformers import LlamaForCausalLM

    import hf_zero

    hf_zero.enable({"zero_optimization": {"stage": 3}})
    return LlamaForCausalLM.from_pretrained(folder)


def load_fsdp2(folder: str) -> Any:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, LlamaForCausalLM

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    state = model.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    model.load_state_dict(state)
    return model


def load_deepspeed(folder: str) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    keep = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
    return LlamaForCausalLM.from_pretrained(folder), keep


LOADERS = {"plain": load_plain, "ours": load_ours, "fsdp2": load_fsdp2, "deepspeed": load_deepspeed}


def run_rank(variant: str, folder: str, out: str) -> None:
    import torch.distributed as dist
    from transformers import LlamaForCausalLM  # noqa: F401  (not part of what is timed)

    if variant == "deepspeed":
        import deepspeed  # type: ignore[import-not-found, unused-ignore]

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    if variant == "ours":
        from hf_zero.hf.models import patches as model_patch_points  # noqa: F401
        from hf_zero.hf.trainer import trainer  # noqa: F401
    if variant == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    gc.collect()  # or the garbage of imports is collected in the middle of one load or another
    before = benchlib.restart_peak()
    dist.barrier()
    start = time.perf_counter()
    model = LOADERS[variant](folder)
    dist.barrier()
    seconds = time.perf_counter() - start
    measured = {"seconds": seconds, "peak": benchlib.resident("VmHWM") - before, "anonymous": benchlib.resident()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, measured)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()
    del model
    dist.destroy_process_group()


# ---------------------------------------------------------------- the jobs
def job(variant: str, ranks: int, folder: Path, python: str) -> list[dict[str, float]]:
    out = folder / f"{variant}.json"
    out.unlink(missing_ok=True)
    env = {"ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "error"}
    arguments = [__file__, str(folder), "--rank-of", variant, "--out", str(out)]
    benchlib.run_job(python, ranks, arguments, timeout_s=180, env=env)
    measured: list[dict[str, float]] = json.loads(out.read_text())
    return measured


def make(folder: Path, hidden: int, layers: int, *, tied: bool, vocab: int = 32000) -> None:
    """A Llama of random weights in several files, unless it is there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab}
    wanted = {**sizes, "tie_word_embeddings": tied}
    path = folder / "config.json"
    if path.is_file() and wanted.items() <= json.loads(path.read_text()).items():
        return
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    heads = hidden // 64
    config = LlamaConfig(intermediate_size=hidden * 8 // 3 // 64 * 64, num_attention_heads=heads, **wanted)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0, 0.02)
    if tied:
        model.tie_weights()
    model.save_pretrained(folder, max_shard_size="400MB")


def sizes(folder: Path) -> tuple[int, int]:
    """Return (bytes of all tensors, bytes of the largest)."""
    from hf_zero.hf.models.stored import open_files

    files = open_files(sorted(folder.glob("*.safetensors")))
    each = [tensor.nbytes for file in files for tensor in file.tensors.values()]
    for file in files:
        file.close()
    return sum(each), max(each)


def warm(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def times(folder: Path, arguments: argparse.Namespace) -> bool:
    ranks, variants = arguments.ranks, {"plain": 1, "ours": arguments.ranks, "fsdp2": arguments.ranks}
    if arguments.peers_python:
        variants["deepspeed"] = ranks
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(arguments.rounds):
        for name, count in variants.items():
            python = arguments.peers_python if name == "deepspeed" else sys.executable
            seconds[name].append(max(one["seconds"] for one in job(name, count, folder, python)))
    print(f"{'':12}{'processes':>10}{'s':>8}{'hf_zero / it':>14}")
    good = True
    for name, count in variants.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds[name], strict=True))
        print(f"{name:12}{count:>10}{statistics.median(seconds[name]):>8.2f}{ratio:>14.2f}")
        good &= name == "ours" or ratio <= (PLAIN_TARGET if name == "plain" else 1.0)
    return good


def memory(folder: Path, arguments: argparse.Namespace) -> bool:
    total, largest = sizes(folder)
    peaks = [one["peak"] for one in job("ours", arguments.ranks, folder, sys.executable)]
    bound = PEAK_SLACK * (total / arguments.ranks + largest)
    listed = ", ".join(f"{one / 1e6:.0f}" for one in peaks)
    print(f"peak of {arguments.ranks} ranks over the memory before, MB: {listed}")
    print(f"bound {bound / 1e6:.0f} (model {total / 1e6:.0f}, largest tensor {largest / 1e6:.0f})")
    return bool(max(peaks) <= bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--untied", action="store_true", help="a head of its own; by default it is the embedding")
    parser.add_argument("--memory", action="store_true", help="measure peak memory only")
    parser.add_argument(
        "--peers-python", help="a Python with DeepSpeed and transformers; without it that row is left out"
    )
    parser.add_argument("--rank-of", choices=LOADERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of, str(arguments.folder), arguments.out)
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make(arguments.folder, arguments.hidden, arguments.layers, tied=not arguments.untied)
    warm(arguments.folder)
    good = memory(arguments.folder, arguments)
    if not arguments.memory:
        good &= times(arguments.folder, arguments)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
