"""DeepSpeed's formulas for the memory of model states, under its names, and its tables as text.

They count parameters, gradients and optimizer states in 16-bit training with Adam, and nothing else: no buffers, no
gathered layers in fp32, no activations. `hf-zero estimate` counts what hf_zero really allocates; these are for scripts
that call DeepSpeed's functions and compare with its published figures.

Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, DeepSpeed 0.19.8: the formulas and
the words of the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

_GIB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of host memory per node, bytes of device memory per GPU) at stage 2."""
    total_gpus = num_nodes * num_gpus_per_node
    device = 2 * total_params  # the 16-bit parameters, unsharded
    if cpu_offload:
        host = total_params * max(4 * total_gpus, 16) * additional_buffer_factor
    else:
        device += int(18 * total_params / total_gpus)  # gradients in 16 and 32 bits, masters, two moments
        host = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(device)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of host memory per node, bytes of device memory per GPU, bytes of the largest layer) at stage 3."""
    total_gpus = num_nodes * num_gpus_per_node
    per_node = 1 / num_nodes
    layer = 4 * largest_layer_params  # parameters and gradients in 16 bits
    if cpu_offload:
        states = 18 if cpu_offload_params else 16
        device = layer if cpu_offload_params else layer + int(2 * total_params / total_gpus)
        if zero_init:
            host = total_params * states * per_node * additional_buffer_factor
        else:  # every process of a node builds the full model in fp32 first
            host = total_params * max(4 * num_gpus_per_node, states * per_node) * additional_buffer_factor
    else:
        device = layer + int(18 * total_params / total_gpus)
        built = largest_layer_params if zero_init else total_params
        host = built * 4 * num_gpus_per_node * additional_buffer_factor
    return int(host), int(device), layer


def estimate_zero2_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for `model`, a module on any device, meta included."""
    total, _ = count_parameters(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 2 for a model of `total_params` parameters."""
    rows = []
    for cpu_offload in (True, False):
        host, device = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
        )
        rows.append((host, device, f"offload_optimizer={_device(cpu_offload)}"))
    _print_table(f"Model with {int(total_params / 1e6)}M total params.", num_gpus_per_node, num_nodes, rows)


def estimate_zero3_model_states_mem_needs_all_live(
    model: Any, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of stage 3 for `model`, a module on any device, meta included."""
    total, largest = count_parameters(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print the table of stage 3 for a model of these sizes."""
    rows = []
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            host, device, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                num_gpus_per_node,
                num_nodes,
                optimizer,
                params,
                zero_init,
                additional_buffer_factor,
            )
            options = f"offload_param={_device(params)}, offload_optimizer={_device(optimizer)}"
            rows.append((host, device, f"{options}, zero_init={int(zero_init)}"))
    sizes = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _print_table(f"Model with {sizes}.", num_gpus_per_node, num_nodes, rows)


def count_parameters(model: Any) -> tuple[int, int]:
    """(elements of all parameters, most elements that one module has by itself).

    Shared parameters count once, told apart as objects: on the meta device all have the same address.
    """
    total = sum({id(param): param.numel() for param in model.parameters()}.values())
    own = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return total, max(own, default=0)


def _device(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def _print_table(model: str, gpus: int, nodes: int, rows: Iterable[tuple[int, int, str]]) -> None:
    lines = [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.",
        f"SW: {model}",
        "  per CPU  |  per GPU |   Options",
        *(f" {host / _GIB:7.2f}GB | {device / _GIB:6.2f}GB | {options}" for host, device, options in rows),
    ]
    sys.stdout.write("\n".join(lines) + "\n")  # they print: that is what they are called for
