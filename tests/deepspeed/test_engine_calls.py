"""A script written for DeepSpeed, with the name changed, and each of the engine's calls that it may use."""

from __future__ import annotations

import copy
import logging.handlers
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero
from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.extras.cli.main import main
from hf_zero.utils import log_dist, logger
from hf_zero.utils.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from tests.harness.models import WIDTH, Net
from tests.harness.ranks import run_ranks


def start(stage: int, accumulation: int = 2, seed: int = 0, **keys: Any) -> Any:
    torch.manual_seed(seed)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **keys,
    }
    model = Net()
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return hf_zero.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[0]


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (3,), generator=torch.Generator().manual_seed(10 * number + rank))


def train(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(engine(batch(number, engine.global_rank)))
        engine.step()


def whole(engine: Any) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = engine.full_state_dict(keep=True)
    return weights


def script(stage: int, folder: str) -> dict[str, Any]:
    """Do what a DeepSpeed training script does and prints."""
    model_engine = start(stage, bf16={"enabled": stage == 3}, gradient_clipping=0.7)
    applied, lrs = [], []
    for number in range(4):
        loss = model_engine(batch(number, model_engine.global_rank))
        model_engine.backward(loss)
        model_engine.step()
        applied.append(model_engine.was_step_applied())
        lrs.append(model_engine.get_lr())
    facts = {
        "applied": applied,
        "lrs": lrs,
        "mom": model_engine.get_mom(),
        "batch": model_engine.get_batch_info(),
        "samples": model_engine.global_samples,
        "ranks": (model_engine.local_rank, model_engine.global_rank, model_engine.dp_world_size),
        "stage": (model_engine.zero_optimization_stage(), model_engine.zero_optimization()),
        "16 bits": (model_engine.fp16_enabled(), model_engine.bfloat16_enabled()),
        "cut": model_engine.is_first_weights_partition_group(),
        "skipped": model_engine.skipped_steps,
        "clipping": model_engine.gradient_clipping(),
        "print": (model_engine.steps_per_print(), model_engine.wall_clock_breakdown()),
    }
    model_engine.save_checkpoint(folder, "first", {"epoch": 1})
    train(model_engine, 4, 6)
    model_engine.save_checkpoint(save_dir=folder, tag="second", client_state={"epoch": 2, "rng": (torch.arange(3), 4)})
    facts["weights"] = whole(model_engine)
    for name in ("pytorch_model.bin", "model.safetensors"):
        assert model_engine.save_16bit_model(folder, name)
    assert model_engine.save_fp16_model(folder + "/trained", "trained.safetensors")
    model_engine.empty_partition_cache()
    model_engine.offload_states(include=None, device="cpu", pin_memory=True, non_blocking=False)  # they are there
    model_engine.reload_states(non_blocking=False)
    _, client_state = model_engine.load_checkpoint(folder)
    assert client_state["epoch"] == 2 and torch.equal(client_state["rng"][0], torch.arange(3))
    path, client_state = model_engine.load_checkpoint(load_dir=folder, tag="first", load_optimizer_states=True)
    assert client_state == {"epoch": 1} and path.endswith("first")
    facts["steps"] = model_engine.global_steps
    model_engine.destroy()
    model_engine.destroy()
    return facts


@pytest.mark.parametrize("stage", [1, 3])
def test_a_renamed_script_runs(stage: int, tmp_path: Path) -> None:
    found = run_ranks(script, 2, stage, str(tmp_path))
    assert [facts.pop("ranks") for facts in found] == [(0, 0, 2), (1, 1, 2)]
    facts = found[0]
    assert facts["applied"] == [False, True, False, True]
    assert facts["lrs"] == [[0.01], [0.005], [0.005], [0.0025]] and facts["mom"] == [[0.9, 0.999]]
    assert facts["batch"] == (12, 3, 2) and facts["samples"] == 24
    assert facts["stage"] == (stage, True) and facts["cut"] == (stage == 3)
    assert facts["16 bits"] == (False, stage == 3)
    assert (facts["skipped"], facts["clipping"], facts["print"], facts["steps"]) == (0, 0.7, (0, False), 2)

    weights = facts["weights"]
    assert weights["inner.weight"].dtype == (torch.bfloat16 if stage == 3 else torch.float32)
    plain = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert plain.keys() == weights.keys() and plain["head.weight"].data_ptr() == plain["embed.weight"].data_ptr()
    safe = load_file(tmp_path / "model.safetensors")
    assert weights.keys() - safe.keys() == {"head.weight"}
    for name in safe:
        torch.testing.assert_close(plain[name], weights[name], rtol=0, atol=0)
        torch.testing.assert_close(safe[name], weights[name], rtol=0, atol=0)
    assert load_file(tmp_path / "trained" / "trained.safetensors").keys() == safe.keys()
    _check_fp32(tmp_path, weights)


def _check_fp32(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """The functions of zero_to_fp32, on the newest tag."""
    assert (folder / "latest").read_text() == "second"
    state = get_fp32_state_dict_from_zero_checkpoint(folder)
    lazy = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="second", lazy_mode=True)
    assert type(state) is dict and type(lazy) is not dict
    first = get_fp32_state_dict_from_zero_checkpoint(folder, "first", exclude_frozen_parameters=True)
    assert state.keys() - first.keys() == {"frozen.weight", "frozen.bias"}
    assert not torch.equal(first["inner.weight"], state["inner.weight"])
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.to(weights[name].dtype), weights[name], rtol=0, atol=0)
        torch.testing.assert_close(lazy[name].contiguous(), tensor, rtol=0, atol=0)

    assert main(["inspect", str(folder)]) == 0
    assert main(["consolidate", str(folder), str(folder / "cli.safetensors")]) == 0
    torch.testing.assert_close(load_file(folder / "cli.safetensors")["inner.bias"], state["inner.bias"])

    model = Net()
    assert load_state_dict_from_zero_checkpoint(model, folder) is model
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)

    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "bin")
    torch.testing.assert_close(torch.load(folder / "bin" / "pytorch_model.bin", weights_only=True), state)
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "bins", max_shard_size="200", tag="second")
    shards = sorted((folder / "bins").glob("*-of-*.bin"))
    assert len(shards) > 2 and (folder / "bins" / "pytorch_model.bin.index.json").is_file()
    joined = {key: value for path in shards for key, value in torch.load(path, weights_only=True).items()}
    torch.testing.assert_close(joined, dict(state))
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "safe", safe_serialization=True)
    torch.testing.assert_close(load_file(folder / "safe" / "model.safetensors")["inner.bias"], state["inner.bias"])
    convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "one.bin", tag="second")
    torch.testing.assert_close(torch.load(folder / "one.bin", weights_only=True), state)
    with pytest.raises(ConfigError, match="max_shard_size='huge'"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "other", max_shard_size="huge")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_zero_checkpoint_to_fp32_state_dict(folder, folder / "safe", safe_serialization=True)


