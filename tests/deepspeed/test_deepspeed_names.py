"""Names of DeepSpeed that scripts import: accelerator, comm, ops.adam, zero; and what they do under training."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tests.harness.ranks import run_ranks

WIDTH = 6
# A script for DeepSpeed, on purpose; run with the name changed, as sed does it.
SCRIPT = """
import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import {adam}
from deepspeed.utils import logger

deepspeed.init_distributed()
device = get_accelerator().current_device_name()
config = {{
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": float("inf"),
    "zero_optimization": {{
        "stage": {stage},
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {{"device": "{medium}"}},
    }},
}}


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[Layer() for _ in range(3)])
        for number, layer in enumerate(self.layers):
            with deepspeed.zero.GatheredParameters(layer.inner.weight, modifier_rank=0):
                if dist.get_rank() == 0:
                    torch.nn.init.constant_(layer.inner.weight, 0.1 * (number + 1))

    def forward(self, x):
        return self.layers(x).square().mean()


torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config, enabled={stage} == 3):
    model = Net()
optimizer = {adam}(model.parameters(), lr=0.01, weight_decay=0.1)
model_engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
model_engine.train()
for number in range(4):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())).to(device)
    loss = model_engine(x)
    loss = model_engine.backward(loss)
    model_engine.step()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    logger.info("loss %f", float(loss) / dist.get_world_size())
dist.barrier()
get_accelerator().synchronize()
with deepspeed.zero.GatheredParameters(list(model_engine.parameters())):
    weights = {{name: value.detach().clone() for name, value in model_engine.module.named_parameters()}}
ranks = len(dist.get_all_ranks_from_group())
answers = (dist.get_local_rank(), dist.get_rank(), dist.get_world_size(), dist.is_initialized(), ranks)
"""


def run_script(adam: str, stage: int, medium: str) -> tuple[Any, Any]:
    text = re.sub("deepspeed", "hf_zero", SCRIPT.format(adam=adam, stage=stage, medium=medium))
    space: dict[str, Any] = {"torch": torch, "__name__": "__main__"}
    exec(compile(text, "script.py", "exec"), space)
    return space["weights"], space["answers"]


def reference() -> dict[str, torch.Tensor]:
    """torch.optim.AdamW on both ranks' batches."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.1 * (number + 1))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, weight_decay=0.1)
    for number in range(4):
        losses = []
        for rank in range(2):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
            for layer in layers:
                x = torch.tanh(layer(x))
            losses.append(x.square().mean())
        optimizer.zero_grad()
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {f"layers.{name.replace('.', '.inner.')}": param.detach() for name, param in layers.named_parameters()}


@pytest.mark.parametrize(
    ("adam", "stage", "medium"),
    [
        ("FusedAdam", 3, "none"),
        ("FusedAdam", 1, "none"),
        ("DeepSpeedCPUAdam", 3, "cpu"),
        ("DeepSpeedCPUAdam", 2, "cpu"),
    ],
)
def test_a_script_with_the_name_changed_trains_as_torch(adam: str, stage: int, medium: str) -> None:
    want = reference()
    assert float((want["layers.0.inner.weight"] - 0.1).abs().max()) > 0.01, "vacuous: nothing was learned"
    for rank, (weights, answers) in enumerate(run_ranks(run_script, 2, adam, stage, medium)):
        assert answers == (rank, rank, 2, True, 2)
        assert weights.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- accelerator
def test_the_accelerator_answers_what_torch_does() -> None:
    accelerator = hf_zero.get_accelerator()
    assert accelerator is hf_zero.get_accelerator()
    name = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]
    assert accelerator.device_name() == name and accelerator.is_available() and accelerator.device_count() >= 1
    assert torch.device(accelerator.current_device_name()).type == name == accelerator.device().type
    assert torch.device(accelerator.device_name(0)).type == name
    assert accelerator.communication_backend_name() == torch.distributed.get_default_backend_for_device(name)
    assert accelerator.on_accelerator(torch.zeros(1, device=accelerator.current_device_name()))
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert accelerator.memory_allocated() >= 0 and accelerator.total_memory() > 1 << 30
    accelerator.manual_seed(5)
    state = accelerator.get_rng_state()
    first = torch.rand(3, device=accelerator.current_device_name())
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device=accelerator.current_device_name()))
    accelerator.manual_seed_all(5)
    assert torch.equal(first, torch.rand(3, device=accelerator.current_device_name()))
    assert torch.bfloat16 in accelerator.supported_dtypes() or not accelerator.is_bf16_supported()


