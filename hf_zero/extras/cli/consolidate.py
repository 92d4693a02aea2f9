"""`hf-zero consolidate`: a sharded checkpoint as Hugging Face weights. The work is checkpoint/consolidate.py's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_zero.checkpoint.consolidate import (
    MODEL_FILES,
    TEMPLATES,
    add_arguments,
    consolidate,
    options_of,
    progress_bar,
)
from hf_zero.checkpoint.folders import check_files, chosen, read_manifest
from hf_zero.checkpoint.format import ORIGINAL_NAMES
from hf_zero.errors import CheckpointError
from hf_zero.extras.cli.text import format_bytes

NAME = "consolidate"
SUMMARY = "write a sharded checkpoint as Hugging Face weights, with configuration and tokenizer"
EXAMPLES = """
hf-zero consolidate outputs/checkpoint-500
hf-zero consolidate outputs/checkpoint-500 my-model --dtype bf16 --shard-size 2GB
hf-zero consolidate outputs/checkpoint-500 weights.safetensors --only-trainable
"""

_WEIGHT_FILES = ("*.safetensors",)


def configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--force", action="store_true", help="replace OUT if it holds an earlier output")
    parser.add_argument("--json", action="store_true", help="print a summary as JSON")


def run(args: argparse.Namespace) -> None:
    options = options_of(args)
    folder = chosen(args.checkpoint, args.tag)
    out: Path = args.out or folder / "consolidated"
    check_files(folder, read_manifest(folder))
    if args.force and out.exists():
        _check_replaceable(out, folder)
    summary = consolidate(folder, out, options, progress_bar("consolidating"), replace=args.force)
    names = folder / ORIGINAL_NAMES
    if args.json:
        print(json.dumps(summary))
        return
    types = ", ".join(summary["dtypes"])
    print(f"{summary['tensors']} tensors ({format_bytes(summary['bytes'])}, {types}) are in {out}")
    if names.exists() and args.names is None:
        print(f"Names are those of a pipeline's layers: --names {names} gives the model's own.")
    if out.is_dir() and not (out / "config.json").exists():
        print(f"There is no config.json in {folder}: add the model's own to {out} before from_pretrained reads it.")


def _check_replaceable(out: Path, folder: Path) -> None:
    if out.is_file():
        return
    if folder.resolve().is_relative_to(out.resolve()):
        raise CheckpointError(f"{out} holds the checkpoint itself: choose another place")
    known = (*MODEL_FILES, *_WEIGHT_FILES, TEMPLATES)
    foreign = sorted(path.name for path in out.iterdir() if not any(path.match(pattern) for pattern in known))
    if foreign:
        raise CheckpointError(f"{out} is not only a model, it also holds {', '.join(foreign)}: choose another place")
