"""Small models of many architectures, saved as Hugging Face folders, and the class each is loaded with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

_LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model to save, and what it is loaded as; `options` go to both from_pretrained calls that are compared."""

    make: Callable[[], nn.Module]
    load_as: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    max_shard_size: str = "30KB"
    binary: bool = False
    change: Callable[[Path], None] | None = None  # of the saved folder


def _llama(**more: Any) -> hf.LlamaForCausalLM:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_LLAMA, **more))


def _moe() -> hf.MixtralForCausalLM:
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_LLAMA, num_local_experts=5, num_experts_per_tok=2))


def _qwen3_moe() -> nn.Module:
    more = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_LLAMA, **more))


def _t5(tied: bool) -> nn.Module:
    config = hf.T5Config(vocab_size=71, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    config.tie_word_embeddings = tied
    return hf.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = hf.BartConfig(
        vocab_size=71, d_model=16, encoder_layers=1, decoder_layers=1, max_position_embeddings=20, **sizes
    )
    return hf.BartForConditionalGeneration(config)


def _llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_VISION), text_config=hf.LlamaConfig(**_LLAMA), image_token_index=5
    )
    return hf.LlavaForConditionalGeneration(config)


def _clip() -> nn.Module:
    text = {**_BERT, "eos_token_id": 2, "bos_token_id": 1}
    return hf.CLIPModel(
        hf.CLIPConfig(text_config=hf.CLIPTextConfig(**text).to_dict(), vision_config=_VISION, projection_dim=12)
    )


def _siglip() -> nn.Module:
    return hf.SiglipModel(hf.SiglipConfig(text_config={**_BERT, "projection_size": 16}, vision_config=_VISION))


def _wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_dim=(8, 8),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    return hf.Wav2Vec2ForCTC(config)


def _neox() -> nn.Module:
    return hf.GPTNeoXForCausalLM(
        hf.GPTNeoXConfig(
            vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
        )
    )


def _gemma() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**_LLAMA, head_dim=8))


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=97, n_embd=16, n_layer=2, n_head=2, n_positions=24))


def _opt() -> nn.Module:
    config = hf.OPTConfig(
        vocab_size=97,
        hidden_size=16,
        ffn_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        word_embed_proj_dim=12,
    )
    return hf.OPTForCausalLM(config)


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=71,
        d_model=16,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=20,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hf.WhisperForConditionalGeneration(config)


def _store_head_twice(folder: Path, factor: float = 1.0) -> None:
    """A file with both names of a tied weight, as older savers wrote it, and as trainings of adapters and the head
    leave it, with other values.
    """
    from safetensors.torch import load_file, save_file

    state: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
        file.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] * factor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _bf16(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().to(torch.bfloat16)


BERT_CONFIG = hf.BertConfig(**_BERT)
ARCHITECTURES: dict[str, Architecture] = {
    "llama tied": Architecture(lambda: _llama(tie_word_embeddings=True), hf.LlamaForCausalLM),
    "llama untied": Architecture(lambda: _llama(tie_word_embeddings=False), hf.AutoModelForCausalLM),
    "llama stored twice": Architecture(
        lambda: _llama(tie_word_embeddings=True), hf.LlamaForCausalLM, change=_store_head_twice
    ),
    "llama stored apart": Architecture(
        lambda: _llama(tie_word_embeddings=True),
        hf.LlamaForCausalLM,
        change=lambda folder: _store_head_twice(folder, 1.5),
    ),
    "llama bf16": Architecture(_bf16(_llama), hf.LlamaForCausalLM),
    "llama bf16 as fp32": Architecture(_bf16(_llama), hf.LlamaForCausalLM, {"dtype": torch.float32}),
    "llama with a new score": Architecture(_llama, hf.LlamaForSequenceClassification, {"num_labels": 3}),
    "llama base": Architecture(_llama, hf.LlamaModel),
    "gpt2": Architecture(_gpt2, hf.GPT2LMHeadModel),
    "gpt2 binary": Architecture(_gpt2, hf.GPT2LMHeadModel, binary=True),
    "t5 tied": Architecture(lambda: _t5(True), hf.AutoModelForSeq2SeqLM),
    "t5 untied": Architecture(lambda: _t5(False), hf.AutoModelForSeq2SeqLM),
    "t5 bf16": Architecture(lambda: _t5(True), hf.AutoModelForSeq2SeqLM, {"dtype": torch.bfloat16}),
    "bart": Architecture(_bart, hf.AutoModelForSeq2SeqLM),
    "bert with a new head": Architecture(
        lambda: hf.BertForMaskedLM(BERT_CONFIG), hf.BertForSequenceClassification, {"num_labels": 5}
    ),
    "bert with another head": Architecture(
        lambda: hf.BertForSequenceClassification(BERT_CONFIG),
        hf.BertForSequenceClassification,
        {"num_labels": 5, "ignore_mismatched_sizes": True},
    ),
    "mixtral": Architecture(_moe, hf.MixtralForCausalLM),
    "qwen3 moe": Architecture(_qwen3_moe, hf.AutoModelForCausalLM),
    "llava": Architecture(_llava, hf.LlavaForConditionalGeneration),
    "clip": Architecture(_clip, hf.CLIPModel),
    "siglip": Architecture(_siglip, hf.SiglipModel),
    "wav2vec2": Architecture(_wav2vec2, hf.Wav2Vec2ForCTC),
    "vit": Architecture(lambda: hf.ViTModel(hf.ViTConfig(**_VISION)), hf.ViTForImageClassification, {"num_labels": 3}),
    "gemma2": Architecture(_gemma, hf.AutoModelForCausalLM),
    "gpt neox": Architecture(_neox, hf.AutoModelForCausalLM),
    "opt": Architecture(_opt, hf.AutoModelForCausalLM),
    "whisper": Architecture(_whisper, hf.WhisperForConditionalGeneration),
}


def save_all(root: Path, names: Iterable[str] = ARCHITECTURES) -> None:
    """Write the models to folders of their names under `root`."""
    for name in names:
        architecture = ARCHITECTURES[name]
        torch.manual_seed(len(name))
        model = architecture.make()
        folder = root / name
        model.save_pretrained(folder, max_shard_size=architecture.max_shard_size)
        if architecture.binary:
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        if architecture.change is not None:
            architecture.change(folder)
