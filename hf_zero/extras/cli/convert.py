"""`hf-zero convert`: checkpoints and configurations of other tools as those of hf_zero. Done by conversion/."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.extras.cli.text import plural

if TYPE_CHECKING:
    from hf_zero.conversion.deepspeed import Summary

NAME = "convert"
SUMMARY = "turn a checkpoint or configuration of another tool into one of hf_zero, or a checkpoint back"
EXAMPLES = """
hf-zero convert from-deepspeed outputs/checkpoint-500 converted
hf-zero convert from-deepspeed deepspeed_checkpoints converted --tag global_step500
hf-zero convert to-deepspeed checkpoints/global_step100 for-deepspeed --stage 3 --world-size 8
hf-zero convert from-universal deepspeed_checkpoints converted
hf-zero convert to-universal checkpoints/global_step100 for-deepspeed
hf-zero convert from-dcp fsdp-checkpoint checkpoints/converted
hf-zero convert to-dcp checkpoints/global_step100 for-fsdp
hf-zero convert from-hf my-model checkpoints/start
hf-zero convert config accelerate.yaml zero.json
"""


@dataclass(frozen=True)
class Conversion:
    name: str
    summary: str
    run: Callable[[argparse.Namespace], None]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # beside SRC and DST: of add_argument
    source: str = "the checkpoint's folder"
    target: str = "the folder to write; it must be new"
    num_targets: str | None = None  # nargs of DST


def configure(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="conversions", metavar="CONVERSION", required=True)
    for one in CONVERSIONS:
        sub = kinds.add_parser(
            one.name, help=one.summary, description=f"{one.summary[0].upper()}{one.summary[1:]}.", allow_abbrev=False
        )
        sub.add_argument("source", metavar="SRC", type=Path, help=one.source)
        sub.add_argument("target", metavar="DST", type=Path, help=one.target, nargs=one.num_targets)
        for name, option in one.options.items():
            sub.add_argument(name, **option)
        sub.set_defaults(convert=one.run, prog=sub.prog)


def run(args: argparse.Namespace) -> None:
    args.convert(args)


def _from_deepspeed(args: argparse.Namespace) -> None:
    from hf_zero.conversion.deepspeed import convert

    _report(convert(args.source, args.target, args.tag), args.target)


def _from_universal(args: argparse.Namespace) -> None:
    from hf_zero.conversion.universal import from_universal

    _report(from_universal(args.source, args.target, args.tag), args.target)


def _to_deepspeed(args: argparse.Namespace) -> None:
    from hf_zero.conversion.to_deepspeed import to_deepspeed

    written = to_deepspeed(args.source, args.target, stage=args.stage, world_size=args.world_size)
    print("\n".join([*written.remarks, f"{args.source} -> {written.folder} ({written.how})"]))


def _to_universal(args: argparse.Namespace) -> None:
    from hf_zero.conversion.universal import to_universal

    written = to_universal(args.source, args.target)
    print("\n".join([*written.remarks, f"{args.source} -> {written.folder} ({written.how})"]))


def _from_hf(args: argparse.Namespace) -> None:
    from hf_zero.conversion.huggingface import from_hf

    count = from_hf(args.source, args.target, buffers=args.buffers)
    print(f"{args.source}: {plural(count, 'parameter')} -> {args.target} (load it with load_module_only=True)")


def _config(args: argparse.Namespace) -> None:
    from hf_zero.conversion.configuration import convert_config, write_config

    converted = convert_config(args.source)
    files = [] if args.target is None else write_config(converted, args.target)
    print("\n".join(converted.lines))
    print(f"{args.source} -> {', '.join(map(str, files)) or json.dumps(converted.values, indent=2)}")


def _report(done: Summary, target: Path) -> None:
    print(
        f"{done.folder}: step {done.global_step}, stage {done.stage}, {plural(done.world_size, 'rank')}, "
        f"{plural(done.num_params, 'parameter')} of {plural(done.numel, 'element')} -> {target}"
    )


def _from_dcp(args: argparse.Namespace) -> None:
    from hf_zero.conversion.dcp import from_dcp

    from_dcp(args.source, args.target, buffers=args.buffers)
    print(f"{args.source} -> {args.target}")


def _to_dcp(args: argparse.Namespace) -> None:
    from hf_zero.conversion.dcp import to_dcp

    to_dcp(args.source, args.target)
    print(f"{args.source} -> {args.target}")


_TAG = {"help": "which checkpoint in SRC (default: the one that the file `latest` names)"}
_TAG_UNIVERSAL = {"help": "which checkpoint in SRC (default: the one that the file `latest_universal` names)"}
_BUFFERS = {
    "nargs": "+",
    "default": (),
    "metavar": "NAME",
    "help": "floats in SRC that are buffers, which it does not tell from parameters",
}
CONVERSIONS = (
    Conversion(
        "from-deepspeed",
        "write a ZeRO checkpoint of DeepSpeed, stages 1 to 3, as one of hf_zero",
        _from_deepspeed,
        {"--tag": _TAG},
    ),
    Conversion(
        "to-deepspeed",
        "write a checkpoint of hf_zero as a ZeRO checkpoint of DeepSpeed",
        _to_deepspeed,
        {
            "--stage": {"type": int, "choices": (1, 2, 3), "help": "of the run that loads it [that of SRC, or 1]"},
            "--world-size": {"type": int, "metavar": "N", "help": "ranks of that run [those of the run of SRC]"},
        },
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
    Conversion(
        "from-hf",
        "write the weights of a Hugging Face folder as a checkpoint of hf_zero (back: hf-zero consolidate)",
        _from_hf,
        {"--buffers": _BUFFERS},
        source="the folder, or one file in .safetensors",
    ),
    Conversion(
        "config",
        "write a configuration of DeepSpeed (JSON) or accelerate (yaml) as one of hf_zero, and list what became of it",
        _config,
        source="the file",
        target="the JSON to write, with a launch file in .yaml beside it if SRC is accelerate's [print it]",
        num_targets="?",
    ),
)
