"""The engine is an nn.Module around its model, as DeepSpeed's: names, modes, casts, weights, attributes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.sharding.shape_only import ShapeOnly
from tests.harness.models import WIDTH, Net
from tests.harness.ranks import run_ranks


def start(stage: int, **keys: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    return hf_zero.initialize(model=Net(), config=config)[0]


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3,), generator=torch.Generator().manual_seed(10 * number + rank))


def train(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(engine(batch(number, engine.global_rank)))
        engine.step()


def said(call: Any) -> str:
    with pytest.raises((StateError, CheckpointError, ConfigError)) as error:
        call()
    return str(error.value)


# ---------------------------------------------------------------------- names, modes, attributes
def answers(stage: int) -> dict[str, Any]:
    plain, engine = Net(), start(stage)
    assert isinstance(engine, nn.Module) and isinstance(engine.module, Net)
    assert [name for name, _ in engine.named_parameters()] == [
        f"module.{name}" for name, _ in plain.named_parameters()
    ]
    assert [p.shape for p in engine.parameters()] == [p.shape for p in plain.parameters()]
    assert {id(p) for p in engine.parameters()} == {id(p) for p in engine.module.parameters()}
    assert list(engine.modules())[1:] == list(engine.module.modules())
    assert list(engine.children()) == [engine.module]
    assert [name for name, _ in engine.named_buffers()] == ["module.scale", "module.calls"]
    assert engine.vocabulary == 11 and engine.describe("a") == "a Net" and engine.inner is engine.module.inner
    assert "describe" in dir(engine) and "full_state_dict" in dir(engine) and not hasattr(engine, "colour")
    with pytest.raises(AttributeError, match="neither the engine nor its model, a Net, has an attribute 'colour'"):
        _ = engine.colour

    assert engine.training and engine.eval() is engine and not engine.training and not engine.module.training
    engine.module.train()
    assert engine.training
    engine.training = False
    assert not engine.module.training
    assert engine.train() is engine and engine.inner.training

    counts = []
    handle = engine.register_forward_hook(lambda module, args, output: counts.append(float(output.detach())))
    loss = engine(batch(0, engine.rank))
    handle.remove()
    assert counts == [float(loss.detach())]
    engine.backward(loss)
    engine.step()
    seen: list[str] = []
    engine.apply(lambda module: seen.append(type(module).__name__))
    assert seen[-2:] == ["Net", "ZeroEngine"]
    engine.inner.bias.requires_grad_(False)
    engine.requires_grad_(True)
    assert all(param.requires_grad for param in engine.module.parameters())
    assert hf_zero.engine_of(engine) is engine and hf_zero.engine_of(engine.module) is engine
    return {name: tuple(value.shape) for name, value in engine.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_answers_as_a_module_does(stage: int) -> None:
    want = {f"module.{name}": tuple(value.shape) for name, value in Net().state_dict().items()}
    assert run_ranks(answers, 2, stage) == [want] * 2


# ---------------------------------------------------------------------- casts and moves
def casts(stage: int) -> dict[str, str]:
    engine = start(stage, bf16={"enabled": True}, keep_fp32=["frozen.*"])
    assert engine.to("cpu") is engine and engine.cpu() is engine
    texts = {name: said(getattr(engine, name)) for name in ("half", "float", "double", "bfloat16")}
    texts["to"] = said(lambda: engine.to(torch.float64))
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16, torch.float32}

    whole = start(stage)
    assert whole.float() is whole and whole.to(device="cpu", dtype=torch.float32) is whole
    before = whole.full_state_dict(keep=True)
    train(whole, 0, 1)
    after = whole.full_state_dict(keep=True)
    assert not torch.equal(before["inner.weight"], after["inner.weight"])
    return texts


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_casts_and_moves_that_change_something_are_refused(stage: int) -> None:
    texts = run_ranks(casts, 2, stage)[1]
    assert "rank 1: embed.weight is torch.bfloat16 on cpu" in texts["half"] and "torch.float16 on cpu" in texts["half"]
    assert "rank 1: frozen.weight is torch.float32 on cpu" in texts["bfloat16"]  # kept by a pattern
    for text in texts.values():
        assert "bf16.enabled" in text and "keep_fp32" in text and "engine.teardown()" in text


# ---------------------------------------------------------------------- weights
def sharded_state() -> tuple[list[str], str, bool]:
    engine = start(3)
    state = engine.state_dict()
    value = state["module.inner.weight"]
    assert isinstance(value, ShapeOnly) and value.shape == (WIDTH, WIDTH) and value.dtype == torch.float32
    assert value.numel() == 64 and value.device.type == "cpu" and "inner.weight" in repr(value)
    texts = [
        said(read)
        for read in (
            lambda: value + 1,
            lambda: value[0, 0].item(),
            lambda: value.clone(),
            lambda: value.numpy(),
            lambda: torch.zeros(WIDTH, WIDTH).copy_(value),
            lambda: torch.save(state, io.BytesIO()),
            lambda: copy.deepcopy(value),
            lambda: engine.load_state_dict(state),
        )
    ]
    bare = engine.module.state_dict()
    assert list(bare) == [name.removeprefix("module.") for name in state]
    assert all(bare[name].shape == param.shape for name, param in engine.module.named_parameters())
    texts.insert(0, said(bare["inner.weight"].clone))
    whole = engine.full_state_dict(keep=True)
    with hf_zero.gathered_params(engine):
        inside = engine.state_dict()
        same = all(torch.equal(inside[f"module.{name}"], whole[name]) for name in whole)
    assert isinstance(engine.state_dict()["module.embed.weight"], ShapeOnly)
    return texts, same


def test_a_sharded_state_dict_has_shapes_and_its_values_raise() -> None:
    for texts, same in run_ranks(sharded_state, 2):
        assert len(texts) == 9 and same
        for text in texts[:-1]:
            assert "inner.weight is sharded" in text or "embed.weight is sharded" in text
            assert "engine.full_state_dict(keep=rank == 0)" in text
        assert "is sharded" in texts[-1]


def reference(weights: dict[str, torch.Tensor], first: int, last: int) -> dict[str, torch.Tensor]:
    """Return what torch.optim makes of `weights` on both ranks' batches."""
    model = Net()
    model.load_state_dict(weights)
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.05)
    for number in range(first, last):
        optimizer.zero_grad()
        (sum(model(batch(number, rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
    return model.state_dict()


def loads(stage: int, prefix: str) -> dict[str, Any]:
    engine = start(stage)
    torch.manual_seed(5)
    weights = {name: value.clone() for name, value in Net().state_dict().items()}
    weights["scale"].fill_(0.5)
    keys = engine.load_state_dict({prefix + name: value for name, value in weights.items()})
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    loaded = engine.full_state_dict(keep=True)
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    train(engine, 0, 2)
    trained = engine.full_state_dict(keep=True)
    part = {prefix + "inner.weight": weights["inner.weight"], prefix + "other": torch.zeros(1)}
    text = said(lambda: engine.load_state_dict(part))
    keys = engine.load_state_dict(part, strict=False)
    assert keys.unexpected_keys == ["other"] and "inner.bias" in keys.missing_keys
    assert torch.equal(engine.full_state_dict(keep=True)["inner.weight"], weights["inner.weight"])
    return {"start": weights, "trained": trained, "text": text}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("prefix", ["module.", ""])
def test_loaded_weights_are_trained_on(stage: int, prefix: str) -> None:
    """The load reaches the master weights too: an update from old ones would undo the load."""
    for found in run_ranks(loads, 2, stage, prefix):
        want = reference(found["start"], 0, 2)
        want.pop("calls")  # the reference runs the batches of both ranks
        assert not torch.equal(want["inner.weight"], found["start"]["inner.weight"]), "vacuous: nothing was learned"
        for name, value in want.items():
            torch.testing.assert_close(found["trained"][name], value, rtol=1e-5, atol=1e-6)
        assert "missing: inner.bias" in found["text"] and "not in the model: other" in found["text"]


# ---------------------------------------------------------------------- copies, compilation, transformers
def copies(stage: int) -> tuple[str, list[str]]:
    engine = start(stage)
    twin = copy.deepcopy(engine.module)
    assert hf_zero.engine_of(twin) is not engine
    pickled = [said(lambda: pickle.dumps(engine)), said(lambda: torch.save(engine, io.BytesIO()))]
    return said(lambda: copy.deepcopy(engine)), pickled


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_is_neither_copied_nor_pickled(stage: int) -> None:
    for text, pickled in run_ranks(copies, 2, stage):
        assert "copy.deepcopy(engine.module)" in text
        assert all("engine.save_checkpoint" in one for one in pickled)


def compiles(stage: int) -> list[float]:
    engine, losses = start(stage), []
    assert not engine.is_compiled
    engine.compile(backend="eager", compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    for number in range(3):
        loss = engine(batch(number, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def uncompiled(stage: int) -> list[float]:
    engine, losses = start(stage), []
    for number in range(3):
        loss = engine(batch(number, engine.rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_compile_compiles_the_model(stage: int) -> None:
    want = run_ranks(uncompiled, 2, stage)
    assert want[0][0] != want[0][2]
    for mine, theirs in zip(run_ranks(compiles, 2, stage), want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def of_transformers(stage: int) -> tuple[list[float], str]:
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine: Any = hf_zero.initialize(model=model, config=config)[0]
    engine.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing and engine.dtype == torch.float32
    ids = torch.arange(8).reshape(2, 4)
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    engine.eval()
    assert engine.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 6)
    return losses, said(lambda: engine.resize_token_embeddings(40)) if stage == 3 else ""


@pytest.mark.parametrize("stage", [2, 3])
def test_methods_of_a_transformers_model(stage: int) -> None:
    for losses, resized in run_ranks(of_transformers, 2, stage):
        assert losses[2] < losses[0]
        assert stage == 2 or "came after the model met its optimizer" in resized


# ---------------------------------------------------------------------- ranks
def torn_down_alone(stage: int) -> str:
    engine = start(stage, desync_timeout=5)  # which teardown waits for the others
    text = said(engine.teardown) if engine.rank == 0 else ""
    torch.distributed.barrier()
    train(engine, 0, 1)  # nothing was taken off
    engine.teardown()
    assert hf_zero.engine_of(engine.module) is None
    return text


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_teardown_on_one_rank_says_so(stage: int) -> None:
    text = run_ranks(torn_down_alone, 2, stage)[0]
    assert "rank 0 called engine.teardown, but rank(s) [1] did not within" in text
    assert "Call engine.teardown on every rank" in text


def test_the_name_of_a_parameter_comes_last() -> None:
    engine = start(2)
    value = torch.ones(WIDTH)
    for call in (
        lambda: hf_zero.set_full_param(engine.module, "inner.bias", value),  # type: ignore[arg-type]
        lambda: hf_zero.set_full_grad(engine.module, "inner.bias", value),  # type: ignore[arg-type]
        lambda: hf_zero.set_local_param(engine.module, "inner.bias", value),  # type: ignore[arg-type]
    ):
        text = said(call)
        assert "the name of a parameter is a text, and a Tensor was given" in text
        assert 'set_full_param(model, value, "layer.weight")' in text
    assert "expected a model or a parameter, and a str was given" in said(lambda: hf_zero.full_param("inner.bias"))  # type: ignore[arg-type]
    hf_zero.set_full_param(engine.module, value, "inner.bias")
    assert torch.equal(hf_zero.full_param(engine, "inner.bias"), value)
    engine.teardown()
