"""Models and training steps that trip up sharded training: `TRAPS`, compared with plain PyTorch by test_traps.py.

A step does everything for one batch but the optimizer's part; it gets an engine, or the plain module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 11

Step = Callable[[Any, torch.Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an input and an output projection that are in the root unit."""

    _no_split_modules = ("Block", "AttentionBlock", "Pair")

    def __init__(self, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks if blocks is not None else [Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(x))


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def plain_step(model: Any, x: torch.Tensor) -> None:
    mean_square(model(x)).backward()


# ---------------------------------------------------------------- models
class SharedAcross(Net):
    """One Linear used by two blocks: it belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up = self.blocks[0].up


class SharedBlock(Net):
    """One block in two places, checkpointed reentrantly: its gradients arrive twice, in two nested backwards."""

    def __init__(self) -> None:
        first = Block()
        super().__init__([first, Block(), first])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Repeated(Net):
    """Blocks called twice in a row (as ALBERT's layer is) and once more after another one; one checkpoint or none."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        return self._chain(x) if self.reentrant is None else checkpoint(self._chain, x, use_reentrant=self.reentrant)

    def _chain(self, x: torch.Tensor) -> torch.Tensor:
        for index in (0, 0, 1, 0, 2, 2, 2):
            x = self.blocks[index](x)
        return x


class Nested(Net):
    """Checkpointing of a whole chain and, inside, of each block again."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        def chain(y: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                y = checkpoint(block, y, use_reentrant=False)
            return y

        return checkpoint(chain, self.inp(x), use_reentrant=False)


class InsideBlock(Net):
    """Checkpointing of a part of a block: recomputation starts inside the unit."""

    def __init__(self) -> None:
        super().__init__([_PartlyCheckpointed() for _ in range(3)])


class _PartlyCheckpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(lambda y: torch.tanh(self.up(self.norm(y))), x, use_reentrant=False))


_PartlyCheckpointed.__name__ = "Block"


class AttentionBlock(nn.Module):
    """MultiheadAttention reads out_proj.weight without calling out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.unsqueeze(0)
        return x + self.mix(self.attention(y, y, y, need_weights=False)[0].squeeze(0))


class Attention(Net):
    def __init__(self) -> None:
        super().__init__([AttentionBlock() for _ in range(2)])


class BySize(nn.Module):
    """MultiheadAttention and friends with no `_no_split_modules`: the size rule has to choose modules that run."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(130, 2, batch_first=True)
        self.pair = nn.ModuleDict({"a": nn.Linear(WIDTH, 130), "b": nn.Linear(130, 131)})
        self.bag = nn.ParameterList([nn.Parameter(torch.randn(131, 129) * 0.1)])
        self.head = nn.Linear(129, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.pair["a"](x).unsqueeze(0)
        y = self.attention(y, y, y, need_weights=False)[0].squeeze(0)
        return self.head(torch.tanh(self.pair["b"](y)) @ self.bag[0])


class Pair(nn.Module):
    """A unit that takes and returns nested values, some of them passed on untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any], *, scale: float) -> dict[str, Any]:
        x, history = state["x"], state["history"]
        return {"x": x + scale * torch.tanh(self.linear(x)), "history": (*history, x)}


class NestedValues(Net):
    def __init__(self) -> None:
        super().__init__([Pair() for _ in range(3)])

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        state: dict[str, Any] = {"x": self.inp(x), "history": ()}
        for pair in self.blocks:
            state = pair(state, scale=0.5)
        return state["x"] + sum(state["history"])


class ReadsHead(Net):
    """A fused loss: the model returns hidden states, the loss reads the weights of the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden(x)


class ReadsBlock(Net):
    """Weights of a block are used without a call of it."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        return third(F.linear(F.linear(first(self.inp(x)), second.up.weight), second.down.weight))


class ChannelsLast(nn.Module):
    """The numbers are kept; the memory format is not, as a line in the log says."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(1, 1, 4, WIDTH).expand(2, 3, 4, WIDTH)
        return self.head(self.conv(image).mean((2, 3)))


class VmapBlocks(Net):
    """Blocks are called inside a transform, one row at a time."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = torch.vmap(block)(x)
        return x


def vmapped(model: Any, x: torch.Tensor) -> None:
    mean_square(torch.vmap(lambda row: model(row))(x)).backward()


