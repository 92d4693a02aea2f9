"""Which live parameters a PEFT model writes into which adapter file, found by asking PEFT itself.

PEFT decides per method what belongs to an adapter and how it is called in the file. It is asked with tensors without
data under the live names; the tensors that come back say which live name each stored name stands for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import is_peft_available

from hf_zero.errors import CheckpointError

_ADAPTER_FILE = "adapter_model.safetensors"


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a PeftModel, which saves its adapters only."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def adapter_names(model: Any, live: Mapping[str, torch.Tensor]) -> set[str]:
    """Live names of everything that `save_pretrained` may put into an adapter file of `model`."""
    return {name for adapter in model.peft_config for name in _stored_names(model, adapter, live).values()}


def adapter_files(model: Any, folder: Path) -> dict[str, Path]:
    """Adapter name -> its weights in a folder that `PeftModel.save_pretrained` wrote."""
    places = {name: folder if name == "default" else folder / name for name in model.peft_config}
    return {name: place / _ADAPTER_FILE for name, place in places.items() if (place / _ADAPTER_FILE).is_file()}


def adapter_tensors(
    model: Any, adapter: str, stored: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """The tensors of one adapter file under their live names.

    Raises:
        CheckpointError: A tensor of the adapter is not in the file, or one of the file is not a parameter as it stands.
    """
    expected = _stored_names(model, adapter, live)
    unknown = sorted(set(stored) - set(expected))
    # Embeddings are in the file only where they were trained or resized.
    embeddings = set(_stored_names(model, adapter, live, embeddings=True)) - set(
        _stored_names(model, adapter, live, embeddings=False)
    )
    missing = sorted(set(expected) - set(stored) - embeddings)
    if unknown or missing:
        raise CheckpointError(
            f"{path} does not fit adapter {adapter!r}: missing {missing[:4]}, not part of it {unknown[:4]}.\n"
            "Prompt-learning adapters cannot be restored from their weights alone: keep checkpoints with optimizer "
            "state (save_only_model=False)."
        )
    return {expected[name]: stored[name] for name in stored}


def _stored_names(
    model: Any, adapter: str, live: Mapping[str, torch.Tensor], *, embeddings: bool = True
) -> dict[str, str]:
    """Stored name -> live name, for all that may be in the file of `adapter`."""
    from peft import get_peft_model_state_dict

    marks = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in live.items()}
    name_of = {id(mark): name for name, mark in marks.items()}
    if model.peft_config[adapter].is_prompt_learning:
        # Its one tensor is computed by a forward of the prompt encoder, so the encoder has to be there as a whole.
        return {name: name for name in live if name.startswith(f"prompt_encoder.{adapter}.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        selected = get_peft_model_state_dict(
            model, state_dict=marks, adapter_name=adapter, save_embedding_layers=embeddings
        )
    return {stored: name_of[id(mark)] for stored, mark in selected.items() if id(mark) in name_of}
