"""Finds the known key that was probably meant by an unknown one, at the same depth or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hf_zero.config.keys import ROOT
from hf_zero.config.problems import LIKENESS_ELSEWHERE, LIKENESS_SURE, either, nearest
from hf_zero.config.schema import Alias, Block

# Names from elsewhere, and the key that means the same here.
FOREIGN: dict[str, str] = {
    "max_grad_norm": "gradient_clipping",
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "mixed_precision": "bf16.enabled",
    "monitor_config": "tensorboard, wandb, csv_monitor or comet",
    "comms_config": "comms_logger",
    "offload": "zero_optimization.offload_optimizer or zero_optimization.offload_param",
    "cuda_visible_devices": "the environment variable CUDA_VISIBLE_DEVICES",
}

# A name that stands in more blocks than this (`enabled`) gives no hint of the block that was meant.
_FEW = 3
# Blocks around training, whose keys are not what is meant elsewhere.
_ASIDE = ("amp", "torch_autocast", "timers")
# More keys than this are not listed.
_MANY = 12


class Advice(NamedTuple):
    wrong: str
    remedy: str
    near: str | None  # the nearest key at the same depth, when that is the advice


def advice(rows: Block, name: str, path: str) -> Advice:
    """The advice for the unknown key `name`, written at the dotted `path` in the block `rows`."""
    block = path.rpartition(".")[0]
    foreign = FOREIGN.get(name.lower())
    if foreign is not None:
        return Advice(f"unknown key; here it is {foreign}", f"Use {foreign} instead, or remove it.", None)
    canonical = [key for key, row in rows.keys.items() if not isinstance(row, Alias)]
    near = nearest(name, canonical, LIKENESS_SURE)
    if near is None:
        far = nearest(name, (other.rpartition(".")[2] for other in _paths()), LIKENESS_ELSEWHERE)
        homes = _homes(far) if far is not None else ()
        if 0 < len(homes) <= _FEW:
            wrong = (
                "unknown key at this depth; it is known as" if far == name else "unknown key; the nearest known key is"
            )
            return Advice(f"{wrong} {either(homes)}", _move(homes, block), None)
        near = nearest(name, canonical)
    if near is None:  # only another name of a key is like it
        alias = nearest(name, rows.keys)
        row = rows.keys[alias] if alias is not None else None
        near = row.target.rpartition(".")[2] if isinstance(row, Alias) else None
    if near is not None:
        full = f"{block}.{near}" if block else near
        return Advice(f'unknown key; the nearest known key is "{near}"', f"Rename it to {full}, or remove it.", near)
    listed = f" Known in {block}: {', '.join(sorted(canonical))}." if block and len(canonical) <= _MANY else ""
    return Advice("unknown key, and no known key is like it", f"Remove it.{listed}", None)


def _paths(block: Block = ROOT, prefix: str = "") -> Iterator[str]:
    """The keys that may have been meant elsewhere: not those inside blocks of other tools."""
    for name, row in block.keys.items():
        if not isinstance(row, Alias):
            yield f"{prefix}{name}"
        if isinstance(row, Block) and not row.free and name not in _ASIDE:
            yield from _paths(row, f"{prefix}{name}.")


def _homes(name: str) -> tuple[str, ...]:
    """The dotted paths of the keys of this name, whatever the block."""
    return tuple(path for path in _paths() if path.rpartition(".")[2].lower() == name.lower())


def _move(homes: tuple[str, ...], block: str) -> str:
    top = [home for home in homes if "." not in home]
    if top and block:
        return f"Move it to the top of the configuration, outside {block.partition('.')[0]}, or remove it."
    return f"Write it as {either(homes)}, or remove it."