# ---------------------------------------------------------------------- comm
def test_the_names_of_comm_are_torchs() -> None:
    comm = importlib.import_module("hf_zero.comm")
    assert len(dir(comm)) > 40 and all(callable(getattr(comm, name)) for name in dir(comm))
    assert comm.broadcast is torch.distributed.broadcast and comm.init_distributed is hf_zero.init_distributed
    with pytest.raises(AttributeError, match=r"module 'hf_zero.comm' has no attribute 'all_gathr'"):
        _ = comm.all_gathr


# ---------------------------------------------------------------------- paths
IMPORTED = """
import sys
names = "meta_path path_hooks path excepthook displayhook".split()
before = {name: repr(getattr(sys, name)) for name in names}
import hf_zero
assert {name: repr(getattr(sys, name)) for name in names} == before
assert "torch" not in sys.modules and "numpy" not in sys.modules
from hf_zero.extras.deepspeed.names import PATHS
import importlib
for path in PATHS:
    module = importlib.import_module(f"hf_zero.{path}")
    assert importlib.util.find_spec(f"hf_zero.{path}").name == module.__name__
    assert all(getattr(module, name) is not None for name in module.__all__)
import hf_zero.runtime.pipe.topology
assert hf_zero.runtime.pipe.topology.ProcessTopology is hf_zero.pipeline.ProcessTopology
from hf_zero.zero import *
assert Init is hf_zero.zero.Init
try:
    import hf_zero.ops.missing
except ModuleNotFoundError:
    print("done")
"""


def test_importing_hf_zero_changes_nothing_else_and_every_path_has_its_names() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr


# ---------------------------------------------------------------------- optimizers
@pytest.mark.parametrize("decoupled", [True, False])
def test_the_adams_are_torchs(decoupled: bool) -> None:
    start = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    grads = [torch.randn(7, 5, generator=torch.Generator().manual_seed(number)) for number in range(2, 7)]
    results = []
    plain = torch.optim.AdamW if decoupled else torch.optim.Adam
    for make in (
        lambda params: plain(params, lr=0.1, weight_decay=0.3),
        lambda params: FusedAdam(params, lr=0.1, weight_decay=0.3, adam_w_mode=decoupled),
        lambda params: DeepSpeedCPUAdam(params, lr=0.1, weight_decay=0.3, adamw_mode=decoupled),
    ):
        param = nn.Parameter(start.clone())
        optimizer: Any = make(iter([param]))
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        results.append(param.detach())
    assert not torch.equal(results[0], start)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-6, atol=1e-6)


def test_what_the_fused_adam_does_not_have() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match="amsgrad"):
        FusedAdam(params, amsgrad=True)
    with pytest.raises(ConfigError, match="bias_correction"):
        FusedAdam(params, bias_correction=False)
    groups = FusedAdam([{"params": iter(params), "lr": 0.5}], lr=0.1).param_groups
    assert groups[0]["lr"] == 0.5 and groups[0]["params"] == params and groups[0]["fused"]


# ---------------------------------------------------------------------- zero.Init
def built_already(folder: str) -> tuple[bool, bool, list[bool]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    hf_zero.zero.Init(module=model)
    sharded = all(param.isnan().all() for param in model.parameters())
    with hf_zero.zero.Init(enabled=False):
        other = nn.Sequential(nn.Linear(4, 4))
    with hf_zero.zero.GatheredParameters(model.parameters(), enabled=False):
        hidden = bool(model[0].weight.isnan().all())
    whole = not other[0].weight.isnan().any()
    return sharded and hidden, whole, [param.requires_grad for param in model.parameters()]


def test_zero_init_of_a_model_that_is_there(tmp_path: Path) -> None:
    small = [True, True, False, False]
    found = run_ranks(built_already, 2, str(tmp_path))
    assert [one[1:] for one in found] == [(True, small)] * 2


def test_what_zero_init_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"zero.Init\(mpu=...\)"):
        hf_zero.zero.Init(mpu=object())
    with pytest.raises(ConfigError, match="offload_param"):
        hf_zero.zero.Init(remote_device="nvme")
