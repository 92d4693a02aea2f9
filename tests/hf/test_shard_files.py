"""All ranks write the files of a sharded model's weights: byte for byte what one process writes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import hf_zero
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.errors import CheckpointError
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, build, examples, zero_config

LIMIT = 30_000  # bytes in a file


def llama(tied: bool) -> Any:
    model: Any = build()
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.arange(float(model.lm_head.weight.numel())).view(-1, 36))
        model.config.tie_word_embeddings = False
    model.model.layers[2].register_buffer("seen", torch.tensor([True, False, True]))  # saved last of its layer
    return model


def mixtral() -> Any:
    """Its save splits tensors that hold all experts."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 600}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bytes_of(state: dict[str, torch.Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values())


def counted(engine: ZeroEngine, name: str) -> list[int]:
    """Return what each call of the engine's method gives this rank to hold, in bytes."""
    sizes: list[int] = []
    method: Callable[..., dict[str, torch.Tensor]] = getattr(engine, name)

    def count(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        state = method(*args, **kwargs)
        sizes.append(bytes_of(state))
        return state

    setattr(engine, name, count)
    return sizes


def sharded(model: Any) -> ZeroEngine:
    hf_zero.shard(model, zero_config(3, train_micro_batch_size_per_gpu=1))
    engine = engine_of(model)
    assert engine is not None
    return engine


def save(make: Callable[..., Any], args: tuple[Any, ...], folder: str, per_rank: bool = False) -> tuple[Any, Any]:
    model = make(*args)
    engine = sharded(model)
    if engine.rank and hasattr(model, "model") and hasattr(model.model.layers[-1], "seen"):
        model.model.layers[-1].seen.fill_(False)  # rank 0's is saved
    pieces, whole = counted(engine, "weights_for_ranks"), counted(engine, "full_state_dict")
    model.save_pretrained(f"{folder}/{engine.rank}" if per_rank else folder, max_shard_size=LIMIT)
    engine.teardown()
    return pieces, whole


def save_all(folder: str) -> dict[str, tuple[Any, Any]]:
    return {
        "tied": save(llama, (True,), f"{folder}/tied"),
        "untied": save(llama, (False,), f"{folder}/untied"),
        "mixtral": save(mixtral, (), f"{folder}/mixtral"),
        "apart": save(llama, (True,), f"{folder}/apart", per_rank=True),
    }


@pytest.mark.parametrize("world", [2, 3])
def test_files_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    found = run_ranks(save_all, world, str(tmp_path))
    models = {"tied": llama(True), "untied": llama(False), "mixtral": mixtral()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "one" / name, max_shard_size=LIMIT)
        assert sum(file.endswith(".safetensors") for file in files(tmp_path / "one" / name)) >= 4
        assert files(tmp_path / name) == files(tmp_path / "one" / name), name
    for name in ("tied", "untied"):
        size = sum(len(data) for file, data in files(tmp_path / name).items() if file.endswith(".safetensors"))
        for pieces, whole in (rank[name] for rank in found):
            assert whole == [] and pieces and max(pieces) <= LIMIT < size / 3
            assert any(pieces), "every rank writes"
    for rank, result in enumerate(found):  # where tensors are computed, and where rank 0 cannot see others' files
        for name in ("mixtral", "apart"):
            pieces, whole = result[name]
            assert pieces == [] and len(whole) == 1 and (whole[0] > 3 * LIMIT) == (rank == 0)
    assert files(tmp_path / "apart" / "0") == files(tmp_path / "one" / "tied")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "untied").state_dict()
    own = models["untied"].state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded.items()) and len(own) == len(loaded) + 1


def save_by_trainer(folder: str) -> tuple[dict[str, torch.Tensor], list[int], list[int]]:
    """Return what was trained, and what was held to save it."""
    with pytest.MonkeyPatch.context() as patched:
        plain = PreTrainedModel.save_pretrained.__defaults__ or ()
        smaller = tuple(LIMIT if value == "50GB" else value for value in plain)
        assert smaller != plain, "vacuous: another limit"
        patched.setattr(PreTrainedModel.save_pretrained, "__defaults__", smaller)
        args = hf_zero.TrainingArguments(**arguments(folder, max_steps=1), zero=zero_config(3))
        trainer = hf_zero.Trainer(model=llama(True), args=args, train_dataset=examples(8, 1))
        trainer.train()
        engine = trainer.zero
        wanted = engine.full_state_dict(keep=True)
        pieces, whole = counted(engine, "weights_for_ranks"), counted(engine, "full_state_dict")
        trainer.save_model(f"{folder}/saved")
    return wanted, pieces, whole


def test_trainer_writes_from_all_ranks(tmp_path: Path) -> None:
    for wanted, pieces, whole in run_ranks(save_by_trainer, 2, str(tmp_path), init_group=False):
        assert whole == [] and pieces and max(pieces) <= LIMIT
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.items())
    found = files(tmp_path / "saved")
    assert {"training_args.bin", "config.json", "model.safetensors.index.json"} <= found.keys()
    assert sum(name.endswith(".safetensors") for name in found) >= 4 and not any("partial" in name for name in found)


def save_with_a_small_limit(folder: str) -> list[str]:
    model: Any = llama(True)
    engine = sharded(model)
    before, errors = resource.getrlimit(resource.RLIMIT_FSIZE), []
    for target in (f"{folder}/new", f"{folder}/old"):
        if target.endswith("old"):
            model.save_pretrained(target, max_shard_size=LIMIT)
            if engine.rank == 0:
                (Path(folder) / "mark").write_bytes(b"".join(files(Path(target)).values()))
            engine.comm.barrier("saved")
        if engine.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, before[1]))
        try:
            model.save_pretrained(target, max_shard_size=LIMIT)
        except CheckpointError as error:
            errors.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    engine.comm.barrier("both have failed")
    return errors


def test_what_rank_1_cannot_write_is_an_error_of_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(save_with_a_small_limit, 2, str(tmp_path))
    assert first == second and len(first) == 2
    for error, name in zip(first, ("new", "old"), strict=True):
        assert error.startswith(f"rank 1: cannot write {tmp_path}/{name}/model-00002-of-"), error
        assert "File too large" in error
    assert files(tmp_path / "new") == {}
    assert b"".join(files(tmp_path / "old").values()) == (tmp_path / "mark").read_bytes()
