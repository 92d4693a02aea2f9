"""`hf-zero convert`: checkpoints of other tools, to and from those of hf_zero. The work is that of conversion/."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.cli.text import plural

if TYPE_CHECKING:
    from conversion.deepspeed import Summary

NAME = "convert"
SUMMARY = "turn a checkpoint of another tool into one of hf_zero, or back"
EXAMPLES = """
hf-zero convert from-deepspeed outputs/checkpoint-500 converted
hf-zero convert from-deepspeed deepspeed_checkpoints converted --tag global_step500
hf-zero convert from-universal deepspeed_checkpoints converted
hf-zero convert to-universal checkpoints/global_step100 for-deepspeed
hf-zero convert from-dcp fsdp-checkpoint checkpoints/converted
hf-zero convert to-dcp checkpoints/global_step100 for-fsdp
"""


@dataclass(frozen=True)
class Conversion:
    name: str
    summary: str
    run: Callable[[argparse.Namespace], None]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # beside SRC and DST: of add_argument


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="conversions", metavar="CONVERSION", required=True)
    for one in CONVERSIONS:
        sub = kinds.add_parser(
            one.name, help=one.summary, description=f"{one.summary[0].upper()}{one.summary[1:]}.", allow_abbrev=False
        )
        sub.add_argument("source", metavar="SRC", type=Path, help="the checkpoint's folder")
        sub.add_argument("target", metavar="DST", type=Path, help="the folder to write; it must be new")
        for name, option in one.options.items():
            sub.add_argument(name, **option)
        sub.set_defaults(convert=one.run)


def run(args: argparse.Namespace) -> None:
    args.convert(args)


def _from_deepspeed(args: argparse.Namespace) -> None:
    from conversion.deepspeed import convert

    _report(convert(args.source, args.target, args.tag), args.target)


def _from_universal(args: argparse.Namespace) -> None:
    from conversion.universal import from_universal

    _report(from_universal(args.source, args.target, args.tag), args.target)


def _to_universal(args: argparse.Namespace) -> None:
    from conversion.universal import to_universal

    written = to_universal(args.source, args.target)
    for remark in written.remarks:
        print(remark)
    print(f'{args.source} -> {written.folder} (load it with "checkpoint": {{"load_universal": true}})')


def _report(done: Summary, target: Path) -> None:
    for key in done.left_out:
        print(f"left out: {key} of client_state, which JSON cannot hold")
    print(
        f"{done.folder}: step {done.global_step}, stage {done.stage}, {plural(done.world_size, 'rank')}, "
        f"{plural(done.num_params, 'parameter')} of {plural(done.numel, 'element')} -> {target}"
    )


def _from_dcp(args: argparse.Namespace) -> None:
    from conversion.dcp import from_dcp

    from_dcp(args.source, args.target, buffers=args.buffers)
    print(f"{args.source} -> {args.target}")


def _to_dcp(args: argparse.Namespace) -> None:
    from conversion.dcp import to_dcp

    to_dcp(args.source, args.target)
    print(f"{args.source} -> {args.target}")


_TAG = {"help": "which checkpoint in SRC (default: the one that the file `latest` names)"}
_TAG_UNIVERSAL = {"help": "which checkpoint in SRC (default: the one that the file `latest_universal` names)"}
_BUFFERS = {
    "nargs": "+",
    "default": (),
    "metavar": "NAME",
    "help": "floats in SRC that are buffers: DCP does not tell them from frozen parameters",
}
CONVERSIONS = (
    Conversion(
        "from-deepspeed",
        "write a ZeRO checkpoint of DeepSpeed, stages 1 to 3, as one of hf_zero",
        _from_deepspeed,
        {"--tag": _TAG},
    ),
    Conversion(
        "from-universal",
        "write a universal checkpoint of DeepSpeed as one of hf_zero",
        _from_universal,
        {"--tag": _TAG_UNIVERSAL},
    ),
    Conversion(
        "to-universal",
        "write a checkpoint of hf_zero as a universal checkpoint of DeepSpeed, which loads it at stages 1 to 3",
        _to_universal,
    ),
    Conversion(
        "from-dcp",
        "write a folder of torch.distributed.checkpoint, as of FSDP2, as a checkpoint of hf_zero",
        _from_dcp,
        {"--buffers": _BUFFERS},
    ),
    Conversion("to-dcp", "write a checkpoint of hf_zero as a folder of torch.distributed.checkpoint", _to_dcp),
)
