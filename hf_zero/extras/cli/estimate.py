"""`hf-zero estimate`: what every stage and choice of offload needs for a model, which one to take, and its time."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hf_zero.checkpoint.consolidate import parse_bytes
from hf_zero.errors import ConfigError
from hf_zero.extras.cli.text import count

if TYPE_CHECKING:
    from hf_zero.extras.estimate.step_time import Speeds

NAME = "estimate"
SUMMARY = "plan the memory of every stage and offload choice for a model, and name the one to take"
EXAMPLES = """
hf-zero estimate path/to/model --gpus 8 --gpu-memory 80GB --cpu-memory 512GB
hf-zero estimate meta-llama/Llama-3.1-8B --gpus 8 --gpu-memory 80GB
hf-zero estimate config.json --gpus 2 --gpu-memory 24GB --config zero3.json --batch-size 4
hf-zero estimate path/to/model --gpus 8 --gpu-memory 80GB --plot memory.png
hf-zero estimate path/to/model --gpus 8 --nodes 4 --sequence-length 4096 --gradient-checkpointing --json
hf-zero estimate path/to/model --gpus 8 --nodes 64 --gpu-memory 80GB --tflops 400 --link 400GB/s --network 25GB/s
"""


def size(text: str) -> int:
    """Parse a size that names its unit: 80 alone would be 80 bytes."""
    if text.strip()[-1:].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB, 512MB or 24GiB")
    return parse_bytes(text)


def speed(text: str) -> int:
    """Parse a size for each second: 25GB/s, or 25GB."""
    return size(text.strip().removesuffix("/s"))


def above_zero(text: str) -> float:
    """Parse a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a model folder, a config.json, or a cached model's name on the Hub")
    add("--gpus", type=count, default=1, metavar="N", help="GPUs (ranks) of a node (default: 1)")
    add("--nodes", type=count, default=1, metavar="M", help="nodes (default: 1)")
    add("--gpu-memory", type=size, metavar="SIZE", help="memory of a GPU (default: of this machine's, if it has one)")
    add("--cpu-memory", type=size, metavar="SIZE", help="host memory of a node (default: not limited)")
    add("--tflops", type=above_zero, help="1e12 operations that a rank reaches in a second: with it, times of a step")
    add("--link", type=speed, metavar="SPEED", help="what a rank gets from its node, as 400GB/s (hf-zero bench comm)")
    add("--network", type=speed, metavar="SPEED", help="what a node gets from the others, as 25GB/s")
    add("--latency", type=above_zero, metavar="US", default=30.0, help="microseconds of an operation (default 30)")
    add("--decode", type=speed, metavar="SPEED", help="what a CPU makes of 8-bit messages (default: the link's)")
    add("--config", type=Path, metavar="FILE", help="ZeRO configuration for all other keys (default: bf16, AdamW)")
    add("--batch-size", type=count, metavar="B", help="micro-batch of a rank (default: the configuration's, else 1)")
    add("--sequence-length", type=count, metavar="S", help="tokens of a sequence (default: the model's, at most 1024)")
    add("--gradient-checkpointing", action="store_true", help="with activation checkpointing")
    add("--on-cpu", action="store_true", help="ranks compute on the CPU, over gloo")
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="OUT.png", help="draw the memory of every choice, too (matplotlib)")


def run(args: argparse.Namespace) -> None:
    atexit.register(gc.freeze)  # or Python's last collections look through all modules, for a second
    with _without_collections():
        _run(args)


def _speeds(args: argparse.Namespace) -> Speeds | None:
    """Return what times of a step need; None where they are not asked for."""
    from hf_zero.extras.estimate.step_time import Speeds

    needed = {"--link": args.gpus > 1, "--network": args.nodes > 1}
    given = {"--link": args.link, "--network": args.network}
    if args.tflops is None:
        if any(given.values()):
            raise argparse.ArgumentError(None, "--link and --network are for the time of a step: name --tflops, too")
        return None
    for option, is_needed in needed.items():
        if is_needed and given[option] is None:
            raise argparse.ArgumentError(None, f"--tflops: name {option}, too (hf-zero bench comm measures it)")
    unused = float("inf")
    link, network = args.link or unused, args.network or unused
    seconds = args.latency / 1e6
    return Speeds(args.tflops * 1e12, link, network, seconds, on_host=args.on_cpu, decode=args.decode or link)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Plans make a million small objects without cycles, and every collection would look through all modules."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(args: argparse.Namespace) -> None:
    from hf_zero.config import ZeroConfig
    from hf_zero.extras.cli import meta_model
    from hf_zero.extras.cli.memory_chart import check_picture
    from hf_zero.extras.cli.memory_plans import Task
    from hf_zero.extras.estimate.choices import Hardware
    from hf_zero.native.devices import visible_devices

    if args.plot is not None:
        check_picture(args.plot)
    speeds = _speeds(args)
    try:
        model_config = meta_model.read_config(args.model)
        raw = ZeroConfig.load(args.config).values if args.config is not None else {"bf16": {"enabled": True}}
    except ConfigError as error:
        raise argparse.ArgumentError(None, "; ".join(str(error).splitlines())) from error
    memory = args.gpu_memory
    if memory is None and not args.on_cpu and (devices := visible_devices()):
        memory = devices[0].memory_bytes
    hardware = Hardware(args.gpus, args.nodes, memory, args.cpu_memory, args.on_cpu)
    model = meta_model.build(model_config, gradient_checkpointing=args.gradient_checkpointing)
    task = Task(model, raw, hardware, args.sequence_length or meta_model.default_length(model_config))
    answer = task.answer(args.batch_size, speeds)
    if args.plot is not None:
        task.draw(answer, args.plot)
        print(f"wrote {args.plot}", file=sys.stderr)
    if args.json:
        print(json.dumps(task.as_json(answer), indent=2))
    else:
        task.show(answer)
