"""`hf_zero.pipeline.from_transformers`: a PipelineModule of a causal language model.

Of a path every rank reads the tensors of its own stage only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_zero.checkpoint.format import ORIGINAL_NAMES
from hf_zero.distributed.processes import agree, all_ranks_give, join_processes, wrong_on_all
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.extras.pipeline.decoder_parts import Anatomy, DecoderLayer, Embeddings, Head, LayerCalls
from hf_zero.extras.pipeline.module import PipelineModule
from hf_zero.extras.pipeline.topology import ProcessTopology
from hf_zero.hf.models.from_pretrained import LoadReport, dtype_rule, setting_by, slice_is_equal
from hf_zero.hf.models.name_matching import match_stored
from hf_zero.hf.models.stored import LazyTensor, StoredFile, open_files
from hf_zero.hf.patching import replaced


def from_transformers(
    model_or_path: PreTrainedModel | str | os.PathLike[str],
    num_stages: int | None = None,
    *,
    topology: ProcessTopology | None = None,
    loss_fn: Callable[..., Any] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> TransformersPipeline:
    """A PipelineModule of a decoder-only causal language model: embeddings, each decoder layer, the head.

    Its inputs are token ids; or (ids, attention mask, position ids), or a mapping with "input_ids", "attention_mask",
    "position_ids". It gives logits. A model is taken apart and shares its parameters with the pipeline. Given
    a path, each rank reads only the tensors of its own stage, when the stages are known. All ranks must call.

    Args:
        num_stages: The number of stages, as for PipelineModule.
        topology: The place of each rank, as for PipelineModule.
        loss_fn: None means the model's own: of labels (batch, tokens), shifted inside, with -100 for none.
        model_kwargs: For AutoModelForCausalLM.from_pretrained: dtype, revision, attn_implementation, ...
        options: For PipelineModule: partition_method, virtual_stages, seed_layers, ... Layers go by the names of the
            model's classes, as in partition_method="type:LlamaDecoderLayer".
    Raises:
        ConfigError: The model cannot be split; says why.
        CheckpointError: The files lack a tensor, or are damaged.
    """
    source: _StoredWeights | None = None
    if isinstance(model_or_path, PreTrainedModel):
        model = model_or_path
    elif isinstance(model_or_path, nn.Module):
        raise ConfigError(f"from_transformers: {type(model_or_path).__name__} is no model of transformers, nor a path")
    else:
        source = _StoredWeights(os.fspath(model_or_path), is_alone=options.get("stage") is not None)
        with wrong_on_all("from_transformers"):
            model = source.model_without_weights(dict(model_kwargs or {}))
    try:
        with wrong_on_all("from_transformers"):
            anatomy = Anatomy(model)
            calls = LayerCalls(anatomy)
            if loss_fn is None and model.loss_function is not ForCausalLMLoss:
                raise anatomy.refused("its loss is not that of the next token (or give from_transformers a loss_fn)")
        return TransformersPipeline(anatomy, calls, source, num_stages, topology=topology, loss_fn=loss_fn, **options)
    except BaseException:
        if source is not None:
            source.close()
        raise


class TransformersPipeline(PipelineModule):
    """See from_transformers.

    `hf_names`: of every parameter and saved buffer of all layers, the model's own name:
    "5.layer.mlp.up_proj.weight" -> "model.layers.4.mlp.up_proj.weight".
    `load_report`: what this rank read of the files, after it was built; None where a model was given.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        calls: LayerCalls,
        source: _StoredWeights | None,
        num_stages: int | None,
        *,
        topology: ProcessTopology | None,
        loss_fn: Callable[..., Any] | None,
        **options: Any,
    ) -> None:
        layers: list[nn.Module] = [DecoderLayer(anatomy, index, calls) for index in range(len(anatomy.layers))]
        layers = [Embeddings(anatomy), *layers, Head(anatomy)]
        if loss_fn is None:
            loss_fn = functools.partial(_causal_loss, vocab_size=anatomy.model.config.get_text_config().vocab_size)
        super().__init__(layers, loss_fn=loss_fn, **{name: one for name, one in options.items() if name != "stage"})
        self.config = anatomy.model.config
        self.hf_names = _names(layers, anatomy.layers_path)
        self.load_report: LoadReport | None = None
        self._source = [source]
        if num_stages is not None or topology is not None:
            self.build(num_stages, topology=topology, stage=options.get("stage"))

    def build(self, num_stages: int | None = None, *, stage: int | None = None, **options: Any) -> None:
        """See PipelineModule.build. Reads this stage's weights."""
        super().build(num_stages, stage=stage, **options)
        source = self._source[0]
        if source is None:
            return

        def read() -> None:
            try:
                self.load_report = source.read_into(self, self.hf_names)
            finally:
                source.close()
                self._source = [None]

        agree("loading layers", read, CheckpointError, is_alone=stage is not None)

    def description(self) -> dict[str, bytes]:
        """See PipelineModule.description: the model's configuration, and its names for `hf-zero consolidate`."""
        with tempfile.TemporaryDirectory() as folder:
            self.config.save_pretrained(folder)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}
        return {**files, ORIGINAL_NAMES: f"{json.dumps(self.hf_names, indent=1)}\n".encode()}


