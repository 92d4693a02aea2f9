"""Odd ways through a model: weights used from elsewhere, modules called twice, never, or on some ranks only, hooks."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.registry import VOCAB, WIDTH, Batch, Block, Net, add, around, call_tokens, mean_square


class Rootless(Net):
    """All parameters are in blocks; `how` says which weights are used outside of their own module's forward."""

    def __init__(self, how: str = "", rootless: bool = True) -> None:
        super().__init__()
        self.how = how
        if rootless:
            self.inp, self.head = nn.Identity(), nn.Identity()

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        x = first(x)
        if self.how == "linear":
            x = F.linear(F.linear(x, second.up.weight, second.up.bias), second.down.weight)
        if self.how == "cloned":
            weight = second.up.weight.clone()
            x = x @ weight.t() @ weight
        if self.how == "function":
            x = _Multiply.apply(x, second.down.weight.t()[:WIDTH])
        if self.how == "called":
            scaled = {name: 0.5 * param for name, param in second.named_parameters()}
            x = torch.func.functional_call(second, scaled, (x,))
        if self.how == "own":
            x = torch.func.functional_call(second, dict(second.named_parameters()), (x,))
        if self.how == "input":
            x = x + third(second.down.weight.t()).mean(0)
        if self.how == "loop":
            x = second(x) + 0.01 * sum(param.square().sum() for param in second.parameters())
        return third(x)


class _Multiply(torch.autograd.Function):
    """Saves a weight and uses it in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Clamped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.embed(torch.arange(WIDTH))


class Twice(Net):
    """Blocks called again, at once or after another one; with `chained`, all of it in one checkpoint."""

    def __init__(self, chained: bool | None = None) -> None:
        super().__init__()
        self.chained = chained

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self._chain(x) if self.chained is None else checkpoint(self._chain, x, use_reentrant=self.chained)

    def _chain(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 1, 0, 2, 2):
            x = self.blocks[index](x)
        return x


class Unused(Net):
    """A block that is never called, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)])
        self.blocks[0].gain = nn.Parameter(torch.ones(WIDTH))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](self.blocks[0](x))


class Frozen(Net):
    """A frozen block, and frozen parameters beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)
        self.inp.bias.requires_grad_(False)


class Gated(nn.Module):
    """Some parameters of a unit get a gradient on some ranks only; the unit runs on all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return x + y * self.gain if gated else x + y


Gated.__name__ = "Odd"


class SomeRanks(Net):
    def __init__(self) -> None:
        super().__init__([Gated(), Gated()])

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x, (rank + index) % 2 == 0)
        return self.head(x) if rank != 1 else x


class Experts(Net):
    """`choice` picks the block: by the batch (equal on all ranks), or by the rank."""

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.head(self.blocks[choice % 3](self.inp(x)))


class Sequences(Net):
    """Six blocks, of which each rank uses some in every forward, in any order; often these are those of all ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__([Block() for _ in range(6)])
        self.seed = seed

    def forward(self, x: torch.Tensor, *place: int) -> torch.Tensor:
        x = self.inp(x)
        for index in self.drawn("all") if self.drawn(*place)[0] % 2 else self.drawn(*place)[1:]:
            x = self.blocks[index](x)
        return self.head(x)

    def drawn(self, *key: Any) -> list[int]:
        """Return one to eight blocks, the same for the same key."""
        generator = random.Random(repr((self.seed, key)))
        return generator.choices(range(6), k=generator.randint(1, 8))


class Router(nn.Module):
    """Every expert inside one unit; which of them run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (best == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, index : index + 1])
        return out


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor
    kept: tuple[torch.Tensor, ...] = ()


class Values(Net):
    """Keyword arguments only, dicts between the blocks, a dataclass out of the root."""

    def __init__(self) -> None:
        super().__init__([_Pair() for _ in range(3)])

    def forward(self, *, state: dict[str, Any], scale: float = 0.5) -> Output:  # type: ignore[override]
        inner: dict[str, Any] = {"x": self.inp(state["x"]), "kept": ()}
        for block in self.blocks:
            inner = block(state=inner, scale=scale)
        return Output(inner["x"], self.head(inner["x"]), inner["kept"])


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: dict[str, Any], scale: float) -> dict[str, Any]:
        x = state["x"]
        return {"x": x + scale * torch.tanh(self.linear(x)), "kept": (*state["kept"], x)}


_Pair.__name__ = "Odd"


