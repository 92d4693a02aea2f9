"""`hf-zero consolidate`: a sharded checkpoint as Hugging Face weights. The work is checkpoint/consolidate.py's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_zero.checkpoint.consolidate import (
    add_arguments,
    consolidate,
    options_of,
    progress_bar,
)
from hf_zero.checkpoint.folders import check_files, chosen, read_manifest
from hf_zero.checkpoint.format import ORIGINAL_NAMES
from hf_zero.extras.cli.text import format_bytes

NAME = "consolidate"
SUMMARY = "write a sharded checkpoint as Hugging Face weights, with configuration and tokenizer"
EXAMPLES = """
hf-zero consolidate outputs/checkpoint-500
hf-zero consolidate outputs/checkpoint-500 my-model --dtype bf16 --shard-size 2GB
hf-zero consolidate outputs/checkpoint-500 weights.safetensors --only-trainable
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a summary as JSON")


def run(args: argparse.Namespace) -> None:
    options = options_of(args)
    folder = chosen(args.checkpoint, args.tag)
    out: Path = args.out or folder / "consolidated"
    check_files(folder, read_manifest(folder))
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