def loaded_into_an_engine(stage: int, folder: str) -> tuple[dict[str, torch.Tensor], ...]:
    """Load into a model under another engine, whose masters then start from these values, and train on."""
    engine = start(stage)
    train(engine, 0, 4)
    engine.save_checkpoint(folder)
    saved = whole(engine)
    other = start(stage, seed=3)
    assert load_state_dict_from_zero_checkpoint(other.module, folder) is other.module
    taken = whole(other)
    master = hf_zero.full_optimizer_state(other.module.inner.weight, "master")
    assert master is not None
    train(other, 4, 6)
    return saved, taken, {"inner.weight": master}, whole(other)


@pytest.mark.parametrize("stage", [2, 3])
def test_fp32_weights_are_loaded_into_a_model_under_an_engine(stage: int, tmp_path: Path) -> None:
    saved, taken, master, later = run_ranks(loaded_into_an_engine, 2, stage, str(tmp_path))[0]
    for weights in (saved, taken):
        weights.pop("calls")
    torch.testing.assert_close(taken, saved, rtol=0, atol=0)
    torch.testing.assert_close(master["inner.weight"], saved["inner.weight"], rtol=0, atol=0)
    assert not torch.equal(later["inner.weight"], saved["inner.weight"])


def logged() -> list[str]:
    handler = logging.handlers.BufferingHandler(100)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    log_dist("first", ranks=[0])
    log_dist("all", ranks=[-1])
    log_dist("none")
    log_dist("other", [1], level=logging.ERROR)
    return [record.levelname + " " + record.getMessage() for record in handler.buffer]


def test_log_dist() -> None:
    first, second = run_ranks(logged, 2)
    assert first == ["INFO [Rank 0] first", "INFO [Rank 0] all"]
    assert second == ["INFO [Rank 1] all", "ERROR [Rank 1] other"]


