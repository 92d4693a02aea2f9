"""The fuzz test knows this of a model: how it is built, what one loss of it is, and what must be left out with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

WIDTH, VOCAB, LENGTH = 11, 17, 5


@dataclasses.dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank."""

    x: torch.Tensor  # [4, WIDTH], of the type of the model
    tokens: torch.Tensor  # [2, LENGTH], int64, below VOCAB
    step: int
    micro: int
    rank: int


def make_batch(dtype: torch.dtype, step: int, micro: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return Batch(x, torch.randint(VOCAB, (2, LENGTH), generator=generator), step, micro, rank)


# (what is called: the engine or the plain module, the module itself, batch) -> loss
Loss = Callable[[Any, nn.Module, Batch], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Model:
    """A row of the table.

    Traits:
        local: parameters get gradients on some ranks only, or ranks use different modules.
        writes: the forward changes its own weights: refusing that by name is right at stage 3.
        buffers: the forward changes buffers, so a batch of NaN spoils them.
        noise: some true gradients are zero, and optimizers that divide by their size follow rounding errors.
        hooks: gradients are edited by hooks that see one micro-batch and one backward.
        empty: has parameters without elements, whose mean some optimizers divide by zero for.
        typed: has types of its own: not trained in 16 bits, where all parameters would be cast.
        wide: parts of it stay in fp32 under bf16, so it is not trained in 16 bits.
        single: computes partly in fp32 whatever its type is, so it is compared in fp32 only.
        once: one forward and one backward per micro-batch (no retained graph, no second loss).
        reads: values of parameters() in a loop, which stage 3 gathers only around a forward: a StateError is right.
        uncopied: torch itself cannot deep-copy it.
        slow: takes a second; drawn less often.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    traits: frozenset[str]

    def has(self, *traits: str) -> bool:
        return not self.traits.isdisjoint(traits)


TRAITS = frozenset("local writes buffers noise hooks empty wide typed single once reads uncopied slow".split())
MODELS: dict[str, Model] = {}


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean() if output.dtype == torch.bfloat16 else output.square().mean()


def call_x(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    return mean_square(run(batch.x))


def call_tokens(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    return mean_square(run(batch.tokens))


def add(name: str, build: Callable[[], nn.Module], loss: Loss = call_x, traits: Iterable[str] | str = ()) -> None:
    """Put a model into the table; `traits` may be words in one string."""
    chosen = frozenset(traits.split() if isinstance(traits, str) else traits)
    if not chosen <= TRAITS or name in MODELS:
        raise ValueError(f"{name}: unknown traits {sorted(chosen - TRAITS)}, or a second model of this name")
    MODELS[name] = Model(name, build, loss, chosen)


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """The same weights every time. Parameters that are not floating, or typed by the model itself, keep their type."""
    model = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4321)
        net = model.build()
    if model.has("typed"):
        return net
    return net.to(dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between projections of the root; a subclass changes the blocks or `hidden`."""

    _no_split_modules = ("Block", "Odd")

    def __init__(self, blocks: Iterable[nn.Module] | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.inp(x)))


def around(odd: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A Net whose second and third blocks are the odd module ([n, WIDTH] -> the same), each as a unit of its own."""

    def make() -> nn.Module:
        return Net([Block(), Odd(odd()), Odd(odd())])

    return make


class Odd(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)
