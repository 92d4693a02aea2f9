"""A small convolutional network on images, as in MS-AMP's example for DeepSpeed: its configuration chooses FP8.

    cd recipes/fp8
    hf-zero launch --num_gpus 2 images.py --deepspeed --deepspeed_config ds_config_msamp.json
    torchrun --standalone --nproc_per_node 2 images.py --deepspeed_config ds_config_zero_msamp.json

The images are digits of MNIST from an installed package, padded to 32 x 32 and repeated in three channels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

import hf_zero
from recipes.fp8.digits import load_digits

CLASSES = tuple("zero one two three four five six seven eight nine".split())
SHOWN = 4  # images whose predictions are printed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        scores: torch.Tensor = self.fc3(x)
        return scores


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-e", "--epochs", default=4, type=int, help="passes over the images [4]")
    parser.add_argument("--images", default=4000, type=int, help="number of images to train on [4000, all of them]")
    parser.add_argument("--log-interval", type=int, default=200, help="micro-batches for each line with a loss [200]")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by launchers")
    hf_zero.add_config_arguments(parser)
    return parser.parse_args()


def train(engine: hf_zero.ZeroEngine, loader: DataLoader[list[torch.Tensor]], args: argparse.Namespace) -> None:
    criterion = nn.CrossEntropyLoss()
    fp16 = engine.fp16_enabled()
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        running_loss = 0.0
        for i, (inputs, labels) in enumerate(loader):
            inputs, labels = inputs.to(engine.device), labels.to(engine.device)
            loss = criterion(engine(inputs.half() if fp16 else inputs), labels)
            engine.backward(loss)
            engine.step()
            running_loss += loss.item()
            if i % args.log_interval == args.log_interval - 1:
                say(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
    say("Finished Training")


@torch.no_grad()
def predict(engine: hf_zero.ZeroEngine, images: torch.Tensor) -> torch.Tensor:
    """The class of each image. All ranks must call."""
    images = images.to(engine.device)
    scores: torch.Tensor = engine(images.half() if engine.fp16_enabled() else images)
    return scores.argmax(1).cpu()


def show_accuracy(engine: hf_zero.ZeroEngine, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Print how many test images the network names rightly. All ranks must call."""
    predicted = predict(engine, images)
    for title, classes in (("GroundTruth:", labels), ("Predicted:", predicted)):
        say(title, " ".join(f"{CLASSES[number]:>5}" for number in classes[:SHOWN].tolist()))
    right = (predicted == labels).float()
    say(f"Accuracy of the network on the {len(labels)} test images: {100 * right.mean():.0f} %")
    for number, name in enumerate(CLASSES):
        say(f"Accuracy of {name:>5} : {100 * right[labels == number].mean():2.0f} %")


def say(*words: object) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    digits = load_digits(channels=3, size=32, mean=0.5, deviation=0.5)
    chosen = Subset(digits.train, range(args.images))
    engine, _, loader, _ = hf_zero.initialize(args=args, model=Net(), training_data=chosen)
    assert loader is not None
    say(f"model: {engine.module}")
    say(f"fp16={engine.fp16_enabled()}")
    train(engine, loader, args)
    show_accuracy(engine, *digits.test.tensors)
    engine.teardown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
