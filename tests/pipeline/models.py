"""Small rows of layers, and one process that trains them with torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hf_zero.extras.pipeline.layer_spec import LayerSpec, TiedLayerSpec

WIDTH, WORDS, LAYERS = 8, 16, 6


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.weight[words]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, *, frozen: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        if frozen:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.inner(self.norm(x))))


def to_words(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ embedding.weight.t()


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs.reshape(-1, WORDS), labels.reshape(-1))


VARIANTS = ("plain", "tied", "recomputed", "frozen", "dropout")


def layers_of(variant: str) -> list[LayerSpec]:
    """An embedding, six blocks and a head."""
    tied = variant == "tied"
    dropout = 0.3 if variant == "dropout" else 0.0
    first = TiedLayerSpec("words", Embedding) if tied else LayerSpec(Embedding)
    last = TiedLayerSpec("words", Embedding, forward_fn=to_words) if tied else LayerSpec(nn.Linear, WIDTH, WORDS)
    blocks = [LayerSpec(Block, dropout, frozen=variant == "frozen" and number < 3) for number in range(LAYERS)]
    return [first, *blocks, last]


def options_of(variant: str) -> dict[str, Any]:
    """Return arguments of a PipelineModule."""
    options: dict[str, Any] = {"loss_fn": loss_of}
    if variant == "recomputed":
        options["activation_checkpoint_interval"] = 1
    if variant == "dropout":
        options["seed_layers"] = True
    return options


Micro = tuple[torch.Tensor, torch.Tensor]


def batches(steps: int, pipelines: int, micros: int) -> Iterator[list[list[Micro]]]:
    """Yield the micro-batches of each step and pipeline: another length each step, the last one smaller."""
    generator = torch.Generator().manual_seed(3)

    def words(samples: int, length: int) -> torch.Tensor:
        return torch.randint(WORDS, (samples, length), generator=generator)

    for step in range(steps):
        sizes = [1 if micro == micros - 1 and micros > 1 else 2 for micro in range(micros)]
        yield [[(words(size, 3 + step), words(size, 3 + step)) for size in sizes] for _ in range(pipelines)]


@dataclass(frozen=True)
class Trained:
    """The results of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


CLIP, RATE, STEPS = 0.5, 1e-2, 5


def train_alone(
    module: Any, pipelines: int, micros: int, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> Trained:
    """`module`, of one stage, in this process: gradients of all pipelines and micro-batches, averaged, clipped."""
    params = [param for param in module.parameters() if param.requires_grad]
    steps = optimizer(params, lr=RATE)
    losses, norms = [], []
    for number, batch in enumerate(batches(STEPS, pipelines, micros)):
        total = 0.0
        for pipeline in batch:
            for micro, (words, labels) in enumerate(pipeline):
                module.micro_offset = number * micros + micro
                loss = loss_of(module(words), labels) / (micros * pipelines)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(nn.utils.clip_grad_norm_(params, CLIP).item())
        steps.step()
        steps.zero_grad()
    return Trained(losses, norms, {name: param.detach() for name, param in module.named_parameters()})
