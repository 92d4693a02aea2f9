"""Saves sharded models into Hugging Face weight folders, and pushes them: full weights, from all ranks together."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_zero.engine.deepspeed_names import consolidated_weights
from hf_zero.engine.engine import ZeroEngine
from hf_zero.hf.local_files import on_all_ranks, writing
from hf_zero.hf.models.peft import (
    adapter_names,
    is_peft_model,
    live_state,
    unsharded_prompt_encoders,
)
from hf_zero.hf.models.shard_files import WrittenFiles, publish, shard_files
from hf_zero.hf.patching import by_name, replace_method
from hf_zero.runtime.full_weights import own_tensors
from hf_zero.sharding.param_data import with_own_storage


def full_weights(
    model: nn.Module, engine: ZeroEngine, *, keep: bool, embeddings: bool | str = "auto"
) -> dict[str, torch.Tensor]:
    """Return what `model.save_pretrained` needs: the full state dict, or a PEFT model's adapters.

    All ranks must call where the model is sharded.

    Args:
        model: The engine's model, or a module inside it.
        embeddings: `save_embedding_layers` of PEFT's save_pretrained.
    Returns:
        Full tensors where `keep` is true (on the CPU if the model is sharded), nothing elsewhere.
    """
    if not engine.is_sharded:
        return apart(live_state(model)) if keep else {}
    if not is_peft_model(model):
        return _gathered(model, engine, keep)
    live = live_state(model)
    # Whether embeddings belong to the adapter may depend on files that are not on every rank.
    found = adapter_names(model, live, embeddings) if engine.rank == 0 else set()
    wanted: set[str] = engine.comm.all_gather_object(found, "names of adapter weights")[0]
    trainable = {name for name, tensor in live.items() if isinstance(tensor, nn.Parameter) and tensor.requires_grad}
    state = _gathered(model, engine, keep, trainable_only=wanted <= trainable)
    return {name: tensor for name, tensor in state.items() if name in wanted}


def _gathered(
    model: nn.Module, engine: ZeroEngine, keep: bool, *, trainable_only: bool = False
) -> dict[str, torch.Tensor]:
    """Return ZeroEngine.full_state_dict of `model`, of which only its own units are gathered. All ranks must call."""
    if model is engine.module:
        return engine.full_state_dict(keep, trainable_only=trainable_only)
    names = {id(tensor): name for name, tensor in own_tensors(engine.module)}
    own = {name: names[id(tensor)] for name, tensor in own_tensors(model)}
    keeps = engine.comm.all_gather_object(keep, "who keeps weights")
    full = engine.weights_for_ranks([set(own.values()) if theirs else set() for theirs in keeps])
    return {name: full[name_in_engine] for name, name_in_engine in own.items()} if keep else {}


def apart(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with a storage each: of the same memory where the device can, and names of one still share it."""
    plain = {name: tensor.detach() for name, tensor in state.items()}
    own = {name: with_own_storage(tensor) for name, tensor in plain.items()}
    return {name: plain[name].clone() if tensor is None else tensor for name, tensor in own.items()}


