"""GPT-2 as a row of layers: what goes in, the blocks of transformers as they are, what comes out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from hf_zero.pipeline import LayerSpec


class GPT2Preprocessing(nn.Module):
    """Token ids [batch, tokens] -> hidden states [batch, tokens, width]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden: torch.Tensor = self.drop(self.wte(ids) + self.wpe(places))
        return hidden


class GPT2Postprocessing(nn.Module):
    """Hidden states -> logits [batch, tokens, vocabulary]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.ln_f(hidden))
        return logits


def layers_of(config: GPT2Config) -> list[LayerSpec]:
    """A rank builds those of its own stage only."""
    blocks = [LayerSpec(GPT2Block, config, layer_idx=number) for number in range(config.n_layer)]
    return [LayerSpec(GPT2Preprocessing, config), *blocks, LayerSpec(GPT2Postprocessing, config)]


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The loss of the next token, where there is one; padding is -100 in the labels."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100)