def own_boundaries(stage: int) -> tuple[dict[str, torch.Tensor], int]:
    engine = start(stage, accumulation=3)
    for window in range(2):
        engine.set_gradient_accumulation_boundary(False)
        for number in range(3):
            engine.set_gradient_accumulation_boundary(number == 2)
            engine.backward(engine(batch(3 * window + number, engine.rank)))
        engine.step()
    return whole(engine), engine.global_steps


def counted(stage: int, accumulation: int, first: int, last: int) -> tuple[dict[str, torch.Tensor], int]:
    engine = start(stage, accumulation)
    train(engine, first, last)
    return whole(engine), engine.global_steps


@pytest.mark.parametrize("stage", [1, 2])
def test_a_loop_that_says_where_its_windows_end(stage: int) -> None:
    (want, steps), (found, own_steps) = (
        run_ranks(counted, 2, stage, 3, 0, 6)[0],
        run_ranks(own_boundaries, 2, stage)[0],
    )
    assert steps == own_steps == 2
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def resized(stage: int, folder: str) -> dict[str, torch.Tensor]:
    """Train steps of two micro-batches, then of four: from the checkpoint between them it is a plain run of four."""
    engine = start(stage)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, "between", save_latest=False)
    for size, error in ((13, ConfigError), (0, ConfigError)):
        with pytest.raises(error, match="expected a multiple of 6"):
            engine.set_train_batch_size(size)
    engine.backward(engine(batch(99, engine.rank)))
    with pytest.raises(StateError, match="inside an accumulation window"):
        engine.set_train_batch_size(24)
    engine.zero_grad()
    engine.set_train_batch_size(24)
    assert engine.get_batch_info() == (24, 3, 4)
    train(engine, 2, 10)
    assert engine.global_steps == 3
    return whole(engine) | late_gradient(engine)


def resumed(stage: int, folder: str) -> dict[str, torch.Tensor]:
    engine = start(stage, accumulation=4, seed=5)
    engine.load_checkpoint(folder, "between")
    train(engine, 2, 10)
    return whole(engine) | late_gradient(engine)


def late_gradient(engine: Any) -> dict[str, torch.Tensor]:
    """Train a parameter that gets its gradient memory after the size has changed."""
    engine.module.frozen.bias.requires_grad_(True)
    engine.backward(engine(batch(10, engine.rank)))
    grad = hf_zero.full_grad(engine.module.frozen.bias)
    assert grad is not None and grad.abs().max() > 0
    return {"late": grad}


@pytest.mark.parametrize("stage", [1, 3])
def test_the_batch_size_changes_between_steps(stage: int, tmp_path: Path) -> None:
    found = run_ranks(resized, 2, stage, str(tmp_path))[0]
    want = run_ranks(resumed, 2, stage, str(tmp_path))[0]
    assert not (tmp_path / "latest").exists()
    found.pop("calls"), want.pop("calls")
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def parts(stage: int, folder: str) -> None:
    engine = start(stage)
    train(engine, 0, 4)
    engine.save_checkpoint(folder, "tagged")
    saved = whole(engine)
    assert engine.save_checkpoint(folder) is True
    assert Path(folder, "latest").read_text() == "global_step2" and Path(folder, "tagged/zero").is_dir()

    other = start(stage, seed=3)
    other.load_checkpoint(folder, load_module_only=True)
    torch.testing.assert_close(whole(other), saved, rtol=0, atol=0)
    assert other.global_steps == 0 and other.get_lr() == [0.01]
    assert hf_zero.full_optimizer_state(other.module.inner.weight, "exp_avg") is None
    other.load_checkpoint(folder, "tagged", load_lr_scheduler_states=False, load_optimizer_states=False)
    assert other.global_steps == 2 and other.lr_scheduler.last_epoch == 0
    other.load_checkpoint(folder, load_module_strict=False)
    assert other.lr_scheduler.last_epoch == 2 and other.get_lr() == [0.0025]
    assert hf_zero.full_optimizer_state(other.module.inner.weight, "exp_avg") is not None
    with pytest.raises(ConfigError, match="custom_load_fn"):
        other.load_checkpoint(folder, custom_load_fn=print)
    other.set_lr(0.125)
    assert other.get_lr() == [0.125]
    Path(folder, "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="names 'gone', but there is no such folder"):
        other.load_checkpoint(folder)
    other.destroy()
    assert other.optimizer is None and hf_zero.engine_of(other.module) is None


def test_what_a_load_takes(tmp_path: Path) -> None:
    run_ranks(parts, 1, 3, str(tmp_path))


def unwritten(folder: str) -> None:
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}
    engine = start(3, zero_optimization=zero)
    assert not engine.save_16bit_model(folder)
    assert not Path(folder, "pytorch_model.bin").exists()
    state = engine.module_state_dict(exclude_frozen_parameters=True)
    assert state["inner.weight"].shape == (WIDTH, WIDTH) and "frozen.weight" not in state
    engine = start(1)
    state = engine.module_state_dict(exclude_frozen_parameters=True)
    assert "inner.weight" in state and "frozen.weight" not in state and "calls" in state
    Path(folder, "file").write_text("")
    with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
        engine.save_16bit_model(folder + "/file")


