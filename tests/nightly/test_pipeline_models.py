"""Every causal language model of transformers, taken apart into a pipeline: as the model, or refused by name.

Models of three small layers are made from each configuration class. Two stages in a row give the model's own logits,
to the bit, its loss, and its gradients, for a batch that is padded on the left; or from_transformers raises
ConfigError. Some 2 minutes on one core.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_zero
from hf_zero.errors import ConfigError

VOCABULARY, MOST_PARAMETERS = 97, 20_000_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    # Not every class takes these.
    "sliding_window": 3,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OPTIONAL = 3


def small_model(kind: str, name: str) -> Any:
    """A model of this class, or None where the sizes that its configuration has by default are big."""
    for left_out in range(OPTIONAL + 1):
        try:
            config = hf.CONFIG_MAPPING[kind](**dict(list(SIZES.items())[: len(SIZES) - left_out]))
            break
        except Exception:
            if left_out == OPTIONAL:
                raise
    make = getattr(hf, name)
    with torch.device("meta"):
        if sum(param.numel() for param in make(config).parameters()) > MOST_PARAMETERS:
            return None
    torch.manual_seed(0)
    return make(config).eval()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask, labels."""
    ids = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids.masked_fill(mask == 0, 0), mask, ids.masked_fill(mask == 0, -100)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def in_stages(model: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    ids, mask, labels = batch()
    stages = [hf_zero.pipeline.from_transformers(model, 2, stage=stage).eval() for stage in range(2)]
    given: Any = {"input_ids": ids, "attention_mask": mask}
    for stage in stages:
        given = stage(given)
    loss = stages[-1].loss_fn(given, labels)
    return given.detach(), loss.detach(), gradients(model, loss)


def check(kind: str, name: str) -> str:
    """Raise AssertionError where the stages are not as the model; else return what became of the class."""
    try:
        model = small_model(kind, name)
        if model is None:
            return "too big for this test"
        ids, mask, labels = batch()
        want = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        grads = gradients(model, want.loss)
    except Exception as error:  # of transformers: what else its configuration needs is not known here
        return f"not made with these sizes: {type(error).__name__}"
    try:
        logits, loss, found = in_stages(model)
    except ConfigError as error:
        return f"refused: {str(error).splitlines()[0].rpartition('into stages: ')[2]}"
    torch.testing.assert_close(logits, want.logits, rtol=0, atol=0)
    assert abs(loss - want.loss) <= 1e-6
    assert grads.keys() == found.keys()
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-6, msg=key)
    return "as the model"


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_cut_into_stages_or_refused_by_name() -> None:
    wrong, found = [], {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind in hf.CONFIG_MAPPING:
            try:
                found[name] = check(kind, name)
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
    listing = "\n".join(f"{name}: {became}" for name, became in sorted(found.items()))
    assert not wrong, "\n".join(wrong)
    assert sum(became == "as the model" for became in found.values()) >= 50, listing
