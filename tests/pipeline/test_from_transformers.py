"""from_transformers: stage after stage against the model itself, the bytes that a stage reads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import hf_zero
from hf_zero.config import ZeroConfig
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.extras.pipeline.pipeline_section import PipelineSection
from tests.harness.ranks import run_ranks

VOCABULARY, LAYERS = 97, 3
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_BASE, "intermediate_size": 36, "num_key_value_heads": 1, "head_dim": 8}
_SLIDING = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}


def _smollm2(**more: Any) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, tie_word_embeddings=True, **more))


MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA)),
    "smollm2": _smollm2,
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_LLAMA, **_SLIDING)),  # masks of two kinds
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_LLAMA)),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**_BASE, n_positions=32, rotary_dim=4)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(**_BASE, intermediate_size=24, hidden_dropout=0.1, attention_dropout=0.1)
    ),
    "cohere2": lambda: hf.Cohere2ForCausalLM(hf.Cohere2Config(**_LLAMA, sliding_window=3)),  # logits that are scaled
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**_LLAMA, sliding_window=3)),  # and two rotary ones
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=4)),
}
STORED_OTHERWISE = ("mixtral",)


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def batch() -> dict[str, torch.Tensor]:
    """Padded on the left."""
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def stages_of(source: Any, num_stages: int, **options: Any) -> list[Any]:
    made = [hf_zero.pipeline.from_transformers(source, num_stages, stage=i, **options) for i in range(num_stages)]
    return [stage.eval() for stage in made]


def run(stages: list[Any], inputs: Any) -> Any:
    for stage in stages:
        inputs = stage(inputs)
    return inputs


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_model(name: str, tmp_path: Path) -> None:
    model, given = made(name), batch()
    if name in STORED_OTHERWISE:
        source: Any = model
    else:
        model.save_pretrained(source := tmp_path)
    stages = stages_of(source, 3)
    ids, mask = given["input_ids"], given["attention_mask"]
    torch.testing.assert_close(run(stages, ids), model(ids).logits, rtol=0, atol=0)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = model(**given, position_ids=positions).logits
    torch.testing.assert_close(run(stages, (ids, mask, positions)), want, rtol=0, atol=0)

    labels = ids.masked_fill(mask == 0, -100)
    model.zero_grad()
    want = model(**given, labels=labels)
    logits = run(stages, given)
    loss = stages[-1].loss_fn(logits, labels)
    torch.testing.assert_close((logits, loss), (want.logits, want.loss), rtol=0, atol=0)
    want.loss.backward()
    wanted = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    found: dict[str, Any] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            # The copies of a tie are one parameter here where a model was given; where files were, they add up.
            own = stage.hf_names[name]
            found[own] = param.grad if source is model else found.get(own, 0) + param.grad
    assert set(found) == set(wanted)
    torch.testing.assert_close(found, wanted)


def test_a_stage_reads_its_own_tensors_and_no_more(tmp_path: Path) -> None:
    model = made("smollm2")
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    stages = stages_of(tmp_path, 3, partition_method="uniform")
    assert stages[0].parts == [0, 2, 4, 5] and [tie.name for tie in stages[0].ties] == ["0.model.embed_tokens.weight"]
    for stage in stages:
        own = {name: tensor.nbytes for name, tensor in stage.named_parameters()}
        assert stage.load_report.bytes_read == sum(own.values()) > 0
        assert stage.load_report.bytes_stored == sum(param.nbytes for param in model.parameters())
    assert (
        sum(stage.load_report.bytes_read for stage in stages)
        == sum(param.nbytes for param in model.parameters()) + model.lm_head.weight.nbytes
    ), "the tied embeddings are read by two stages"
    # All names lead back into the model.
    renamed = {stage.hf_names[name]: value for stage in stages for name, value in stage.state_dict().items()}
    again = made("smollm2")
    nn.init.zeros_(again.lm_head.weight)
    again.load_state_dict(renamed, strict=True)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_layers_go_by_the_models_class_names(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    (stage, *_) = stages_of(tmp_path, 3, partition_method="type:LlamaDecoderLayer")
    assert stage.parts == [0, 2, 3, 5]
    assert [row.class_name for row in stage._rows] == ["Embeddings", *["LlamaDecoderLayer"] * LAYERS, "Head"]
    assert stages_of(tmp_path, 2, partition_method="profile")[0].parts[1] in range(1, 5)


def test_weights_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    made("llama").save_pretrained(tmp_path)
    (stage,) = stages_of(tmp_path, 1, model_kwargs={"dtype": torch.bfloat16})
    model = hf.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {param.dtype for param in stage.parameters()} == {torch.bfloat16}
    ids = batch()["input_ids"]
    torch.testing.assert_close(run([stage], ids), model(ids).logits, rtol=0, atol=0)


def test_dropout_draws_what_the_models_own_draws() -> None:
    model, given = made("gpt_neox").train(), batch()
    (whole,) = stages_of(model, 1)
    whole.train()
    results = []
    for call in (lambda: model(**given).logits, lambda: whole(given)):
        torch.manual_seed(5)
        results.append(call())
    assert not torch.equal(results[0], model.eval()(**given).logits), "vacuous: no dropout"
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_recomputed_layers_give_the_same_gradients() -> None:
    grads = []
    for interval in (0, 2):
        model, given = made("gpt_neox"), batch()
        stages = stages_of(model, 2, activation_checkpoint_interval=interval, seed_layers=True)
        for stage in stages:
            stage.train()
        run(stages, given).square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(grad is not None for grad in grads[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice(equal: bool, tmp_path: Path) -> None:
    """One parameter if they are equal, as transformers has it, else two."""
    model = made("smollm2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    stages = stages_of(tmp_path, 2)
    assert [tie.name for tie in stages[0].ties] == ["0.model.embed_tokens.weight"] * equal
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = batch()["input_ids"]
    torch.testing.assert_close(run(stages, ids), loaded(ids).logits, rtol=0, atol=0)


def test_a_given_model_stays_as_it_is() -> None:
    model, ids = made("gptj"), batch()["input_ids"]
    names, want = list(model.state_dict()), model(ids).logits
    (stage,) = stages_of(model, 1)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(ids).logits, want, rtol=0, atol=0)
    assert {id(param) for param in stage.parameters()} == {id(param) for param in model.parameters()}


def test_models_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 20}
    refused: list[tuple[Any, str]] = [
        (
            hf.T5ForConditionalGeneration(hf.T5Config(**sizes)),
            "T5ForConditionalGeneration .* T5Config has no base_model_pp_plan",
        ),
        (hf.LlamaForSequenceClassification(hf.LlamaConfig(**_LLAMA)), "LlamaForSequenceClassification .* no head"),
        (nn.Linear(2, 2), "Linear is no model of transformers"),
    ]
    routed = hf.MixtralConfig(**_LLAMA, num_local_experts=4, output_router_logits=True)
    refused.append((hf.MixtralForCausalLM(routed), "output_router_logits adds a loss"))
    refused.append((hf.GPT2LMHeadModel(hf.GPT2Config(**_BASE)), "GPT2LMHeadModel .* GPT2Config has no base_model_pp_"))
    other_loss = made("llama")
    other_loss.loss_function = nn.functional.cross_entropy
    refused.append((other_loss, r"LlamaForCausalLM .* its loss is not that of the next token \(or give .* a loss_fn"))
    unplanned = made("llama")
    unplanned.model.extra = nn.Linear(2, 2)
    refused.append((unplanned, r"the parameter model.extra.weight belongs to none of the modules of its plan"))
    made("mixtral").save_pretrained(tmp_path / "mixtral")
    refused.append((tmp_path / "mixtral", "in another form than they are stored in: load the model"))
    for source, problem in refused:
        with pytest.raises(ConfigError, match=problem):
            hf_zero.pipeline.from_transformers(source, 1)
    stages_of(other_loss, 1, loss_fn=nn.functional.cross_entropy)
    (whole,) = stages_of(made("gptj"), 1)
    with pytest.raises(ConfigError, match=r"inputs of this pipeline are tuple with NoneType.*expected a tensor"):
        whole((None,))


def test_a_script_gives_the_plan_of_a_class_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ("wte", "wpe", "drop", "h", "ln_f")
    monkeypatch.setattr(hf.GPT2Config, "base_model_pp_plan", {name: ([], []) for name in order})
    monkeypatch.setattr(hf.GPT2LMHeadModel, "_pp_plan", {"lm_head": ([], [])})
    torch.manual_seed(0)
    model, given = hf.GPT2LMHeadModel(hf.GPT2Config(**_BASE, n_positions=32)).eval(), batch()
    torch.testing.assert_close(run(stages_of(model, 3), given), model(**given).logits, rtol=0, atol=0)


class Peeking(hf.LlamaModel):
    """Gives its layers more than the last layer's result."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, first=embeds)
        return hf.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class Looping(hf.LlamaModel):
    """Calls its layers twice."""

    def forward(self, inputs_embeds: Any = None, **_: Any) -> Any:
        hidden = inputs_embeds
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return hf.modeling_outputs.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.parametrize(
    "base, problem",
    [
        (Peeking, "its layers take more of the tokens than the hidden"),
        (Looping, f"its forward calls layers {2 * LAYERS} times, and it has {LAYERS}"),
    ],
)
def test_forwards_that_do_otherwise_are_refused(base: type[hf.LlamaModel], problem: str) -> None:
    model = made("llama")
    model.model.__class__ = base
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM .* {problem}"):
        hf_zero.pipeline.from_transformers(model, 1)