class InPlace(Net):
    """In-place activations on what a unit returned."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = F.relu_(block(x) + 0.1)
        return x


# ---------------------------------------------------------------- steps
def fused_loss(model: Any, x: torch.Tensor) -> None:
    module = getattr(model, "module", model)
    hidden = model(x)
    mean_square(F.linear(hidden, module.head.weight, module.head.bias)).backward()


def two_backwards(model: Any, x: torch.Tensor) -> None:
    plain_step(model, x)
    mean_square(model(x * 0.5) + 1).backward()


def two_forwards_one_loss(model: Any, x: torch.Tensor) -> None:
    (mean_square(model(x)) + model(-x).mean()).backward()


def two_forwards_backwards_reversed(model: Any, x: torch.Tensor) -> None:
    first, second = mean_square(model(x)), model(-x).mean()
    second.backward()
    first.backward()


def retained_graph(model: Any, x: torch.Tensor) -> None:
    loss = mean_square(model(x))
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()


def evaluation_between(model: Any, x: torch.Tensor) -> None:
    loss = mean_square(model(x))
    with torch.no_grad():
        model(x + 1)
    loss.backward()


def evaluation_before_and_after(model: Any, x: torch.Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        model(x)
    model.train()
    plain_step(model, x)
    with torch.no_grad():
        model(x)


def eval_mode_backward(model: Any, x: torch.Tensor) -> None:
    model.eval()
    plain_step(model, x)
    model.train()


def auxiliary_loss(model: Any, x: torch.Tensor) -> None:
    """A loss from something inside a unit that the model does not return."""
    module = getattr(model, "module", model)
    kept: list[torch.Tensor] = []
    handle = module.blocks[1].up.register_forward_hook(lambda _m, _a, out: kept.append(out))
    output = model(x)
    handle.remove()
    (mean_square(output) + 0.1 * kept[0].square().mean()).backward()


def only_auxiliary_loss(model: Any, x: torch.Tensor) -> None:
    """The loss takes nothing of what the root returned."""
    module = getattr(model, "module", model)
    kept: list[torch.Tensor] = []
    handle = module.blocks[1].register_forward_hook(lambda _m, _a, out: kept.append(out))
    model(x)
    handle.remove()
    kept[0].square().mean().backward()


def gradient_to_input(model: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_(True)
    mean_square(model(x)).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and bool(x.grad.any())


def gradient_penalty(model: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_(True)
    output = model(x)
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    (mean_square(output) + grad.square().mean()).backward()


def penalty_after_backward(model: Any, x: torch.Tensor) -> None:
    """backward(create_graph=True), then a second backward through it, before the step."""
    x = x.clone().requires_grad_(True)
    mean_square(model(x)).backward(create_graph=True)
    assert x.grad is not None
    grad, x.grad = x.grad, None
    grad.square().sum().backward()


def abandoned_forward(model: Any, x: torch.Tensor) -> None:
    model(x * 3)
    plain_step(model, x)


def failing_forward(model: Any, x: torch.Tensor) -> None:
    """A forward that raises half-way, on all ranks, and is caught (as auto_find_batch_size does)."""
    module = getattr(model, "module", model)
    handle = module.blocks[1].register_forward_pre_hook(_raise)
    with contextlib.suppress(FloatingPointError):
        model(x)
    handle.remove()
    plain_step(model, x)


def _raise(*_: Any) -> None:
    raise FloatingPointError("on purpose")


def failing_backward(model: Any, x: torch.Tensor) -> None:
    """A backward that raises half-way, on all ranks; what it accumulated is dropped by zero_grad."""
    module = getattr(model, "module", model)
    kept: list[torch.Tensor] = []
    handle = module.blocks[1].register_forward_hook(lambda _m, _a, out: kept.append(out))
    output = model(x)
    handle.remove()
    kept[0].register_hook(_raise)
    with contextlib.suppress(FloatingPointError):
        mean_square(output).backward()
    model.zero_grad()
    plain_step(model, x)


def zero_grad_drops(model: Any, x: torch.Tensor) -> None:
    mean_square(model(x * 7)).backward()
    model.zero_grad()
    plain_step(model, x)


def submodule_called_alone(model: Any, x: torch.Tensor) -> None:
    module = getattr(model, "module", model)
    mean_square(module.blocks[0](x)).backward()
    plain_step(model, x)


def submodule_only(model: Any, x: torch.Tensor) -> None:
    module = getattr(model, "module", model)
    mean_square(module.head(module.blocks[2](module.inp(x)))).backward()


TRAPS: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "shared across units": (SharedAcross, plain_step),
    "shared block, reentrant": (SharedBlock, plain_step),
    "called in a row": (Repeated, plain_step),
    "called in a row, checkpointed": (lambda: Repeated(False), plain_step),
    "called in a row, reentrant": (lambda: Repeated(True), two_backwards),
    "nested checkpointing": (Nested, plain_step),
    "checkpointing inside a unit": (InsideBlock, plain_step),
    "MultiheadAttention": (Attention, plain_step),
    "units by size": (BySize, plain_step),
    "nested values": (NestedValues, plain_step),
    "channels_last": (ChannelsLast, plain_step),
    "in-place activations": (InPlace, plain_step),
    "vmap over blocks": (VmapBlocks, plain_step),
    "vmap over the model": (Net, vmapped),
    "fused loss": (ReadsHead, fused_loss),
    "block read, retained graph": (ReadsBlock, retained_graph),
    "block read, two forwards, reversed": (ReadsBlock, two_forwards_backwards_reversed),
    "two backwards": (Net, two_backwards),
    "two backwards, shared, reentrant": (SharedBlock, two_backwards),
    "two forwards, one loss": (Net, two_forwards_one_loss),
    "two forwards, reversed": (Net, two_forwards_backwards_reversed),
    "retained graph": (Net, retained_graph),
    "evaluation between": (Net, evaluation_between),
    "evaluation before and after": (Net, evaluation_before_and_after),
    "eval-mode backward": (Net, eval_mode_backward),
    "auxiliary loss": (Net, auxiliary_loss),
    "only auxiliary loss": (Net, only_auxiliary_loss),
    "gradient to input": (Net, gradient_to_input),
    "gradient penalty": (Net, gradient_penalty),
    "penalty after backward": (Net, penalty_after_backward),
    "abandoned forward": (Net, abandoned_forward),
    "failing forward": (Net, failing_forward),
    "failing backward": (Net, failing_backward),
    "zero_grad": (Net, zero_grad_drops),
    "submodule called alone": (Net, submodule_called_alone),
    "submodule only": (Net, submodule_only),
}
