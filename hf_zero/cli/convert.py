"""`hf-zero convert`: checkpoints of other tools, to and from those of hf_zero. The work is that of conversion/."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_zero.cli.text import plural

NAME = "convert"
SUMMARY = "turn a checkpoint of another tool into one of hf_zero"
EXAMPLES = """
hf-zero convert from-deepspeed outputs/checkpoint-500 converted
hf-zero convert from-deepspeed deepspeed_checkpoints converted --tag global_step500
"""


@dataclass(frozen=True)
class Conversion:
    name: str
    summary: str
    run: Callable[[argparse.Namespace], None]  # has SRC, DST and --tag


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="conversions", metavar="CONVERSION", required=True)
    for one in CONVERSIONS:
        sub = kinds.add_parser(
            one.name, help=one.summary, description=f"{one.summary[0].upper()}{one.summary[1:]}.", allow_abbrev=False
        )
        sub.add_argument("source", metavar="SRC", type=Path, help="the checkpoint's folder")
        sub.add_argument("target", metavar="DST", type=Path, help="the folder to write; it must be new")
        sub.add_argument("--tag", help="which checkpoint in SRC (default: the one that the file `latest` names)")
        sub.set_defaults(convert=one.run)


def run(args: argparse.Namespace) -> None:
    args.convert(args)


def _from_deepspeed(args: argparse.Namespace) -> None:
    from conversion.deepspeed import convert

    done = convert(args.source, args.target, args.tag)
    for key in done.left_out:
        print(f"left out: {key} of client_state, which JSON cannot hold")
    print(
        f"{done.folder}: step {done.global_step}, stage {done.stage}, {plural(done.world_size, 'rank')}, "
        f"{plural(done.num_params, 'parameter')} of {plural(done.numel, 'element')} -> {args.target}"
    )


CONVERSIONS = (
    Conversion(
        "from-deepspeed", "write a ZeRO checkpoint of DeepSpeed, stages 1 to 3, as one of hf_zero", _from_deepspeed
    ),
)