def load_on_ranks(folder: str, damaged: str) -> dict[str, Any]:
    module = hf_zero.pipeline.from_transformers(folder, partition_method="uniform")
    assert not module.is_built
    module.configure(ZeroConfig.load({"pipeline": {"stages": 2}}).section("pipeline", PipelineSection))
    with pytest.raises(CheckpointError) as raised:
        hf_zero.pipeline.from_transformers(damaged, 2)
    return {
        "stage": module.stage_id,
        "read": module.load_report.bytes_read,
        "weights": {module.hf_names[name]: param.detach() for name, param in module.named_parameters()},
        "problem": str(raised.value),
    }


def test_processes_load_their_stages_when_the_configuration_names_them(tmp_path: Path) -> None:
    model = made("smollm2")
    model.save_pretrained(tmp_path / "good")
    model.save_pretrained(tmp_path / "damaged", max_shard_size="8KB")
    index = json.loads((tmp_path / "damaged/model.safetensors.index.json").read_text())
    part = tmp_path / "damaged" / index["weight_map"]["model.norm.weight"]
    part.write_bytes(part.read_bytes()[:-2])
    found = run_ranks(load_on_ranks, 2, str(tmp_path / "good"), str(tmp_path / "damaged"))
    weights = dict(model.named_parameters())
    assert [one["stage"] for one in found] == [0, 1]
    for one in found:
        assert one["read"] == sum(tensor.nbytes for tensor in one["weights"].values())
        torch.testing.assert_close(one["weights"], {name: weights[name].detach() for name in one["weights"]})
        assert part.name in one["problem"]
    assert set(found[0]["weights"]) | set(found[1]["weights"]) == set(weights)
