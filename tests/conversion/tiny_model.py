"""The model, data and parameter groups behind tests/conversion/data; scripts/make_deepspeed_checkpoints.py trains it.

It has what layouts can get wrong: sizes that no world size divides, tied and frozen parameters, two groups, a buffer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STEPS_BEFORE, STEPS_AFTER, ROWS, VOCABULARY = 3, 5, 4, 11


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("gain", torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = self.gain.to(hidden.dtype) * hidden + self.frozen * self.down(torch.tanh(self.up(hidden)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), ids.roll(-1, 1).flatten())


def tiny_model(seed: int) -> TinyModel:
    torch.manual_seed(seed)
    model = TinyModel()
    model.gain.mul_(1 + seed)
    return model


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with hyperparameters of their own."""
    trained = [param for param in model.parameters() if param.requires_grad]
    decay = [param for param in trained if param.dim() > 1]
    return [
        {"params": decay, "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0, "lr": 3e-2},
    ]


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """This rank's part of a batch that is the same at every world size."""
    ids = torch.randint(0, VOCABULARY, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    return ids.chunk(world_size)[rank]