def test_weights_that_are_not_to_be_gathered_are_not_written(tmp_path: Path) -> None:
    run_ranks(unwritten, 2, str(tmp_path))


# -------------------------------------------------------------------- what libraries and old scripts expect back
def returned(stage: int, steps: int) -> list[tuple[float, float]]:
    engine, pairs = start(stage, steps, fp16={"enabled": stage == 1}), []
    for number in range(2 * steps):
        loss = engine(batch(number, engine.rank))
        back = engine.backward(loss)
        engine.step()
        pairs.append((float(back), float(loss) / steps))
    loss = engine(batch(9, engine.rank)) / steps
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    return pairs


@pytest.mark.parametrize(("stage", "steps"), [(1, 4), (3, 1), (3, 2)])
def test_backward_returns_the_loss_of_its_share_of_the_window(stage: int, steps: int) -> None:
    for pairs in run_ranks(returned, 2, stage, steps):
        assert all(back == pytest.approx(share, rel=1e-3) and share > 0 for back, share in pairs)


def consolidated(keep: Any) -> tuple[bool, Any, dict[str, torch.Tensor]]:
    keys = {} if keep is None else {"stage3_gather_16bit_weights_on_model_save": keep}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **keys}
    engine = start(3, zero_optimization=zero, bf16={"enabled": True})
    state = engine._zero3_consolidated_16bit_state_dict()
    return engine.zero_gather_16bit_weights_on_model_save(), state, whole(engine)


@pytest.mark.parametrize("keep", [None, True, False])
def test_the_names_that_accelerate_saves_through(keep: Any) -> None:
    (gathers, state, weights), (_, nothing, _) = run_ranks(consolidated, 2, keep)
    assert gathers == (keep is not False) and nothing is None
    assert state.keys() == weights.keys() and state["inner.weight"].dtype == torch.bfloat16
    assert all(torch.equal(state[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("clipping", "said"),
    [
        ({}, "gradient_clipping is not set: gradients are not clipped"),
        ({"gradient_clipping": "auto"}, 'gradient_clipping = "auto" is 1.0 here'),
        ({"gradient_clipping": 0.0}, ""),
    ],
)
def test_one_line_says_what_is_clipped(clipping: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(1, 1, **clipping)
    lines = [record.getMessage() for record in caplog.records if "gradient_clipping" in record.getMessage()]
    lines = [line for line in lines if "\n" not in line]
    assert len(lines) == (1 if said else 0) and all(said in line for line in lines)
    assert engine.gradient_clipping() == (1.0 if clipping.get("gradient_clipping") == "auto" else 0.0)
    assert engine.config.get("zero_optimization", {})["stage"] == 1 and engine.config["train_batch_size"] == 3
    engine.teardown()


# -------------------------------------------------------------------- whichever way an engine was made
def ways() -> dict[str, tuple[int, int, bool]]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero}
    shared = hf_zero.shard(Net(), config)
    with hf_zero.sharded_init(config):
        constructed = Net()
    made = {"shard": shared, "deepcopy": copy.deepcopy(shared), "sharded_init": constructed}
    again: Any = copy.deepcopy(constructed)
    hf_zero.initialize(model=again, optimizer=lambda params: torch.optim.SGD(params, lr=0.1), config=config)
    made["initialize"] = again
    found = {}
    for name, model in made.items():
        engine: Any = hf_zero.engine_of(model)
        assert isinstance(engine, hf_zero.ZeroEngine)
        found[name] = engine.dp_world_size, engine.zero_optimization_stage(), engine.was_step_applied()
    return found


def test_every_engine_has_deepspeeds_names() -> None:
    for found in run_ranks(ways, 2):
        assert len(found) == 4 and set(found.values()) == {(2, 3, False)}
