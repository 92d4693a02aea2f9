"""Names of the facade in one process: what they do, and what is refused by name."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.extras.deepspeed import out_of_scope
from hf_zero.extras.deepspeed.config import DeepSpeedConfig
from hf_zero.extras.deepspeed.inference import OnDevice, init_inference
from tests.harness.ranks import run_ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_allow_untested_optimizer": 1,  # DeepSpeed takes 1 for true
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}


def trained(**more: Any) -> ZeroEngine:
    model = nn.Linear(3, 2)
    engine = hf_zero.initialize(model=model, config=CONFIG, **more)[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    return engine


def test_values_of_a_parameter() -> None:
    utils = importlib.import_module("hf_zero.utils")
    engine = trained()
    weight = engine.module.weight
    assert torch.equal(utils.safe_get_full_grad(weight), torch.full((2, 3), 2.0))
    assert torch.equal(utils.safe_get_local_grad(weight), torch.full((6,), 2.0))
    engine.step()
    master = utils.safe_get_full_fp32_param(weight)
    assert torch.equal(master, weight) and torch.equal(utils.safe_get_local_fp32_param(weight), master.reshape(-1))
    for set_state, get_state, shape in (
        (utils.safe_set_full_optimizer_state, utils.safe_get_full_optimizer_state, (2, 3)),
        (utils.safe_set_local_optimizer_state, utils.safe_get_local_optimizer_state, (6,)),
    ):
        value = torch.rand(shape)
        set_state(weight, value, "exp_avg")
        assert torch.equal(get_state(weight, "exp_avg"), value)


def test_an_optimizer_beside_a_block_wins(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    with caplog.at_level(logging.WARNING):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        made = hf_zero.initialize(model=model, optimizer=optimizer, config=CONFIG)[1]
    assert made is not None and made.optimizer is optimizer and "AdamW" in caplog.text


def test_names_of_the_engine() -> None:
    engine = trained()
    assert engine.optimizer_name() == "adamw" and engine.scheduler_name() is None
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()


def test_a_configuration_by_itself() -> None:
    config = DeepSpeedConfig({**CONFIG, "gradient_accumulation_steps": 3})
    assert config.train_batch_size == 6 and config.get("optimizer", {}).get("type") == "AdamW"


def test_inference() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(NotImplementedError, match="replace_with_kernel_inject"):
        init_inference(model, replace_with_kernel_inject=True)
    with pytest.raises(NotImplementedError, match="over 2 ranks"):
        init_inference(model, {"tensor_parallel": {"tp_size": 2}})
    with pytest.raises(hf_zero.ConfigError, match="dtypo"):
        init_inference(model, dtypo="fp32")
    engine = init_inference(model, dtype="bf16", mp_size=1)
    assert engine.module is model and not model.training
    assert engine(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    sharded = init_inference(nn.Linear(3, 2), {"zero": {"stage": 3}})
    assert sharded(torch.ones(1, 3)).shape == (1, 2) and not sharded.module.weight.requires_grad


def test_on_device() -> None:
    with OnDevice(torch.bfloat16, device="meta"):
        layer = nn.Linear(3, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    with OnDevice(torch.bfloat16, enabled=False):
        assert nn.Linear(3, 2).weight.dtype == torch.float32


def test_a_function_and_its_module_have_one_name() -> None:
    utils, file = (importlib.import_module(f"hf_zero.{path}") for path in ("utils", "utils.z3_leaf_module"))
    assert utils.z3_leaf_module is file.z3_leaf_module and callable(utils.z3_leaf_module)


def test_leaf_modules() -> None:
    utils = importlib.import_module("hf_zero.utils")
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == utils.get_z3_leaf_modules(model) == [model[0]]
    assert utils.set_z3_leaf_modules(model, ["ReLU"]) == [model[1]] and utils.z3_leaf_module(model[1])
    assert utils.unset_z3_leaf_modules(model, [nn.Linear, "ReLU"]) == [model[0], model[1]]
    assert utils.get_z3_leaf_modules(model) == []
    assert utils.set_z3_leaf_modules_by_name(model, ["1", "7"]) == ([model[1]], ["7"])
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0", "1"], flag=False) == ([model[0], model[1]], [])
    assert utils.get_z3_leaf_modules(model) == []
    with pytest.raises(hf_zero.ConfigError, match="GRU"):
        utils.set_z3_leaf_modules(model, ["GRU"])
    with pytest.raises(hf_zero.ConfigError, match="head"):
        utils.set_z3_leaf_modules_by_suffix(model, ["head"])
    assert utils.set_z3_leaf_modules(model, ["GRU"], raise_if_not_found=False) == []


def test_the_script_that_compares_names() -> None:
    names = {"zero": ["Init", "NoSuchName"], "moe.layer": ["MoE"], "deepspeed": ["DeepSpeedEngine"]}
    script = Path(__file__).parents[2] / "scripts" / "deepspeed_names.py"
    command = [sys.executable, str(script), "--verdicts"]
    ended = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(ended.stdout)
    assert found["zero"] == {"Init": "renaming", "NoSuchName": "missing"}
    assert found["moe.layer"]["MoE"].startswith("refused: hf_zero has no deepspeed.moe: use the MoE models")
    assert found["deepspeed"] == {"DeepSpeedEngine": "facade only"}


def test_names_of_classes() -> None:
    config, loaders = (importlib.import_module(f"hf_zero.runtime.{name}") for name in ("config", "dataloader"))
    with pytest.raises(config.DeepSpeedConfigError, match="stagee"):
        DeepSpeedConfig({"zero_optimization": {"stagee": 1}})
    assert [one for one, _ in zip(loaders.RepeatingLoader([1, 2]), range(3), strict=False)] == [1, 2, 1]
    accelerator = importlib.import_module("hf_zero.accelerator")
    assert isinstance(accelerator.get_accelerator(), accelerator.DeepSpeedAccelerator)


def test_a_step_is_undone_to_the_bit() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Linear(5, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    adam = importlib.import_module("hf_zero.ops.adam").DeepSpeedCPUAdam(ours.parameters(), lr=0.1)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0)
    for scale in (1.0, 3.0, 2.0):
        for model in (ours, theirs):
            model.zero_grad()
            (model(torch.ones(2, 5)) * scale).square().sum().backward()
        adam.step_subgroup(0)
        if scale == 3.0:
            adam.rollback_subgroup(0)
            with pytest.raises(hf_zero.StateError, match="no step of it to undo"):
                adam.rollback_subgroup(0)
        else:
            plain.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_the_factor_of_a_cosine() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.5)
    scheduler = hf_zero.optim.WarmupCosineLR(optimizer, total_num_steps=10, warmup_num_steps=4)
    for _ in range(6):
        scheduler.step()
        assert scheduler.get_lr_ratio() * 0.5 == pytest.approx(optimizer.param_groups[0]["lr"])


def tiled(stage: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train a layer of tiles beside the plain layer that they started from."""
    TiledLinear = importlib.import_module("hf_zero.zero").TiledLinear
    torch.manual_seed(0)
    plain = nn.Linear(7, 5).double()
    model = nn.Sequential(TiledLinear(7, 5, in_splits=3, out_splits=2, init_linear=plain, dtype=torch.float64))
    engine = hf_zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}},
    )[0]
    assert dist.get_world_size(engine.data_parallel_group) == 2
    own, found = torch.optim.SGD(plain.parameters(), lr=0.1), []
    inputs = torch.randn(2, 2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        output = engine(inputs[engine.rank])
        engine.backward(output.square().mean())
        engine.step()
        own.zero_grad()
        whole = plain(inputs.flatten(0, 1))
        whole.square().mean().backward()
        own.step()
        found.append((output.detach(), whole.detach().view(2, 2, 5)[engine.rank]))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_layer_in_tiles_trains_as_a_whole_one(stage: int) -> None:
    for pairs in run_ranks(tiled, 2, stage):
        for mine, want in pairs:
            torch.testing.assert_close(mine, want, rtol=1e-12, atol=1e-12)


def test_the_parts_of_a_layer_in_tiles() -> None:
    TiledLinear = importlib.import_module("hf_zero.zero").TiledLinear
    with pytest.raises(hf_zero.ConfigError, match=r"in_splits=4.*from 1 to 3"):
        TiledLinear(3, 2, in_splits=4)
    layer = TiledLinear(3, 2, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    outputs = layer(torch.ones(1, 3).split([2, 1], dim=-1))
    assert [tuple(one.shape) for one in outputs] == [(1, 1), (1, 1)]
    assert [name for name, _ in layer.named_parameters()][:2] == ["linears.0.0.weight", "linears.0.1.weight"]


def test_what_is_out_of_scope() -> None:
    """Every feature of the table may be imported, as programs do that use it with some options only, and refuses its
    use; what DeepSpeed does not have either stays as in Python."""
    text = """
import hf_zero; hf_zero.as_deepspeed()
import deepspeed, importlib, inspect
from hf_zero.extras.deepspeed import out_of_scope

def refused(use, path):
    try:
        use()
    except NotImplementedError as error:
        assert path in str(error) and "use " in str(error), error
    else:
        raise AssertionError(path)

for pattern in out_of_scope._INSTEAD:
    path = pattern.replace("*", "x")
    parent, _, name = f"deepspeed.{path}".rpartition(".")
    room = importlib.import_module(parent)
    assert out_of_scope.refusal(room) or not hasattr(room, name)
    refused(lambda: getattr(room, name)(), path)
    found = {}
    exec(f"from {parent} import {name}", found)
    refused(lambda: found[name](1, key=2), path)
    importlib.import_module(f"deepspeed.{path}")

from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
import deepspeed.ops.transformer.inference

class Mine(MoE):
    def __init__(self):
        pass

assert inspect.isclass(MoE) and not isinstance(3, MoE)
for use in (Mine, lambda: MoE(4), lambda: split([]), lambda: MoE.forward, lambda: deepspeed.moe.layer.MoE(3)):
    refused(use, "moe")
assert not hasattr(MoE, "forward")
# Python asks modules for names of its own, as inspect does.
for module in (deepspeed.runtime.utils, deepspeed.moe):
    assert not any(hasattr(module, name) for name in ("__file__", "__wrapped__"))
try:
    import deepspeed.nothing
except ModuleNotFoundError:
    pass
assert not hasattr(deepspeed, "nothing") and not hasattr(deepspeed.utils, "nothing")
try:
    from hf_zero.ops.op_builder import TransformerBuilder
except NotImplementedError:
    pass
import deepspeed.utils.groups, deepspeed.runtime.zero.offload_config, deepspeed.utils.logging
from deepspeed.accelerator import get_accelerator
for name in deepspeed.__all__:
    getattr(deepspeed, name)
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)
    assert len(out_of_scope._INSTEAD) > 20


def test_pickle_finds_what_torch_says_of_itself() -> None:
    """It looks for a name in every module, in the order of imports, as torch.compile does for a memory format."""
    text = """
import hf_zero, pickle, torch
assert pickle.loads(pickle.dumps(torch.contiguous_format)) is torch.contiguous_format
assert not hasattr(hf_zero.accelerator, "torch")
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


def test_builders(tmp_path: Path) -> None:
    """Programs ask them, load ahead of the training, and read and write files by the handle."""
    ops = importlib.import_module("hf_zero.ops.op_builder")
    for name in ("CPUAdamBuilder", "FusedAdamBuilder", "CPULionBuilder", "AsyncIOBuilder"):
        assert getattr(ops, name)().is_compatible(verbose=True) and getattr(ops, name)().load() is not None
    with pytest.raises(NotImplementedError, match=r"op_builder\.TransformerBuilder: use"):
        ops.TransformerBuilder  # noqa: B018
    handle = importlib.import_module("hf_zero.ops.aio").AsyncIOBuilder().load().aio_handle(1 << 16, 4, False, True, 1)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (1 << 16, 4, 1)
    path = str(tmp_path / "values.swp")
    values = torch.arange(100_000, dtype=torch.float32)
    assert handle.sync_pwrite(values, path) == 1
    assert Path(path).read_bytes() == values.numpy().tobytes()
    halves = handle.new_cpu_locked_tensor(100_000, values).chunk(2)
    assert [handle.async_pread(half, path, number * 200_000) for number, half in enumerate(halves)] == [0, 0]
    assert handle.wait() == 2 and torch.equal(torch.cat(halves), values)
    assert handle.pwrite(values[:10], path, False, True, 40) == 0 and handle.wait() == 1
    assert handle.read(halves[0][:20], path, False) == 1
    assert torch.equal(halves[0][:20], torch.arange(10, dtype=torch.float32).repeat(2))
    uneven = importlib.import_module("hf_zero.ops.aio").AsyncIOBuilder().load().aio_handle(1000)
    assert uneven.get_block_size() == 1000
    with open(tmp_path / "described", "wb+") as file:
        assert uneven.async_pwrite(buffer=values, fd=file.fileno()) == 0 and uneven.wait() == 1
        assert file.read() == values.numpy().tobytes()
    with pytest.raises(hf_zero.native.aio.AioError, match=r"values\.swp"):
        handle.sync_pread(torch.empty(200_000), path)
