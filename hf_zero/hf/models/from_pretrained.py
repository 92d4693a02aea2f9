"""`from_pretrained` at stage 3: the model is built on the meta device, and every rank reads its own slices.

transformers' own loader decides everything (names, conversions, types, what is missing). It is given stored tensors
that have not been read, and where it would put a tensor into the model, this rank's slice of it is placed instead. The
model comes out under an engine for inference. Trainer, accelerate or `initialize` replace that for training, with the
same flat parameters where their layout stays (engine/replace.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import build_glob_alternation
from transformers.modeling_utils import load_state_dict
from transformers.utils import logging as bars

from hf_zero import progress
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import CheckpointError, ConfigError
from hf_zero.hf.models.name_matching import Match, match_stored
from hf_zero.hf.models.shard_placer import ShardPlacer
from hf_zero.hf.models.stored import LazyTensor, StoredFile, StoredTensor, open_files
from hf_zero.hf.patching import replaced
from hf_zero.runtime.build import build_units
from hf_zero.runtime.memory_report import cast_line
from hf_zero.runtime.unit_specs import BuildSettings
from hf_zero.sharding.flat_param import FlatParam
from hf_zero.sharding.shard import placeholder
from hf_zero.sharding.unit import gather_resident

logger = logging.getLogger(__name__)

SETTER = "set_param_for_module"


@contextlib.contextmanager
def setting_by(function: Callable[..., None], **bar: Any) -> Iterator[None]:
    """Inside, where transformers' loader puts a tensor into a model it calls `function(original, model, name, ...)`.

    Args:
        bar: How its progress bar is drawn.
    """
    setter = functools.partial(function, getattr(core_model_loading, SETTER))
    drawn = functools.partial(bars.tqdm, **bar)
    with replaced(core_model_loading, SETTER, setter), replaced(core_model_loading, "tqdm", drawn):
        yield


@dataclass(frozen=True)
class LoadReport:
    """The account of what one rank did to load a model."""

    bytes_read: int  # from safetensors files
    bytes_stored: int  # in them, of all tensors
    seconds: float  # of reading


class ShardedLoad:
    """One `from_pretrained` under way. All ranks must make it and call `load`, then `finish`.

    Args:
        load_config: transformers' LoadStateDictConfig.
    """

    def __init__(self, model: PreTrainedModel, config: ResolvedConfig, load_config: Any) -> None:
        self._model = model
        self._config = config
        # A device_map that names the ranks' kind of device has transformers reserve memory for the full model.
        self._load_config = dataclasses.replace(load_config, device_map=None)
        self._files: list[StoredFile] = []
        self._params: dict[str, nn.Parameter] = {}  # live name -> ours, tied names alike
        self._comm = Comm.join(timeout_s=config.desync_timeout)
        self._refuse(load_config.device_map)

    def _refuse(self, places: Mapping[str, Any] | None) -> None:
        name = type(self._model).__name__
        if self._load_config.hf_quantizer is not None:
            raise ConfigError(
                f"{name} is quantized, and stage 3 cannot shard quantized parameters.\nUse stage 2, or load it "
                "unquantized."
            )
        if places is None:
            return
        if {torch.device(place).type for place in places.values()} != {self._comm.device.type}:
            raise ConfigError(
                f"{name} was asked for with device_map={places}, but at stage 3 every rank places its own shard of "
                "each parameter.\nRemove device_map."
            )
        if self._comm.rank == 0:
            logger.warning("device_map=%s has no effect: at stage 3 every rank places its own shards", dict(places))

    def load(self, original: Callable[..., Any], state_dict: Mapping[str, Any] | None, paths: list[str] | None) -> Any:
        """Stand in for `original`, PreTrainedModel._load_pretrained_model."""
        try:
            given = self._prepare(self._open(state_dict, paths))
            with self._placing():
                outcome = original(self._model, given, None, self._load_config)
            report = self.read()
        finally:
            for file in self._files:
                file.close()
        logger.info(
            "hf_zero: this rank read %.2f of %.2f GB of %s in %.2f s (%.2f GB/s)",
            report.bytes_read / 1e9,
            report.bytes_stored / 1e9,
            type(self._model).__name__,
            report.seconds,
            report.bytes_read / 1e9 / max(report.seconds, 1e-9),
        )
        return outcome

    def finish(self, original: Callable[..., Any], info: Any) -> Any:
        """Stand in for `original`, PreTrainedModel._finalize_model_loading; the model gets its engine."""
        outcome = original(self._model, self._load_config, info)
        self._take_initialised()
        self._make_engine()
        return outcome

    # ---------------------------------------------------------------- what is stored
    def _open(self, state_dict: Mapping[str, Any] | None, paths: list[str] | None) -> dict[str, Any]:
        """Stored name -> stored tensor, or a full one where it was given or is not in safetensors files.

        Raises:
            CheckpointError: On every rank, what is wrong with the files on any.
        """
        if state_dict is not None:
            return dict(state_dict)
        if not paths:
            raise ConfigError("Neither a state dict nor checkpoint files were found.")
        if not str(paths[0]).endswith(".safetensors"):
            loaded = [load_state_dict(path, weights_only=self._load_config.weights_only) for path in paths]
            return {name: tensor for one in loaded for name, tensor in one.items()}

        def opened() -> None:
            self._files.extend(open_files(paths))
            self._check_index()

        self._comm.agree("opening of weights", opened, CheckpointError)
        return {name: tensor for file in self._files for name, tensor in file.tensors.items()}

    def _check_index(self) -> None:
        index = self._load_config.sharded_metadata or {}
        known = {name for file in self._files for name in file.tensors}
        absent = sorted(set(index.get("weight_map", {})) - known)
        if absent:
            raise CheckpointError(
                f"the index of {self._load_config.pretrained_model_name_or_path} names {len(absent)} tensor(s) that "
                f"no file holds: {', '.join(absent[:8])}.\nThe files are of different saves, or one was overwritten."
            )

    # ---------------------------------------------------------------- units without values
    def _prepare(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Build the model's units; returns what transformers' loader is to be given for `stored`."""
        model = self._model
        live = model.state_dict()
        names = match_stored(model, stored, self._load_config.weight_mapping or [], live)
        given = self._without_equal_ties(stored, names)
        present = {names[key].name for key in given}
        _quietly_tie(model, set(live) - present)
        self._replace_parameters(present)
        settings = BuildSettings.of(self._config, train=False)
        params = {id(param): param for param in self._params.values()}.values()
        types = [param.dtype for param in params]
        self._built = build_units(model, settings, self._comm, FlatParam.initialize_with_zeros)
        line = cast_line(types, [param.dtype for param in params])
        if line is not None and self._comm.rank == 0:
            logger.warning("%s: %s", type(model).__name__, line)
        self._placer = ShardPlacer(self._built.units)
        is_lazy = {key: isinstance(given[key], StoredTensor) and names[key].pattern is None for key in given}
        return {key: LazyTensor(value) if is_lazy[key] else value for key, value in given.items()}

    def _without_equal_ties(self, stored: Mapping[str, Any], names: Mapping[str, Match]) -> dict[str, Any]:
        """Leave out what is stored twice for one tied parameter: transformers would compare placeholders."""
        key_of = {match.name: key for key, match in names.items() if match.pattern is None}
        tied = self._model.all_tied_weights_keys.items()
        pairs = [(key_of[name], key_of[other]) for name, other in tied if {name, other} <= key_of.keys()]
        rank, world_size = self._comm.rank, self._comm.world_size
        same = [slice_is_equal(stored[first], stored[second], rank, world_size) for first, second in pairs]
        if not pairs:
            return dict(stored)
        other = torch.tensor([float(not one) for one in same], dtype=torch.float64, device="cpu")
        others = self._comm.vote(other, "tied weights").tolist()
        twice = {pair[0] for pair, ranks in zip(pairs, others, strict=True) if ranks == 0}
        return {key: value for key, value in stored.items() if key not in twice}

    def _replace_parameters(self, present: set[str]) -> None:
        """Put parameters of the compute device into the model, with neither memory nor values."""
        made: dict[int, nn.Parameter] = {}
        dtype_of = dtype_rule(self._load_config)
        for module, name, live, param in _places(self._model):
            if not param.is_floating_point():
                continue
            if id(param) not in made:
                dtype = dtype_of(live, param.dtype) if live in present else param.dtype
                made[id(param)] = nn.Parameter(placeholder(param.shape, dtype, self._comm.device))
                made[id(made[id(param)])] = made[id(param)]
            self._params[live] = module._parameters[name] = made[id(param)]

    # ---------------------------------------------------------------- values
    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        """Inside, what transformers' loader puts into the model is placed into the shards."""
        # transformers' bar, which each rank would draw; True: never, None: on a terminal.
        bar = {"delay": progress.DELAY_S, "disable": None if self._comm.rank == 0 else True}
        asynchronous = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # its threads would read all experts ahead
        try:
            with setting_by(self._set, **bar):
                yield
        finally:
            if asynchronous is None:
                del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
            else:
                os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = asynchronous

    def _set(
        self, original: Callable[..., None], model: nn.Module, name: str, value: Any, info: Any, *others: Any
    ) -> None:
        param = self._params.get(name) if model is self._model else None
        if param is None:
            original(model, name, value.read() if isinstance(value, LazyTensor) else value, info, *others)
            return
        info.missing_keys.discard(name)
        if tuple(value.shape) != tuple(param.shape):
            info.mismatched_keys.add((name, value.shape, param.shape))
            return
        param._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark: do not initialise it
        with torch.no_grad():
            self._placer.place(param, value)

    def read(self) -> LoadReport:
        """Read this rank's slices. Raises CheckpointError on every rank."""

        def work() -> float:
            with torch.no_grad():
                return self._placer.read(show=self._comm.rank == 0)

        seconds = self._comm.agree("reading of weights", work, CheckpointError)
        stored = sum(tensor.nbytes for file in self._files for tensor in file.tensors.values())
        return LoadReport(sum(file.bytes_read for file in self._files), stored, seconds[self._comm.rank])

    # ---------------------------------------------------------------- what transformers initialised, and the engine
    def _take_initialised(self) -> None:
        """Move parameters that the files do not have, and transformers initialised, into their shards.

        All ranks must call; rank 0's values win, because ranks may have different seeds.
        """
        ours = {id(param): param for param in self._params.values()}
        taken: dict[int, nn.Parameter] = {}
        for module, name, live, param in _places(self._model):
            if id(param) in ours or live not in self._params:
                continue
            mine = taken.get(id(param))
            if mine is None:
                mine = taken[id(param)] = self._params[live]
                full = param.detach().to(self._comm.device)
                self._comm.broadcast(full, f"first values of {live}")
                with torch.no_grad():
                    self._placer.place(mine, full)
            module._parameters[name] = mine
        self._placer.read(show=False)

    def _make_engine(self) -> None:
        for flat in (flat for unit in self._built.units for flat in unit.flats):
            if flat.on_demand:
                flat.reshard()  # some initialisations replace a parameter's data
            gather_resident([flat])
        ZeroEngine(self._model, self._config, built=self._built, train=False)


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Parameter]]:
    """(module, name in it, name in the model, parameter) of every place; one that is tied has several."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in list(module._parameters.items()):
            if param is not None:
                yield module, name, f"{path}.{name}" if path else name, param


def _quietly_tie(model: PreTrainedModel, missing: set[str]) -> None:
    """Tie on the meta device what transformers will tie after loading, so that it is sharded once."""
    log = logging.getLogger("transformers.modeling_utils")
    before, tied = log.level, model.all_tied_weights_keys
    log.setLevel(logging.ERROR)  # what there is to warn of comes again with the real tying
    # Two that are stored with different values stay apart: there are no values here to compare.
    model.all_tied_weights_keys = {name: other for name, other in tied.items() if missing & {name, other}}
    try:
        model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
    finally:
        log.setLevel(before)
        model.all_tied_weights_keys = tied


def dtype_rule(load_config: Any) -> Callable[[str, torch.dtype], torch.dtype]:
    """The type that transformers' loader gives to a stored parameter of a live name and a type on meta."""
    plan = load_config.dtype_plan or {}
    if not plan:
        return lambda name, dtype: dtype
    pattern, by_group, _ = build_glob_alternation(list(plan))

    def rule(name: str, dtype: torch.dtype) -> torch.dtype:
        found = pattern.search(name)
        chosen: torch.dtype = dtype if found is None else plan[by_group[found.lastgroup]]
        return chosen

    return rule


def slice_is_equal(first: Any, second: Any, rank: int, world_size: int) -> bool:
    """Whether two tensors, stored or full, have one shape and type, and are equal in this rank's share of elements."""
    if tuple(first.shape) != tuple(second.shape) or first.dtype != second.dtype:
        return False
    numel = int(torch.Size(first.shape).numel())
    low, high = numel * rank // world_size, numel * (rank + 1) // world_size
    step = 1 << 20
    for at in range(low, high, step):
        count = min(step, high - at)
        if not torch.equal(_elements(first, at, count), _elements(second, at, count)):
            return False
    return True


def _elements(value: Any, start: int, numel: int) -> torch.Tensor:
    if isinstance(value, StoredTensor):
        out = torch.empty(numel, dtype=value.dtype)
        value.read_range(start, out)
        return out
    flat: torch.Tensor = value.reshape(-1)
    return flat[start : start + numel]
