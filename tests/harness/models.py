"""Small models whose sizes divide by neither 2 nor 3, so that shards are uneven and padded.

Every model but `Net` takes a batch as keyword arguments and returns a dict with its "loss".
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, HIDDEN, INNER, LENGTH = 17, 11, 13, 5
WIDTH = 8  # of Net

# The parity matrix varies this in the transformer below; "a+b" is both.
VARIANTS = (
    "plain",
    "twice",  # the first layer is called twice in one forward
    "tied",  # embedding and head are one parameter
    "unused",  # a layer, and a parameter of a layer, that never get a gradient
    "unused_somewhere",  # a module of the root and a parameter of every layer get none on rank 0
    "frozen",  # a whole layer, a parameter in every other layer, and the positions
    "unequal",  # ranks and micro-batches with different numbers of tokens
    "reentrant",  # gradient checkpointing
    "non_reentrant",
)


class Attention(nn.Module):
    """Causal, one head. The biases of `key` have no influence on the output: their true gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / math.sqrt(HIDDEN)
        future = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out(weights @ self.value(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN, bias=False)
        self.gain = nn.Parameter(torch.zeros(HIDDEN))  # some variants leave it unused

    def forward(self, x: torch.Tensor, use_gain: bool = True) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x * (1 + self.gain) if use_gain else x


class Toy(nn.Module):
    """A transformer of three layers (and one more that only some variants use); units by `_no_split_modules`."""

    _no_split_modules = ("Layer",)

    def __init__(self, variant: str = "plain") -> None:
        super().__init__()
        self.variant = set(variant.split("+"))
        if not self.variant <= set(VARIANTS):
            raise ValueError(variant)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Parameter(torch.zeros(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if "unused" in self.variant:
            self.extra: nn.Module = Layer()
        if "unused_somewhere" in self.variant:
            self.extra = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.register_buffer("scale", torch.full((HIDDEN,), 0.9))
        if "tied" in self.variant:
            self.head.weight = self.embed.weight
        if "frozen" in self.variant:
            self.positions.requires_grad_(False)
            self.layers[1].requires_grad_(False)
            for layer in (self.layers[0], self.layers[2]):
                layer.up.weight.requires_grad_(False)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        num_items: float | None = None,
        use_extra: bool | None = None,
    ) -> dict[str, torch.Tensor]:
        """Mean loss over the tokens of this batch; with `num_items`, their sum divided by it."""
        x = self.embed(input_ids) + self.positions
        x = x * self.scale.to(x.dtype)
        order = [0, 1, 2]
        if "twice" in self.variant:
            order = [0, 1, 0, 2]
        for index in order:
            x = self._layer(self.layers[index], x, use_extra)
        if use_extra:
            x = self.extra(x)
        logits = self.head(self.norm(x))
        reduction = "mean" if num_items is None else "sum"
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction=reduction)
        return {"loss": loss if num_items is None else loss / num_items, "logits": logits}

    def _layer(self, layer: nn.Module, x: torch.Tensor, use_extra: bool | None) -> torch.Tensor:
        use_gain = "unused" not in self.variant and use_extra is not False
        if self.variant & {"reentrant", "non_reentrant"} and self.training:
            return checkpoint(layer, x, use_gain, use_reentrant="reentrant" in self.variant)
        return layer(x, use_gain)


class ConvNet(nn.Module):
    """No `_no_split_modules`: units are found by size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 7, 3, padding=1)
        self.norm1 = nn.GroupNorm(1, 7)
        self.conv2 = nn.Conv2d(7, 13, 3, stride=2, padding=1)
        self.block = nn.Sequential(nn.Linear(13 * 16, 131), nn.GELU(), nn.Linear(131, 127))
        self.head = nn.Linear(127, 5)

    def forward(self, pixels: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.norm1(self.conv1(pixels.to(self.conv1.bias.dtype))))
        x = F.relu(self.conv2(x)).flatten(1)
        logits = self.head(F.relu(self.block(x)))
        return {"loss": F.cross_entropy(logits, target), "logits": logits}


class Net(nn.Module):
    """A tied weight, a frozen layer, a buffer that counts and one that does not; an attribute and a method of its own.

    Returns the loss for token ids.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("calls", torch.zeros(1))
        self.vocabulary = 11

    def describe(self, word: str) -> str:
        return f"{word} {type(self).__name__}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        inner = self.inner(self.embed(ids))
        hidden = self.frozen(torch.tanh(inner * self.scale.to(inner.dtype)))
        return F.cross_entropy(self.head(hidden), ids)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=53,
        hidden_size=22,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=14,
        max_position_embeddings=32,
        initializer_range=0.2,
        attn_implementation="eager",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A variant of Toy, "convnet", or "llama" (also with "_[non_]reentrant"); the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        if name == "convnet":
            model: nn.Module = ConvNet()
        elif name.startswith("llama"):
            model = tiny_llama()
            if name.endswith("reentrant"):
                kwargs = {"use_reentrant": not name.endswith("non_reentrant")}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FutureWarning)  # the name that users know
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        else:
            model = Toy(name)
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(torch.randn(param.shape) * 0.3)
    return model.to(dtype)


def make_batch(name: str, *, seed: int, rank: int) -> dict[str, Any]:
    """One micro-batch of two samples. `num_items` of the unequal variant is added by the caller: it is global."""
    generator = torch.Generator().manual_seed(seed)
    if name == "convnet":
        pixels = torch.randn(2, 3, 8, 8, generator=generator)
        return {"pixels": pixels, "target": torch.randint(5, (2,), generator=generator)}
    vocab = 53 if name.startswith("llama") else VOCAB
    tokens = torch.randint(vocab, (2, LENGTH), generator=generator)
    labels = torch.randint(vocab, (2, LENGTH), generator=generator)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    if "unequal" in name:
        kept = 1 + (seed + 3 * rank) % (2 * LENGTH - 1)
        labels.view(-1)[kept:] = -100
    if "unused_somewhere" in name:
        batch["use_extra"] = rank != 0
    return batch
