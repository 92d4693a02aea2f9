"""Takes every causal language model of transformers apart into a pipeline: as the model, or refused by name.

Models of three small layers are made from each configuration class. Two stages in a row give the model's own logits,
to the bit, its loss, and its gradients, for a batch that is padded on the left; or from_transformers raises
ConfigError. Exit status 1 if one does neither. Some 2 minutes on one core.

    python scripts/pipeline_models.py
    python scripts/pipeline_models.py mixtral gemma2
"""

from __future__ import annotations

import collections
import logging
import sys
import warnings
from typing import Any

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


def outcome(kind: str, name: str) -> tuple[str, str]:
    """Return (what became of it, details)."""
    try:
        model = small_model(kind, name)
        if model is None:
            return "too big for this", ""
        ids, mask, labels = batch()
        want = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        grads = gradients(model, want.loss)
    except Exception as error:  # of transformers: what else its configuration needs is not known here
        return "not made with these sizes", f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    try:
        logits, loss, found = in_stages(model)
    except ConfigError as error:
        return "refused", str(error).splitlines()[0].rpartition("into stages: ")[2]
    except Exception as error:
        return "FAILED", f"{type(error).__name__}: {error}"
    if not torch.equal(logits, want.logits):
        return "DIFFERENT", f"logits by up to {(logits - want.logits).abs().max():.1e}"
    if abs(loss - want.loss) > 1e-6:
        return "DIFFERENT", f"the loss is {loss:.6f}, not {want.loss:.6f}"
    wrong = [key for key in grads.keys() | found.keys() if key not in grads or key not in found]
    wrong += [key for key in grads.keys() & found.keys() if not torch.allclose(grads[key], found[key], 1e-4, 1e-6)]
    return ("DIFFERENT", f"gradients of {wrong[:3]}") if wrong else ("as the model", "")


def main() -> None:
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    logging.getLogger("hf_zero").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found: dict[str, list[str]] = collections.defaultdict(list)
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if kind in chosen and kind in hf.CONFIG_MAPPING:
            what, details = outcome(kind, name)
            found[what].append(f"{name}: {details}" if details else name)
    for what, names in found.items():
        print(f"{what}: {len(names)}", *sorted(set(names)), sep="\n    ")
    sys.exit("FAILED" in found or "DIFFERENT" in found)


if __name__ == "__main__":
    main()
