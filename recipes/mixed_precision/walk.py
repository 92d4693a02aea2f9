"""Mixed precision by hand, step by step, and the same step by hf_zero.

    python recipes/mixed_precision/walk.py
    torchrun --standalone --nproc_per_node 2 recipes/mixed_precision/walk.py

A network of two layers with fp32 master weights and an fp16 copy to compute with: what a step needs, what goes wrong
without each part of it, and that the fp16 of an engine does all of it. Every rank has the same batch, so the mean over
ranks is what one process computes by hand.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import hf_zero

SCALE = 1024.0
LR = 1e-2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(512, 512, bias=False)
        self.w2 = nn.Linear(512, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.w2(self.w1(x))
        return hidden


@dataclass(frozen=True)
class Findings:
    """The findings of the walk: sizes in MB of 2 ** 20 bytes, changes as the largest of any weight of w1."""

    master_mb: float
    both_mb: float
    output_type: str
    without_gradients: float  # the masters have none: nothing moves
    never_unscaled: float  # gradients as they come from the scaled loss: a jump
    unscaled: float
    by_engine: float  # between the engine's masters and those updated by hand


def walk(device: torch.device) -> Findings:
    """All ranks must call."""
    torch.manual_seed(0)
    master = Net().to(device)
    x = torch.randn(4, 512, device=device)
    y = torch.tensor([[1.9], [9.5], [0.9], [1.2]], device=device)
    start = copy.deepcopy(master)

    half = copy.deepcopy(master).half()
    sizes = _megabytes(master), _megabytes(master) + _megabytes(half)
    optimizer = torch.optim.SGD(master.parameters(), lr=LR)
    output = half(x.half())
    loss = nn.functional.mse_loss(output, y.half())
    (loss * SCALE).backward()

    optimizer.step()
    without_gradients = _change(start, master)

    _take_gradients(master, half, divide_by=1.0)
    optimizer.step()
    never_unscaled = _change(start, master)

    master.load_state_dict(start.state_dict())
    _take_gradients(master, half, divide_by=SCALE)
    optimizer.step()

    ours = _step_by_engine(copy.deepcopy(start), x, y)
    by_engine = max(float((ours[name] - value).abs().max()) for name, value in master.state_dict().items())
    return Findings(*sizes, str(output.dtype), without_gradients, never_unscaled, _change(start, master), by_engine)


def _megabytes(model: nn.Module) -> float:
    return sum(param.numel() * param.element_size() for param in model.parameters()) / 2**20


def _take_gradients(master: nn.Module, half: nn.Module, *, divide_by: float) -> None:
    for mine, theirs in zip(master.parameters(), half.parameters(), strict=True):
        assert theirs.grad is not None
        mine.grad = theirs.grad.float() / divide_by


def _change(before: Net, after: Net) -> float:
    return float((after.w1.weight - before.w1.weight).detach().abs().max())


def _step_by_engine(model: Net, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masters after one step. The engine casts model and input, scales the loss and unscales the gradients."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "loss_scale": SCALE},
        "zero_optimization": {"stage": 2},
    }
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]
    loss = nn.functional.mse_loss(engine(x), y.half())
    engine.backward(loss)
    engine.step()
    masters = {}
    for name, param in model.named_parameters():
        value = hf_zero.full_optimizer_state(param, "master")
        assert isinstance(value, torch.Tensor)
        masters[name] = value
    engine.teardown()
    return masters


def main() -> None:
    found = walk(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"fp32 master weights                            {found.master_mb} MB")
        print(f"and their fp16 copy                            {found.both_mb} MB")
        print(f"what the copy computes                         {found.output_type}")
        print(f"step of masters without gradients: change      {found.without_gradients:g}")
        print(f"gradients of the scaled loss as they are       {found.never_unscaled:g}")
        print(f"gradients divided by the scale                 {found.unscaled:g}")
        print(f"hf_zero's step, difference from the last       {found.by_engine:g}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