def _causal_loss(logits: torch.Tensor, labels: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    loss: torch.Tensor = ForCausalLMLoss(logits, labels, vocab_size=vocab_size)
    return loss


def _names(layers: list[nn.Module], layers_path: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for index, layer in enumerate(layers):
        kept = [name for name, _ in layer.named_parameters(remove_duplicate=False)]
        kept += [name for name in layer.state_dict() if name not in kept]
        for name in kept:
            inside = name.removeprefix("layer.")
            is_decoder = isinstance(layer, DecoderLayer)
            names[f"{index}.{name}"] = f"{layers_path}.{index - 1}.{inside}" if is_decoder else name
    return names


class _StoredWeights:
    """The safetensors files of a model, of which each rank reads some tensors.

    Args:
        is_alone: There are no other ranks to agree with.
    """

    def __init__(self, path: str, *, is_alone: bool) -> None:
        self._path = path
        self._files: list[StoredFile] = []
        self._tensors: dict[str, LazyTensor] = {}  # by the model's own names
        world_size = join_processes()
        self._is_alone = is_alone or world_size == 1
        self._rank, self._world_size = (0, 1) if self._is_alone else (dist.get_rank(), world_size)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def model_without_weights(self, kwargs: dict[str, Any]) -> PreTrainedModel:
        """The model on the meta device, but for buffers and what the files do not have. All ranks must call."""
        original = PreTrainedModel._load_pretrained_model
        load = functools.partial(self._load, original)
        with replaced(PreTrainedModel, "_load_pretrained_model", staticmethod(load)):
            model = AutoModelForCausalLM.from_pretrained(self._path, **kwargs)
        return model

    def _load(
        self, original: Callable[..., Any], model: Any, state_dict: Any, files: Any, load_config: Any, *_: Any
    ) -> Any:
        """Replaces PreTrainedModel._load_pretrained_model: it only remembers where tensors lie."""
        name = type(model).__name__
        if load_config.hf_quantizer is not None:
            raise ConfigError(f"from_transformers: {name} is quantized, and a pipeline trains full weights only")
        if not files or not str(files[0]).endswith(".safetensors"):
            raise ConfigError(
                f"from_transformers: {self._path} has no safetensors files, of which single tensors can be read: load "
                "the model and save it by save_pretrained, or give the model instead of the path"
            )
        self._open(files)
        stored = {key: tensor for file in self._files for key, tensor in file.tensors.items()}
        names = match_stored(model, stored, load_config.weight_mapping or [], model.state_dict())
        if converted := [key for key, match in names.items() if match.pattern is not None]:
            raise ConfigError(
                f"from_transformers: {name} computes with {converted[0]} and {len(converted) - 1} more in another "
                "form than they are stored in: load the model and give it instead of the path"
            )
        twice = self._stored_twice(model, stored, {match.name: key for key, match in names.items()})
        given = {key: LazyTensor(tensor) for key, tensor in stored.items() if key not in twice}
        remember = functools.partial(self._remember, dtype_rule(load_config))
        with setting_by(remember, disable=True):  # nothing is read
            return original(model, given, None, dataclasses.replace(load_config, device_map=None))

    def _open(self, files: Sequence[str]) -> None:
        def open_all() -> None:
            self._files = open_files(files)

        agree("opening weight files", open_all, CheckpointError, is_alone=self._is_alone)

    def _stored_twice(self, model: Any, stored: Mapping[str, Any], key_of: Mapping[str, str]) -> set[str]:
        """Stored names of tied parameters whose other name is stored too, with equal values."""
        tied = model.all_tied_weights_keys.items()
        pairs = [(key_of[name], key_of[other]) for name, other in tied if {name, other} <= key_of.keys()]
        mine = [slice_is_equal(stored[one], stored[two], self._rank, self._world_size) for one, two in pairs]
        votes = [mine] if self._is_alone else all_ranks_give(mine, "tied weights")
        return {pair[0] for pair, *equal in zip(pairs, *votes, strict=True) if all(equal)}

    def _remember(
        self,
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
        original: Callable[..., None],
        model: nn.Module,
        name: str,
        value: Any,
        info: Any,
        *others: Any,
    ) -> None:
        """Replaces the function that puts a tensor into the model: a parameter stays on the meta device."""
        place = dict(model.named_parameters(remove_duplicate=False)).get(name)
        if place is None or tuple(place.shape) != tuple(value.shape):
            original(model, name, value.read(), info, *others)
            return
        info.missing_keys.discard(name)
        self._tensors[name] = value.to(dtype=dtype_of(name, place.dtype))
        place._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: do not initialise it

    def read_into(self, module: PipelineModule, names: Mapping[str, str]) -> LoadReport:
        """Give the module's parameters their values, and types.

        Args:
            names: The module's names -> the model's.
        Raises:
            CheckpointError: A tensor is not in the files, or they cannot be read.
        """
        began = time.monotonic()
        before = sum(file.bytes_read for file in self._files)
        by_canonical = {module.canonical_names[name]: stored for name, stored in self._by_name(module, names)}
        made: dict[int, nn.Parameter] = {}
        for path, place in module.named_modules(remove_duplicate=False):
            for name, param in list(place._parameters.items()):
                if param is None or not param.is_meta:
                    continue
                if id(param) not in made:
                    canonical = module.canonical_names[f"{path}.{name}"]
                    if canonical not in by_canonical:
                        raise CheckpointError(f"{self._path} has no tensor {names[canonical]}")
                    value = by_canonical[canonical].read()
                    made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
                place._parameters[name] = made[id(param)]
        read = sum(file.bytes_read for file in self._files) - before
        stored = sum(tensor.nbytes for file in self._files for tensor in file.tensors.values())
        return LoadReport(read, stored, time.monotonic() - began)

    def _by_name(self, module: PipelineModule, names: Mapping[str, str]) -> Iterator[tuple[str, LazyTensor]]:
        for name in module.canonical_names:
            if stored := self._tensors.get(names[name]):
                yield name, stored
