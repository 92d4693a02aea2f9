"""A script as people have them: Megatron's MLP, tensor-parallel over all ranks, and DeepSpeed's checkpointing.

It trains with and without checkpoints and leaves losses and gradients of all in `results`. With `import deepspeed`
as its first import it runs with DeepSpeed (`python -m torch.distributed.run`).
"""

# ruff: noqa: I001
import hf_zero as deepspeed

import torch
import torch.distributed as dist
from torch import nn

LAYERS, WIDTH = 3, 8


class Mpu:
    """All ranks are one tensor-parallel group."""

    def get_model_parallel_group(self):
        return dist.group.WORLD

    def get_model_parallel_rank(self):
        return dist.get_rank()

    def get_model_parallel_world_size(self):
        return dist.get_world_size()

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_world_size(self):
        return 1


class Copy(torch.autograd.Function):
    """The input of a column-parallel layer: gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """The output of a row-parallel layer: outputs are summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMLP(nn.Module):
    def __init__(self):
        super().__init__()
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():  # each rank its own part of the weights
            self.column = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
            self.row = nn.Linear(2 * WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x):
        hidden = torch.tanh(self.column(Copy.apply(x)))
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            hidden = nn.functional.dropout(hidden, 0.2)
        return x + nn.functional.dropout(Sum.apply(self.row(hidden)), 0.2)  # this one is alike on all ranks


def train(checkpoint):
    """Return the losses of two steps, and the gradients of the last one."""
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(11)
    layers = nn.ModuleList(ParallelMLP() for _ in range(LAYERS))
    deepspeed.checkpointing.model_parallel_reconfigure_tp_seed(12)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        hidden = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            hidden = checkpoint(layer, hidden)
        loss = hidden.square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, [param.grad for param in layers.parameters()]


def plainly(function, *args):
    return function(*args)


deepspeed.init_distributed("gloo")
assert not deepspeed.checkpointing.is_configured()
deepspeed.checkpointing.configure(
    Mpu(), partition_activations=True, contiguous_checkpointing=True, num_checkpoints=LAYERS - 1
)
assert deepspeed.checkpointing.is_configured()
deepspeed.checkpointing.set_num_layers(LAYERS)  # one fewer would not do
results = {"plain": train(plainly), "partitioned": train(deepspeed.checkpointing.checkpoint)}
deepspeed.checkpointing.configure(None, contiguous_checkpointing=False, partition_activations=True)
deepspeed.checkpointing.partition_activations_in_checkpoint(False)
results["whole"] = train(deepspeed.checkpointing.checkpoint)
deepspeed.checkpointing.partition_activations_in_checkpoint(True)  # over the group that was named first
results["partitioned again"] = train(deepspeed.checkpointing.checkpoint)
deepspeed.checkpointing.reset()