@contextlib.contextmanager
def weights_to_save(model: Any, engine: ZeroEngine, folder: str, *, writes: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the state dict for `model.save_pretrained(folder, ...)` where `writes` is true. All ranks must enter.

    Several files have been written by all ranks then, where they can; else these are full weights.
    """
    original = getattr(type(model), "save_pretrained", None)
    if original is None or "save_pretrained" not in model.__dict__:  # not ours
        yield full_weights(model, engine, keep=writes)
        return
    with shard_files(model, engine, original.__get__(model), {"save_directory": folder}, writes) as written:
        yield full_weights(model, engine, keep=writes) if written is None else written


# The model that one rank saves alone, and its full state dict or the files that hold it.
_of_this_save: weakref.WeakKeyDictionary[ZeroEngine, tuple[nn.Module, dict[str, torch.Tensor]]]
_of_this_save = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def saving_alone(
    engine: ZeroEngine, weights: dict[str, torch.Tensor], model: nn.Module | None = None
) -> Iterator[None]:
    """Let this rank save the model alone inside, in whatever way: it finds `weights`, from `weights_to_save`.

    Libraries have models, and methods of Trainer, that save parameter by parameter, module by module.

    Args:
        model: The module inside the engine's model that is saved; by default the model.
    """
    model = engine.module if model is None else model
    _of_this_save[engine] = model, weights
    full = {} if isinstance(weights, WrittenFiles) else weights
    try:
        with engine.weights.saving_from(full, model):
            yield
    finally:
        del _of_this_save[engine]


def install_save_pretrained(model: nn.Module, engine: ZeroEngine) -> None:
    """Let `save_pretrained` and `push_to_hub`, called on all ranks, write full weights on one; until the teardown.

    Every module inside `model` that has them is saved so too, with its own weights.
    """
    for module in model.modules():
        # A wrapper hands on what it lacks: the module inside it has the method then.
        owner: Any = module if module is model else type(module)
        if getattr(owner, "save_pretrained", None) is None or "save_pretrained" in module.__dict__:
            continue
        saving = _Saving(module, engine)
        replace_method(module, "save_pretrained", engine, saving.save_pretrained)
        if getattr(owner, "push_to_hub", None) is not None:
            replace_method(module, "push_to_hub", engine, saving.push_to_hub)


class _Saving:
    """Stands in for the model's own methods, which come as `original`."""

    def __init__(self, model: Any, engine: ZeroEngine) -> None:
        self._model = model
        self._engine = engine

    def save_pretrained(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All ranks must call, but inside `saving_alone` and `gathered_params`: there who calls writes the files.

        Several files are written by all ranks where they can; else rank 0 gathers and writes. [Note: Which save]
        """
        engine = self._engine
        if engine.weights.are_shown(self._model):
            return original(*args, **kwargs)
        call = inspect.signature(original).bind(*args, **kwargs)
        given = by_name(call)
        weights = given.get("state_dict")
        if weights is None and engine in _of_this_save:
            saved, weights = _of_this_save[engine]
            if saved is not self._model:
                return original(*args, **kwargs)  # it is a part, or wraps one: its parameters are full here
        elif weights is None and self._model is engine.module:
            held = consolidated_weights(engine)  # with these, programs for DeepSpeed save on rank 0 alone
            if held is not None:
                with saving_alone(engine, held):
                    return self._save(original, call, held)
        if isinstance(weights, WrittenFiles):
            return publish(original, given, weights)
        if weights is not None:
            return self._save(original, call, weights)
        if "state_dict" in given and not given.get("is_main_process", True):
            return None  # the rank that writes has brought them: accelerate's get_state_dict gives None elsewhere
        engine.require_all_ranks("save_pretrained")
        writes = bool(given.get("is_main_process", engine.rank == 0))
        with shard_files(self._model, engine, original, given, writes) as written:
            embeddings = given.get("save_embedding_layers", "auto")
            weights = written or full_weights(self._model, engine, keep=writes, embeddings=embeddings)

            def write() -> Any:
                if not writes:
                    return None
                if written is not None:
                    return publish(original, given, written)
                with saving_alone(engine, weights, self._model):
                    return self._save(original, call, weights)

            folder = next(iter(given.values()), None)
            with unsharded_prompt_encoders(self._model):
                return on_all_ranks(engine.comm, writing(folder), write)

    def _save(self, original: Callable[..., Any], call: inspect.BoundArguments, weights: Any) -> Any:
        """Save with `weights` where the model takes a state dict; else its parameters have them."""
        parameters = call.signature.parameters
        rest = next((name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD), None)
        if "state_dict" in parameters:
            call.arguments["state_dict"] = weights
        elif rest is not None and (isinstance(self._model, PreTrainedModel) or is_peft_model(self._model)):
            # Other models may hand their arguments on to a part of them, whose weights have other names.
            call.arguments[rest] = {**call.arguments.get(rest, {}), "state_dict": weights}
        return original(*call.args, **call.kwargs)

    def push_to_hub(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All ranks must call. The first one pushes, and returns what the model's own method does; others None.

        They do not wait for it, but for prompt encoders: an upload may take longer than any collective.
        Inside `gathered_params` who calls pushes.
        """
        engine = self._engine
        if engine.weights.are_shown(self._model):
            return original(*args, **kwargs)
        engine.require_all_ranks("push_to_hub")
        weights = full_weights(self._model, engine, keep=engine.rank == 0)
        with unsharded_prompt_encoders(self._model):
            if engine.rank != 0:
                return None
            with saving_alone(engine, weights, self._model):
                return original(*args, **kwargs)
