"""Finds which live parameters a PEFT model writes into which adapter file, by asking PEFT itself.

PEFT decides per method what belongs to an adapter and how it is called in the file. It is asked with tensors without
data under the live names; the tensors that come back show which live name each stored name stands for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import is_peft_available

from hf_zero.access.full import gathered_params
from hf_zero.errors import CheckpointError
from hf_zero.runtime.full_weights import own_tensors

PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal")  # of LoRA: they neither read nor change the base
_ADAPTER_FILE = "adapter_model.safetensors"


def live_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (placeholders where sharded) and persistent buffers by state dict name, tied names included."""
    return dict(own_tensors(model))


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a PeftModel, which saves its adapters only."""
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def keeps_base(model: Any) -> bool:
    """Whether the adapters of a PeftModel were made without changing its base model.

    PiSSA, OLoRA and the like move a part of every base weight into the adapter, so what is left is in no other file.
    """
    kinds = (getattr(config, "init_lora_weights", True) for config in model.peft_config.values())
    return all(kind in PLAIN_INITIALISATIONS for kind in kinds)


def computes_its_adapters(model: Any) -> bool:
    """Whether the adapter files of a PeftModel hold what it computes (prompt learning), and no weight itself."""
    return is_peft_model(model) and any(config.is_prompt_learning for config in model.peft_config.values())


@contextlib.contextmanager
def unsharded_prompt_encoders(model: nn.Module) -> Iterator[None]:
    """Inside, prompt encoders are unsharded: PEFT runs them to save them. All ranks must enter and leave together."""
    names = [name for name in live_state(model) if name.startswith("prompt_encoder.")] if is_peft_model(model) else []
    if not names:
        yield
        return
    with gathered_params(model, names), torch.no_grad():
        yield


def adapter_names(model: Any, live: Mapping[str, torch.Tensor], embeddings: bool | str) -> set[str]:
    """Live names of everything that `save_pretrained` puts into the adapter files of `model`."""
    stored = [_stored_names(model, adapter, live, embeddings=embeddings) for adapter in model.peft_config]
    return {live_name for names in stored for live_name in names.values()}


def adapter_files(model: Any, folder: Path) -> dict[str, Path]:
    """Adapter name -> its weights in a folder that `PeftModel.save_pretrained` wrote."""
    places = {name: folder if name == "default" else folder / name for name in model.peft_config}
    return {name: place / _ADAPTER_FILE for name, place in places.items() if (place / _ADAPTER_FILE).is_file()}


def adapter_tensors(
    model: Any, adapter: str, stored: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """The tensors of one adapter file under their live names.

    Raises:
        CheckpointError: A tensor of the adapter is not in the file, or one of the file is not a live tensor.
    """
    # Embeddings are in the file only where they were trained or resized.
    expected = _stored_names(model, adapter, live, embeddings=True)
    required = _stored_names(model, adapter, live, embeddings=False)
    unknown = sorted(set(stored) - set(expected))
    missing = sorted(set(required) - set(stored))
    if unknown or missing:
        raise CheckpointError(
            f"{path} does not fit adapter {adapter!r}: missing {missing[:4]}, not part of it {unknown[:4]}.\n"
            "Prompt-learning adapters cannot be restored from their weights alone: keep checkpoints with optimizer "
            "state (save_only_model=False)."
        )
    return {expected[name]: stored[name] for name in stored}


def _stored_names(
    model: Any, adapter: str, live: Mapping[str, torch.Tensor], *, embeddings: bool | str
) -> dict[str, str]:
    """Stored name -> live name, for what PEFT puts into the file of `adapter`."""
    from peft import get_peft_model_state_dict

    if model.peft_config[adapter].is_prompt_learning:
        # The prompt encoder computes what is stored: no live name stands for it.
        return {}
    marks = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in live.items()}
    name_of = {id(mark): name for name, mark in marks.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        selected = get_peft_model_state_dict(
            model, state_dict=marks, adapter_name=adapter, save_embedding_layers=embeddings
        )
    return {stored: name_of[id(mark)] for stored, mark in selected.items() if id(mark) in name_of}
