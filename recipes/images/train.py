"""Trains the networks of two walk-throughs on images: in one process, with DataParallel, DDP, or ZeRO by a JSON.

    hf-zero launch --num_gpus 2 recipes/images/train.py --deepspeed_config recipes/images/ds_config.json
    torchrun --standalone --nproc_per_node 2 recipes/images/train.py --precision bf16 --stage 3 --offload
    torchrun --standalone --nproc_per_node 2 recipes/images/train.py --way ddp
    python recipes/images/train.py --way dp

All ways take the same weights and the same images in each step, and sum gradients in the same order, so losses can be
compared to the last bit. What a run came to is in a file for report.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

import hf_zero
from recipes.fp8.counting import sent_since
from recipes.images.digits import load_digits
from recipes.images.networks import NETS
from recipes.zero_inference.texts import peak_memory

CLASSES = tuple("zero one two three four five six seven eight nine".split())
SHOWN = 4  # images whose predictions are printed
WAYS = {"plain": "one process", "dp": "DataParallel", "ddp": "DDP"}  # without ZeRO
KINDS = ("parameters", "gradients", "master", "optimizer", "device", "host")  # of an engine's memory_report

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # trains on images and labels, and returns the loss
Trained = tuple[nn.Module | hf_zero.ZeroEngine, DataLoader[Any], Step, torch.device]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--way", choices=(*WAYS, "zero"), default="zero", help="those without ZeRO compute in fp32 [zero]")
    add("--parts", type=int, default=2, help="one process takes a step's images in so many parts, as ranks would [2]")
    add("--net", choices=tuple(NETS), default="ConvNet")
    add("--precision", choices=("fp32", "fp16", "bf16", "O1", "O2", "O3"), help="in the place of the JSON's")
    add("--stage", type=int, choices=range(4), help="ZeRO stage, in the place of the JSON's")
    add("--offload", action="store_true", help="states, and at stage 3 parameters, in the host's memory")
    add("-e", "--epochs", default=3, type=int, help="passes over the images [3]")
    add("--images", default=4000, type=int, help="number of images to train on [4000, all of them]")
    add("--log-interval", type=int, help="steps for each line with a loss [100; 200 of Net]")
    add("--output", type=Path, default=Path("outputs/images"), help="folder of the file [outputs/images]")
    add("--local_rank", type=int, default=-1, help="set by launchers")
    hf_zero.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=Path(__file__).with_name("ds_config.json"))
    return parser.parse_args(arguments)


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON as it stands, but for what options replace."""
    config: dict[str, Any] = json.loads(Path(args.deepspeed_config).read_text())
    if args.precision is not None:
        fp16 = config.pop("fp16", {"enabled": True})
        config.pop("msamp", None)
        if args.precision == "bf16":
            config["bf16"] = {"enabled": True}
        elif args.precision != "fp32":
            config["fp16"] = fp16
        if args.precision.startswith("O"):
            config["msamp"] = {"enabled": True, "opt_level": args.precision}
    zero = config["zero_optimization"]
    if args.stage is not None:
        zero["stage"] = args.stage
    if args.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu"}
    return config


def name_of(args: argparse.Namespace, config: dict[str, Any]) -> str:
    if args.way in WAYS:
        return WAYS[args.way]
    enabled = [kind for kind in ("msamp", "bf16", "fp16") if config.get(kind, {}).get("enabled")]
    precision = config["msamp"]["opt_level"] if "msamp" in enabled else [*enabled, "fp32"][0]
    return f"{precision}, stage {config['zero_optimization']['stage']}{', offload' if args.offload else ''}"


