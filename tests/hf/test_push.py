"""A sharded model is pushed to a hub whole, once, from all ranks together; what goes wrong is said on all of them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import load
from transformers import LlamaForCausalLM

import hf_zero
from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks
from tests.hf.hub import local_hub
from tests.hf.runs import build, zero_config


def reach(url: str) -> None:
    """Have this rank's client talk to the hub of the test."""
    huggingface_hub.constants.ENDPOINT = url
    huggingface_hub.hf_api.api.endpoint = url  # of the functions that older versions of transformers call
    huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    huggingface_hub.constants.HF_HUB_OFFLINE = False


def sharded(adapters: bool = False) -> Any:
    model: Any = build()
    if adapters:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hf_zero.shard(model, zero_config(3, train_micro_batch_size_per_gpu=1))
    return model


def push(url: str, adapters: bool) -> str | None:
    reach(url)
    result = sharded(adapters).push_to_hub("me/model", token="secret")
    return None if result is None else str(result.commit_url)


def weights_in(commit: dict[str, bytes], name: str) -> dict[str, torch.Tensor]:
    return load(commit[name])


def test_a_model_is_pushed_once_and_whole() -> None:
    with local_hub() as hub:
        assert run_ranks(push, 2, hub.url, False) == [f"{hub.url}/me/model/commit/1", None]
    (commit,) = hub.commits
    assert {"README.md", "config.json", "model.safetensors"} <= set(commit)
    saved, whole = weights_in(commit, "model.safetensors"), build().state_dict()
    assert set(saved) == set(whole) - {"lm_head.weight"}, "tied weights go once"
    assert all(torch.equal(value, whole[name]) for name, value in saved.items())


def test_of_a_peft_model_the_adapters_are_pushed() -> None:
    with local_hub() as hub:
        run_ranks(push, 2, hub.url, True)
    (commit,) = hub.commits
    saved = weights_in(commit, "adapter_model.safetensors")
    assert saved and all("lora" in name and value.numel() and value.isfinite().all() for name, value in saved.items())
    assert "model.safetensors" not in commit


def push_by_trainer(url: str, folder: str) -> None:
    reach(url)
    arguments = hf_zero.TrainingArguments(
        output_dir=folder,
        zero=zero_config(3),
        hub_model_id="me/model",
        hub_token="secret",
        report_to=[],
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=1,
    )
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)} for _ in range(2)]
    trainer = hf_zero.Trainer(build(), arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    trainer.push_to_hub()


def test_trainer_pushes_what_it_trained(tmp_path: Path) -> None:
    with local_hub() as hub:
        run_ranks(push_by_trainer, 2, hub.url, str(tmp_path / "out"))
    (commit,) = hub.commits
    folder = tmp_path / "pulled"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(commit[name])
    trained = LlamaForCausalLM.from_pretrained(folder).state_dict()
    before = build().state_dict()
    assert all(value.isfinite().all() for value in trained.values())
    assert not torch.equal(trained["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def push_on_one_rank(url: str) -> None:
    reach(url)
    model = sharded()
    if dist.get_rank() == 0:
        with pytest.raises(StateError, match=r"rank 0 called push_to_hub, but rank\(s\) \[1\] did not"):
            model.push_to_hub("me/model", token="secret")


def test_a_push_on_one_rank_only_is_an_error() -> None:
    with local_hub() as hub:
        run_ranks(push_on_one_rank, 2, hub.url, timeouts={"presence": 1})
    assert not hub.commits


def push_in_vain(url: str) -> str | None:
    """Return what the rank that pushes is told. The model is as it was: all ranks can save it."""
    reach(url)
    model = sharded()
    told = None
    try:
        model.push_to_hub("me/model", token="secret")
    except huggingface_hub.errors.HfHubHTTPError as error:
        told = str(error)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert (Path(folder) / "model.safetensors").exists() == (dist.get_rank() == 0)
    return told


@pytest.mark.parametrize("path", ["/api/repos/create", "/commit/main"])
def test_a_hub_that_refuses_is_an_error_of_the_rank_that_pushes(path: str) -> None:
    with local_hub() as hub:
        hub.refuses = path
        first, second = run_ranks(push_in_vain, 2, hub.url)
    assert "403" in first and second is None
    assert not hub.commits


def save_into(folder: str) -> None:
    sharded().save_pretrained(folder)


def test_a_folder_that_cannot_be_written_is_said_on_every_rank() -> None:
    for failure in run_ranks(save_into, 2, "/proc/nowhere/model", expect_error=True):
        assert failure.kind == "CheckpointError" and "rank 0" in failure.message, failure
        assert "/proc/nowhere" in failure.message
