"""Misuse that would silently damage a sharded model raises, names the parameter and says what to do instead."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hf_zero
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError, DivergenceError, StateError
from tests.harness import models
from tests.harness.ranks import RankFailure, run_ranks
from tests.harness.reference import Case
from tests.harness.sharded import Options, micro_step, start

CASE = Case("plain", 2, 1)
WEIGHT = "layers.1.up.weight"


def sharded() -> ZeroEngine:
    engine = start(CASE, Options(3))
    micro_step(engine, CASE, 0, 0, Options(3))
    return engine


def message_of(action: Callable[[ZeroEngine], Any], *kinds: type[BaseException]) -> str:
    """The text of the error that `action` must raise; the engine must be able to train on."""
    engine = sharded()
    before = engine.full_state_dict(keep=True)
    try:
        action(engine)
    except kinds as error:
        text = str(error)
    else:
        raise AssertionError("no error was raised")
    after = engine.full_state_dict(keep=True)
    assert all(torch.equal(before[name], after[name]) for name in before), "weights were damaged"
    micro_step(engine, CASE, 1, 0, Options(3))
    return text


# ---------------------------------------------------------------- writes to placeholders
def _write(call: str, grads: bool) -> Callable[[ZeroEngine], Any]:
    def action(engine: ZeroEngine) -> None:
        param = engine.module.get_parameter(WEIGHT)
        with torch.set_grad_enabled(grads):
            if call == "copy_":
                param.copy_(torch.ones(param.shape))
            elif call == "add_":
                param.add_(1.0)
            elif call == "normal_":
                nn.init.normal_(param)
            elif call == "index":
                param[0] = 1.0
            elif call == "zero_":
                param.zero_()
            elif call == "fill_":
                param.fill_(3.0)
            elif call == "zeros_":
                nn.init.zeros_(param)
            elif call == "data":
                param.data.fill_(3.0)
            elif call == "foreach":
                torch._foreach_zero_([param])

    return action


WRITES = ("copy_", "add_", "normal_", "index", "zero_", "fill_", "zeros_", "data", "foreach")


def write_all(grads: bool) -> dict[str, str]:
    return {call: message_of(_write(call, grads), StateError) for call in WRITES}


@pytest.mark.parametrize("grads", [False, True])
def test_a_write_to_a_sharded_parameter_is_never_lost_silently(grads: bool) -> None:
    for texts in run_ranks(write_all, 2, grads):
        for call in WRITES:
            assert WEIGHT in texts[call] and "gathered_params" in texts[call], texts[call]
            assert "layers.0.up.weight" not in texts[call], "only the parameter that was written to is named"


# ---------------------------------------------------------------- reads of placeholders
def _saves(value: object) -> None:
    torch.save(value, io.BytesIO())


READS: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda param: param.sum(),
    "item of data": lambda param: param.data[0, 0].item(),
    "detach": lambda param: param.detach() * 2,
    "numpy": lambda param: param.detach().numpy(),
    "array": lambda param: param.data.numpy(),
    "tolist": lambda param: param.tolist(),
    "matmul": lambda param: torch.ones(3, param.shape[0], dtype=param.dtype) @ param,
    "copy_ from it": lambda param: torch.zeros(param.shape, dtype=param.dtype).copy_(param),
    "stack": lambda param: torch.stack([param, param]),
    "transposed": lambda param: param.T.sum(),
    "clone": lambda param: param.clone(),
    "equal": lambda param: torch.equal(param, torch.zeros(param.shape)),
    "bool": lambda param: bool((param > 0).all()),
    "vector": lambda param: nn.utils.parameters_to_vector([param]),
    "foreach": lambda param: torch._foreach_norm([param]),
    "deepcopy": lambda param: copy.deepcopy(param),
    "save": _saves,
    "save of a dict": lambda param: _saves({"weight": param}),
    "pickle": lambda param: pickle.dumps(param),
}


def read_all() -> dict[str, str]:
    def action(engine: ZeroEngine, read: Callable[[nn.Parameter], object]) -> None:
        with torch.no_grad():
            read(engine.module.get_parameter(WEIGHT))

    return {name: message_of(functools.partial(action, read=read), StateError) for name, read in READS.items()}


def test_a_read_of_a_sharded_parameter_is_an_error_by_name() -> None:
    for texts in run_ranks(read_all, 2):
        for name, text in texts.items():
            assert WEIGHT in text and "is sharded" in text and "gathered_params" in text, f"{name}: {text}"


def asks_for_no_values() -> None:
    engine = sharded()
    param = engine.module.get_parameter(WEIGHT)
    assert param.untyped_storage().nbytes() < param.numel() * param.element_size()
    assert isinstance(param, nn.Parameter) and len(param) == param.size(0) == param.shape[0] and param.dim() == 2
    assert param.data.shape == param.detach().shape == param.shape and param.data.dtype == param.dtype
    for like in (torch.zeros_like(param), torch.empty_like(param), param.new_zeros(param.shape)):
        assert like.shape == param.shape and type(like) is torch.Tensor
    assert torch.zeros(2).to(param).dtype == param.dtype and param.is_leaf and param.requires_grad
    assert WEIGHT in repr(param) and hash(param) == hash(param)
    assert torch.autograd.graph.get_gradient_edge(param).node.variable is param  # type: ignore[attr-defined]
    engine.teardown()
    assert type(param) is nn.Parameter and not param.isnan().any()


def test_what_needs_no_values_is_answered() -> None:
    run_ranks(asks_for_no_values, 2)


# ---------------------------------------------------------------- what a placeholder looks like
def look() -> dict[str, Any]:
    model = CASE.build()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    identity = {name: id(param) for name, param in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, **_NONE_PERSISTENT}}
    engine = hf_zero.initialize(model=model, optimizer=CASE.make_optimizer(model), config=config)[0]
    micro_step(engine, CASE, 0, 0, Options(3))
    params = dict(model.named_parameters())
    weight = params[WEIGHT]
    return {
        "shapes": {name: param.shape for name, param in params.items()} == shapes,
        "identity": {name: id(param) for name, param in params.items()} == identity,
        "nan": bool(weight.isnan().all()),
        "bytes": weight.untyped_storage().nbytes() < weight.numel() * weight.element_size(),
        "dtype": weight.dtype == torch.float64 and weight.is_leaf and weight.requires_grad,
        "repr": "Toy" in repr(model) and str(WEIGHT.split(".")[0]) in repr(model),
        "class": type(model) is models.Toy and engine.module is model,
        "grad": all(param.grad is None for param in params.values()),
    }


_NONE_PERSISTENT = {"stage3_param_persistence_threshold": 0}


def test_a_placeholder_has_the_logical_shape_and_no_memory() -> None:
    for seen in run_ranks(look, 2):
        assert all(seen.values()), seen


# ---------------------------------------------------------------- whole-model calls
def _enter(block: contextlib.AbstractContextManager[None]) -> None:
    with block:
        pass


MISUSES: dict[str, tuple[Callable[[ZeroEngine], Any], tuple[str, ...]]] = {
    "state_dict": (
        lambda engine: torch.save(engine.module.state_dict(), io.BytesIO()),
        ("full_state_dict", "gathered_params"),
    ),
    "state_dict of a layer": (
        lambda engine: safetensors.torch.save(engine.module.layers[1].state_dict()),
        ("layers.1.", "full_state_dict"),
    ),
    "hash of a state_dict": (
        lambda engine: [one.cpu().numpy().tobytes() for one in engine.module.state_dict().values()],
        ("positions", "full_state_dict"),
    ),
    "load of a state_dict": (
        lambda engine: torch.zeros(17, 11, dtype=torch.float64).copy_(engine.module.state_dict()["head.weight"]),
        ("head.weight", "full_state_dict"),
    ),
    "half": (lambda engine: engine.module.half(), ("sharded", "float16")),
    "to(dtype)": (lambda engine: engine.module.to(torch.bfloat16), ("sharded", "bfloat16")),
    "float": (lambda engine: engine.module.float(), ("sharded", "float32")),
    "to(device)": (lambda engine: engine.module.to("meta"), ("sharded", "meta")),
    "pickle": (lambda engine: pickle.dumps(engine.module), ("Toy is sharded", "full_state_dict")),
    "torch.save": (lambda engine: _saves(engine.module.layers[1]), ("Layer is sharded", "full_state_dict")),
    "torch.save of parameters": (
        lambda engine: _saves(dict(engine.module.named_parameters())),
        ("is sharded", "full_state_dict"),
    ),
    "a text": (lambda engine: _enter(hf_zero.gathered_params("x")), ("gathered_params(model, [name])", "'x'")),  # type: ignore[arg-type]
    "a tensor": (lambda engine: _enter(hf_zero.gathered_params(torch.ones(2))), ("gathered_params(model, [name])",)),  # type: ignore[arg-type]
    "layer.half": (lambda engine: engine.module.layers[1].half(), ("layers.1.", "float16")),
}


def misuse_all() -> dict[str, str]:
    texts = {}
    for name, (action, _) in MISUSES.items():
        try:
            texts[name] = message_of(action, StateError, hf_zero.ConfigError)
        except AssertionError as error:
            texts[name] = f"failed: {error}"
    return texts


def test_calls_that_would_write_placeholders_raise() -> None:
    for texts in run_ranks(misuse_all, 2):
        for name, (_, parts) in MISUSES.items():
            assert not texts[name].startswith("failed"), f"{name}: {texts[name]}"
            for part in parts:
                assert part in texts[name], f"{name}: {part!r} is not in {texts[name]!r}"


def harmless() -> list[Any]:
    engine = sharded()
    engine.module.to(torch.float64).to("cpu").double()
    engine.module.train().eval().train().requires_grad_(True)
    engine.module.zero_grad()
    engine.zero_grad()
    with hf_zero.gathered_params(engine.module):
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
    whole = engine.full_state_dict(keep=True)
    assert state.keys() == whole.keys() and all(torch.equal(state[name], whole[name]) for name in state)
    micro_step(engine, CASE, 1, 0, Options(3))
    engine.teardown()
    model = engine.module
    model.load_state_dict(copy.deepcopy(model).state_dict())
    model(**CASE.batch(0, 0, 0))["loss"].backward()
    return [param.grad is not None for param in model.parameters()]


def test_what_changes_nothing_is_allowed_and_teardown_gives_the_model_back() -> None:
    assert all(all(grads) for grads in run_ranks(harmless, 2))


# ---------------------------------------------------------------- load_state_dict
LAYER = "layers.1"
LOADS: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], object]] = {
    "model": lambda model, state: model.load_state_dict(state),
    "not strict": lambda model, state: model.load_state_dict({WEIGHT: state[WEIGHT], "other": state[WEIGHT]}, False),
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
    "part": lambda model, state: model.get_submodule(LAYER).load_state_dict(
        {name.removeprefix(f"{LAYER}."): value for name, value in state.items() if name.startswith(LAYER)}
    ),
    "wrapper": lambda model, state: nn.Sequential(model).load_state_dict({f"0.{name}": state[name] for name in state}),
    "own placeholders": lambda model, state: model.load_state_dict(model.state_dict()),
    "other shape": lambda model, state: model.load_state_dict(state | {WEIGHT: state[WEIGHT][:2]}),
}


def load_all() -> dict[str, str]:
    def action(engine: ZeroEngine, load: Callable[[nn.Module, dict[str, torch.Tensor]], object]) -> None:
        load(engine.module, {name: value + 1.0 for name, value in engine.full_state_dict(keep=True).items()})

    def inside(engine: ZeroEngine) -> None:
        with hf_zero.gathered_params(engine.module, write_rank=0):
            action(engine, LOADS["assign"])

    texts = {name: message_of(functools.partial(action, load=load), StateError) for name, load in LOADS.items()}
    return texts | {"assign inside": message_of(inside, StateError)}


def test_load_state_dict_of_a_sharded_model_is_an_error_that_says_what_to_call() -> None:
    for texts in run_ranks(load_all, 2):
        for name, text in texts.items():
            assert "engine.load_full_state_dict" in text and "load_state_dict of " in text, (name, text)
            assert ("assign=True" if "assign" in name else "gathered_params(model, write_rank=0)") in text, name
            assert {"not strict": WEIGHT, "part": "layers.1.gain"}.get(name, "") in text, (name, text)


# ---------------------------------------------------------------- gathered_params
def write_between() -> str:
    def action(engine: ZeroEngine) -> None:
        loss = engine(**CASE.batch(1, 0, engine.rank))["loss"]
        try:
            with hf_zero.gathered_params(engine.module, [WEIGHT, "head.weight"], write_rank=0):
                pass
        finally:
            engine.backward(loss)
            engine.zero_grad()

    return message_of(action, StateError)


def read_between() -> bool:
    engine = sharded()
    before = engine.full_state_dict(keep=True)
    loss = engine(**CASE.batch(1, 0, engine.rank))["loss"]
    with hf_zero.gathered_params(engine.module), hf_zero.gathered_params(engine.module, [WEIGHT]):
        equal = all(torch.equal(before[name], value) for name, value in engine.module.named_parameters())
    engine.backward(loss)
    engine.step()
    after = engine.full_state_dict(keep=True)
    return equal and not torch.equal(before[WEIGHT], after[WEIGHT])


def test_gathered_params_between_forward_and_backward() -> None:
    assert all("between forward and backward" in text for text in run_ranks(write_between, 2))
    assert run_ranks(read_between, 2) == [True, True]


def unknown_name() -> str:
    def action(engine: ZeroEngine) -> None:
        with hf_zero.gathered_params(engine.module, [WEIGHT, "nothing", "nobody"]):
            pass

    return message_of(action, ConfigError)


def test_gathered_params_lists_unknown_names() -> None:
    assert all("nobody, nothing" in text for text in run_ranks(unknown_name, 2))


# ---------------------------------------------------------------- ranks that disagree
def different_models() -> None:
    model = models.build("plain")
    if dist.get_rank() == 1:
        model.layers[1].up = nn.Linear(models.HIDDEN, models.INNER + 1)
    zero = {"stage": 3, **_NONE_PERSISTENT}
    hf_zero.initialize(model=model, config={"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1})


def test_different_models_on_ranks_raise_on_all() -> None:
    for outcome in run_ranks(different_models, 2, expect_error=True):
        assert isinstance(outcome, RankFailure) and isinstance(outcome.exception, DivergenceError)
        assert "layers.1" in outcome.message and "rank 1" in outcome.message


def save_on_one_rank() -> str:
    engine = sharded()
    if engine.rank == 1:
        return ""
    try:
        engine.full_state_dict(keep=True)
    except StateError as error:
        return str(error)
    raise AssertionError("no error was raised")


def test_a_collective_call_on_one_rank_raises() -> None:
    text = run_ranks(save_on_one_rank, 2, timeouts={"presence": 1})[0]
    assert "full_state_dict" in text and "[1]" in text and "every rank" in text


# ---------------------------------------------------------------- parameters and optimizers that do not fit
def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = models.build("plain")
    mesh = init_device_mesh("cpu", (2,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})


def on_meta() -> None:
    model = models.build("plain")
    model.norm.to("meta")
    hf_zero.initialize(model=model, config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})


def test_parameters_that_cannot_be_cut_are_refused_by_name() -> None:
    for function, parts in (
        (tensor_parallel, ("head.weight", "DTensor")),
        (on_meta, ("norm.weight", "norm.bias", "meta")),
    ):
        for outcome in run_ranks(function, 2, expect_error=True):
            assert isinstance(outcome, RankFailure) and isinstance(outcome.exception, ConfigError), outcome
            assert all(part in outcome.message for part in parts), outcome.message


def data_parallel(how: str, stage: int) -> str:
    model: nn.Module = models.build("plain")
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}
    if how == "inside":
        model = nn.Sequential(nn.parallel.DistributedDataParallel(model))
    elif how == "threads":
        model = nn.DataParallel(model)
    elif how == "FSDP":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif how in ("fully_shard", "a layer"):
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model if how == "fully_shard" else model.get_submodule("layers.1"), mesh=mesh)
    elif how == "compiled":
        model = torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")
    else:
        model = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(ConfigError) as caught:
        if how == "shard":
            hf_zero.shard(model, config)
        else:
            hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    return str(caught.value)


DATA_PARALLEL = {
    "plain": "DistributedDataParallel",
    "shard": "DistributedDataParallel",
    "inside": "0 is under torch's DistributedDataParallel",
    "compiled": "DistributedDataParallel",
    "threads": "torch's DataParallel",
    "FSDP": "FullyShardedDataParallel",
    "fully_shard": "FSDPModule",
    "a layer": "layers.1 is under torch's FSDPModule",
}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_under_data_parallelism_of_torch_is_refused(stage: int) -> None:
    for texts in run_ranks(all_data_parallel, 2, stage):
        for how, text in texts.items():
            assert DATA_PARALLEL[how] in text and "Give hf_zero the plain module" in text, (how, text)


def all_data_parallel(stage: int) -> dict[str, str]:
    return {how: data_parallel(how, stage) for how in DATA_PARALLEL}


def foreign_optimizer() -> None:
    model = models.build("plain")
    other = models.build("plain")
    hf_zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        config={"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1},
    )


def optimizer_of_all_at_once(stage: int) -> None:
    model = models.build("plain")
    hf_zero.initialize(
        model=model,
        optimizer=torch.optim.LBFGS(model.parameters()),
        config={"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1},
    )


def test_optimizers_that_cannot_be_right_are_refused() -> None:
    for function, args, part in (
        (foreign_optimizer, (), "not a trainable parameter of the model"),
        (optimizer_of_all_at_once, (1,), "LBFGS"),
        (optimizer_of_all_at_once, (3,), "LBFGS"),
    ):
        for outcome in run_ranks(function, 2, *args, expect_error=True):
            assert isinstance(outcome, RankFailure) and isinstance(outcome.exception, ConfigError), outcome
            assert part in outcome.message
    run_ranks(optimizer_of_all_at_once, 2, 0)


def lazy() -> str:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    config = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError) as raised:
        hf_zero.initialize(model=model, config=config)
    return str(raised.value)


def test_lazy_parameters_are_named() -> None:
    text = run_ranks(lazy, 1)[0]
    assert "0.weight has no shape yet" in text and "run one forward" in text
