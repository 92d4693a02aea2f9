"""PyTorch's MNIST example, and two lines that make it train in FP8, as in MS-AMP's.

    python recipes/fp8/mnist.py --enable-msamp --opt-level=O2

The digits come from an installed package: 4,000 to train on, 1,000 to test.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import hf_zero.fp8
from recipes.images.digits import load_digits

Batches = DataLoader[tuple[torch.Tensor, ...]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batch-size", type=int, default=64, metavar="N", help="images of a step [64]")
    add("--test-batch-size", type=int, default=1000, metavar="N", help="images of a batch of the test [1000]")
    add("--epochs", type=int, default=4, metavar="N", help="passes over the digits [4]")
    add("--lr", type=float, default=3e-4, metavar="LR", help="learning rate [3e-4]")
    add("--gamma", type=float, default=0.7, metavar="M", help="factor of the learning rate after an epoch [0.7]")
    add("--no-cuda", action="store_true", help="train on the CPU where there is a GPU")
    add("--dry-run", action="store_true", help="one step for each epoch")
    add("--seed", type=int, default=1, metavar="S", help="random seed [1]")
    add("--log-interval", type=int, default=10, metavar="N", help="steps for each line [10]")
    add("--enable-msamp", action="store_true", help="train in FP8")
    add("--opt-level", default="O1", help="how much has 8 bits: O1, O2 or O3 [O1]")
    return parser.parse_args()


def train(
    args: argparse.Namespace, model: nn.Module, loader: Batches, optimizer: torch.optim.Optimizer, epoch: int
) -> None:
    device = next(model.parameters()).device
    number = len(loader.dataset)  # type: ignore[arg-type]
    model.train()
    for i, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if i % args.log_interval == 0:
            done = f"{i * len(data)}/{number} ({100 * i / len(loader):.0f}%)"
            print(f"Train Epoch: {epoch} [{done}]\tLoss: {loss.item():.6f}", flush=True)
            if args.dry_run:
                break


@torch.no_grad()
def test(model: nn.Module, loader: Batches) -> None:
    device = next(model.parameters()).device
    model.eval()
    loss = right = number = 0.0
    for data, target in loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss += F.nll_loss(output, target, reduction="sum").item()
        right += (output.argmax(1) == target).sum().item()
        number += len(target)
    share = f"{right:.0f}/{number:.0f} ({100 * right / number:.0f}%)"
    print(f"\nTest set: Average loss: {loss / number:.4f}, Accuracy: {share}\n", flush=True)


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.no_cuda else "cpu")
    digits = load_digits(mean=0.1307, deviation=0.3081)
    train_loader: Batches = DataLoader(digits.train, batch_size=args.batch_size)
    test_loader: Batches = DataLoader(digits.test, batch_size=args.test_batch_size)
    model: nn.Module = Net().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.enable_msamp:
        print(f"msamp is enabled, opt_level: {args.opt_level}")
        model, optimizer = hf_zero.fp8.initialize(model, optimizer, opt_level=args.opt_level)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