def with_zero(model: nn.Module, images: Dataset[Any], config: dict[str, Any]) -> Trained:
    engine, _, loader, _ = hf_zero.initialize(
        model=model, model_parameters=model.parameters(), training_data=images, config=config
    )
    assert loader is not None
    say(f"model: {engine.module}")
    say(f"fp16={engine.fp16_enabled()}")

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(engine(inputs.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        return loss

    return engine, loader, step, engine.device


def without_zero(way: str, parts: int, model: nn.Module, images: Dataset[Any], config: dict[str, Any]) -> Trained:
    """Take the batch and Adam from the configuration; AdamW, as DeepSpeed's Adam decays weights in its way."""
    if {"scheduler", "gradient_clipping"} & set(config):
        raise SystemExit("A schedule or clipping in the JSON needs --way zero: the other ways have neither.")
    if (way == "ddp") != (dist.get_world_size() > 1):
        raise SystemExit("--way ddp needs several processes, and plain and dp need one: dp has threads for its GPUs.")
    index = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", index) if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    if way == "dp":
        model = nn.DataParallel(model)
    if way == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"], fused=True)
    batch = config["train_batch_size"] // dist.get_world_size()
    loader = DataLoader(images, batch, sampler=DistributedSampler(images))

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        losses = []
        for part in range(parts):  # the images of a rank: gradients are summed in the order in which ranks sum them
            loss = F.cross_entropy(model(inputs[part::parts].to(device)), labels[part::parts].to(device))
            (loss / parts).backward()
            losses.append(loss.detach().double())
        optimizer.step()
        return torch.stack(losses).mean()

    return model, loader, step, device


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, print what the walk-throughs print, and tell of the run. All ranks must call."""
    torch.manual_seed(0)
    digits = load_digits(channels=3, size=32, mean=0.5, deviation=0.5)
    images = Subset(digits.train, range(args.images))
    config, model = config_of(args), NETS[args.net]()
    if args.way == "zero":
        trained, loader, step, device = with_zero(model, images, config)
    else:
        parts = 1 if args.way == "ddp" else args.parts
        trained, loader, step, device = without_zero(args.way, parts, model, images, config)
    assert isinstance(loader.sampler, DistributedSampler)
    losses, scales, seconds, processor = [], [], [], time.process_time()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for i, (inputs, labels) in enumerate(loader):
            scales.append(trained.optimizer.cur_scale if isinstance(trained, hf_zero.ZeroEngine) else 1.0)
            began = time.perf_counter()
            losses.append(step(inputs, labels).item())
            seconds.append(time.perf_counter() - began)
            show_loss(args, epoch, i, len(loader), losses)
    processor = time.process_time() - processor
    say("Finished Training")
    means = torch.tensor([*losses, processor / len(losses), peak_memory()], dtype=torch.float64, device=device)
    dist.all_reduce(means)
    *losses, processor, peak = (means / dist.get_world_size()).tolist()
    run = {
        "net": args.net,
        "name": name_of(args, config),
        "world_size": dist.get_world_size(),
        "losses": losses,
        "scales": scales,
        "step_ms": statistics.median(seconds) * 1e3,
        "processor_ms": processor * dist.get_world_size() * 1e3,  # of all processes
        "peak_mb": peak / 1e6,  # of one
        **count_bytes(trained, model, len(losses)),
        "accuracy": show_accuracy(trained, device, *digits.test.tensors),
    }
    if isinstance(trained, hf_zero.ZeroEngine):
        run["skipped"] = trained.skipped_steps
        trained.teardown()
    return run


def show_loss(args: argparse.Namespace, epoch: int, i: int, number: int, losses: list[float]) -> None:
    """Print the loss of a step or the mean of some, as each of the walk-throughs does."""
    every = args.log_interval or (200 if args.net == "Net" else 100)
    if args.net == "Net" and i % every == every - 1:
        say(f"[{epoch + 1}, {i + 1:5d}] loss: {statistics.fmean(losses[-every:]):.3f}")
    if args.net == "ConvNet" and i % every == 0:
        say(f"Epoch: {epoch} | Batch: {i}/{number} | Loss: {losses[-1]:.4f}")


def count_bytes(trained: nn.Module | hf_zero.ZeroEngine, model: nn.Module, steps: int) -> dict[str, Any]:
    """The bytes that rank 0 keeps for each parameter of the model between steps, and those that it sends in one."""
    if isinstance(trained, hf_zero.ZeroEngine):
        report, sent = trained.memory_report(), sum(sent_since(trained, {}).values()) / steps
    else:  # all in fp32, and an all-reduce of gradients in a ring
        size = sum(param.nbytes for param in model.parameters())
        report = dict(zip(KINDS, (size, size, 0, 2 * size, 4 * size, 0), strict=True))
        sent = 2 * (dist.get_world_size() - 1) / dist.get_world_size() * size
    numel = sum(param.numel() for param in model.parameters())
    return {"bytes": {kind: report[kind] / numel for kind in KINDS}, "sent": sent / numel}


@torch.no_grad()
def show_accuracy(trained: Any, device: torch.device, images: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Print how many test images the network names rightly, in percent of each class. All ranks must call."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    predicted = torch.zeros_like(labels, device=device)
    predicted[mine] = trained(images[mine].to(device)).argmax(1)
    dist.all_reduce(predicted)
    predicted = predicted.cpu()
    for title, classes in (("GroundTruth:", labels), ("Predicted:", predicted)):
        say(title, " ".join(f"{CLASSES[number]:>5}" for number in classes[:SHOWN].tolist()))
    right = 100 * (predicted == labels).float()
    say(f"Accuracy of the network on the {len(labels)} test images: {right.mean():.0f} %")
    shares = {name: right[labels == number].mean().item() for number, name in enumerate(CLASSES)}
    for name, share in shares.items():
        say(f"Accuracy of {name:>5} : {share:2.0f} %")
    return {"all": right.mean().item(), **shares}


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def main() -> None:
    args = parse()
    hf_zero.init_distributed()
    run = train(args)
    if dist.get_rank() == 0:
        name = f"{run['net']} {run['name']} {len(run['losses'])} steps".replace(",", "").replace(" ", "-")
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / f"{name}.json").write_text(json.dumps(run) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