class Checkpointed(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "nested":
            return checkpoint(self._chain, x, use_reentrant=False)
        if self.how == "parts":
            for block in self.blocks:
                x = x + block.down(checkpoint(self._first_half, block, x, use_reentrant=False))
            return x
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        return x

    def _chain(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def _first_half(self, block: Block, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(block.up(block.norm(x)))


class Buffered(nn.Module):
    """A buffer that each forward moves, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.9), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.linear(x) - self.mean.clone()) * self.scale
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return out


def _tensor_hooks() -> nn.Module:
    net = Net()
    for index, param in enumerate(net.blocks.parameters()):
        if index % 3 == 0:
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    net.head.weight.register_hook(lambda grad: 2 * grad)
    return net


def _post_hooks() -> nn.Module:
    net = Net()
    for param in (net.blocks[1].up.weight, net.head.bias):
        param.register_post_accumulate_grad_hook(_double)
    return net


def _double(param: torch.Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(2)


def _module_hooks() -> nn.Module:
    net = Net()
    net.blocks[0].register_full_backward_hook(lambda _m, given, _out: (given[0] * 1.5,))
    net.blocks[1].register_forward_hook(lambda _m, _args, out: out * 0.9)
    net.blocks[2].register_forward_pre_hook(lambda _m, args: (args[0] + 0.1,))
    return net


def _dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh())


# ---------------------------------------------------------------- losses
def with_rank(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    return mean_square(run(batch.x, batch.rank))


def with_place(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    return mean_square(run(batch.x, batch.step, batch.micro, batch.rank))


def equal_choice(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    return mean_square(run(batch.x, batch.step + batch.micro))


def values(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    output = run(state={"x": batch.x})
    return mean_square(output.logits) + mean_square(output.kept[1]) + 0.1 * mean_square(output.hidden)


def seeded(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    torch.manual_seed(1000 * batch.step + 10 * batch.micro + batch.rank)
    return mean_square(run(batch.x))


def outside_loss(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    """A fused loss: the model returns logits, the loss reads the weights of the head again."""
    head: nn.Linear = net.head  # type: ignore[assignment]
    return mean_square(F.linear(run(batch.x) @ head.weight, head.weight, head.bias))


def inner_loss(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    """A loss from inside a unit beside that of the output."""
    kept: list[torch.Tensor] = []
    handle = net.blocks[1].up.register_forward_hook(lambda _m, _a, out: kept.append(out))  # type: ignore[union-attr]
    output = run(batch.x)
    handle.remove()
    return mean_square(output) + 0.1 * mean_square(kept[0])


def penalty(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return mean_square(run(batch.x))
    x = batch.x.clone().requires_grad_(True)
    output = run(x)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return mean_square(output) + mean_square(grad)


def submodules(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    """Call parts of the model one by one, without its root."""
    return mean_square(net.head(net.blocks[2](net.inp(batch.x))))  # type: ignore[operator,index]


class Token(nn.Module):
    """An embedding whose rows get gradients where the tokens of the rank are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=3)
        self.block = Block()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.block(self.embed(tokens))


add("no root", Rootless)
for _how in ("linear", "cloned", "function", "called", "own", "input", "loop"):
    _traits = "reads" if _how in ("called", "own", "loop") else ""
    add(f"no root, {_how}", lambda how=_how: Rootless(how), traits=_traits)
    add(f"root, {_how}", lambda how=_how: Rootless(how, rootless=False), traits=_traits)
add("clamped", around(lambda: Clamped(WIDTH, WIDTH)), traits="writes once")
add("max norm", around(MaxNorm), traits="writes once")
add("twice", Twice)
add("twice, checkpointed", lambda: Twice(chained=False))
add("twice, reentrant", lambda: Twice(chained=True))
add("unused", Unused)
add("frozen", Frozen)
add("some ranks", SomeRanks, with_rank, traits="local")
add("experts, equal", Experts, equal_choice)
add("experts, by rank", Experts, with_rank, traits="local")
for _seed in range(8):
    add(f"sequences {_seed}", lambda seed=_seed: Sequences(seed), with_place, traits="local")
add("router", around(Router), traits="local")
add("values", Values, values)
for _how in ("reentrant", "not reentrant", "nested", "parts"):
    add(f"checkpointed, {_how}", lambda how=_how: Checkpointed(how))
add("buffers", around(Buffered), traits="buffers once")
add("tensor hooks", _tensor_hooks, traits="hooks noise")  # what is cut to +-0.01 may cancel
add("post-accumulate hooks", _post_hooks, traits="hooks once")
add("module hooks", _module_hooks)
add("dropout", around(_dropout), seeded, traits="once")
add("loss reads the head", Net, outside_loss)
add("loss from inside", Net, inner_loss)
add("gradient penalty", Net, penalty, traits="once")
add("submodules", Net, submodules)
add("tokens", Token, call_tokens)
