"""Small models of transformers, with eager attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fuzz.registry import VOCAB, Batch, add


def _llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    config = LlamaConfig(
        vocab_size=VOCAB, **sizes, **heads, attn_implementation="eager", use_cache=False, initializer_range=0.2, **more
    )
    return LlamaForCausalLM(config)


def _llama_checkpointed() -> nn.Module:
    model = _llama(tie_word_embeddings=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    nothing_random = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCAB, "n_positions": 8, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **nothing_random, attn_implementation="eager", use_cache=False))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 12, "d_kv": 5, "d_ff": 19, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, attn_implementation="eager", use_cache=False)
    )


def _clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": VOCAB, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=7))
    model.set_attn_implementation("eager")
    return model


def labelled(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = run(input_ids=batch.tokens, labels=batch.tokens.flip(0)).loss
    return loss


def contrasted(run: Any, net: nn.Module, batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * batch.step + 10 * batch.micro + batch.rank)
    pixels = torch.randn(len(batch.tokens), 3, 8, 8, generator=generator).to(batch.x.dtype)
    loss: torch.Tensor = run(input_ids=batch.tokens, pixel_values=pixels, return_loss=True).loss
    return loss


add("llama", _llama, labelled, "single slow")
add("llama, tied, checkpointed", _llama_checkpointed, labelled, "single slow")
add("gpt2", _gpt2, labelled, "single noise slow")
add("t5", _t5, labelled, "single slow")
add("clip", _clip, contrasted, "single noise slow")
