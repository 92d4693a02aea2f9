"""The engine of one model: the step loop, and the parts that it owns.

It works in place: the model object keeps its class, its attributes and its Parameter objects; hooks and placeholders
do the rest. It owns no tensors and does not ask for the stage.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_zero.checkpoint.load import ALL_PARTS, Parts
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.checkpointing import Checkpointing
from hf_zero.engine.deepcopy import deepcopy_of
from hf_zero.engine.deepspeed_names import DeepSpeedNames
from hf_zero.engine.joining import Joining
from hf_zero.engine.offloaded_states import OffloadedStates, kinds_of
from hf_zero.engine.parts import parts_of
from hf_zero.engine.reports import Reports
from hf_zero.engine.same_config import refuse_other_configurations
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.optim.loss_scaler import StepGuard
from hf_zero.optim.offload.host_adam import HostAdamSettings
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.build import BuiltUnits, build_units, share_the_rest
from hf_zero.runtime.captured_graphs import REMEDY, recording_problem
from hf_zero.runtime.full_weights import FullWeights, own_tensors
from hf_zero.runtime.hooks import ComputeTypes, ModelAttachment, ModelContext
from hf_zero.runtime.memory_report import allocation_counts, announce_engine, memory_report
from hf_zero.runtime.unit_specs import BuildSettings, torch_dtype
from hf_zero.sharding.model_params import check_parameters, clean_name
from hf_zero.sharding.unit import ShardUnit, UnitState

logger = logging.getLogger(__name__)

_KEY = "_hf_zero_engine"
_CHILD = "module."
_LIVE: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()  # engines whose model is still there


class ZeroEngine(DeepSpeedNames):
    """ZeRO for one model over one process group.

    What the engine is asked to set about the model as its nn.Module (weights, types, places) goes through the shards
    or raises: nothing is changed beside them. A method that says nothing of ranks may be called on any one.

    Args:
        model: Built alike on all ranks, not sharded; rank 0's values win. Changed in place.
        config: Resolved; see ZeroConfig.resolve.
        managed: Trainer or Accelerate accumulates, scales the loss for that, and clips: the engine does neither.
        groups: The world's ranks, split into those that share a model; None means that all do.
        device: Where parameters live and compute; None takes the accelerator of this process, or the CPU.
        built: Units of this model that were made already (see replace.py); None makes them from the parameters.
        train: False keeps neither masters nor gradients: the model runs, and `replace_engines` makes it trainable.
    All ranks of the world must construct it.
    Raises ConfigError, StateError (the model has an engine), DivergenceError.
    """

    reports_class = Reports

    def __init__(
        self,
        model: nn.Module,
        config: ResolvedConfig,
        *,
        managed: bool = False,
        groups: Sequence[Sequence[int]] | None = None,
        device: torch.device | None = None,
        built: BuiltUnits | None = None,
        train: bool = True,
    ) -> None:
        if engine_of(model) is not None:
            raise StateError("this model already has a hf_zero engine; call engine.teardown() before making another")
        check_parameters(model, sharded=config.shards_parameters)  # before there is a process group to leave half made
        super().__init__(model)
        self.config = config
        self.managed = managed
        self.trains = train
        self.comm = Comm.join(device, groups=groups, timeout_s=config.desync_timeout) if built is None else built.comm
        refuse_other_configurations(self.comm, config)
        self.parts = parts_of(self)
        if built is None:
            built = build_units(model, BuildSettings.of(config, train=train), self.comm)
        share_the_rest(model, built.units, self.comm)
        self.placements, self.units, self.pool = built.placements, built.units, built.pool
        self.loss_scale = built.loss_scale
        self.schedule = StepSchedule(
            built,
            config,
            1 if managed else config.gradient_accumulation_steps,
            trains=train,
        )
        if not managed and not config.managed_gradient_accumulation:
            self.schedule.update_at_every_step()
        self.params, self.reducer = self.schedule.params, self.schedule.reducer
        self.weights = FullWeights(model, self.units, self.params, self.comm, before_write=self.finish_updates)
        self.checkpoints = self._open_checkpoints(built)
        self._states: OffloadedStates | None = None  # while some are on the host
        self._uninstalls: list[Callable[[], None]] = []
        self.reports = self.reports_class([watcher for part in self.parts for watcher in part.start()])
        self.on_uninstall(self.reports.close)
        self._attachment = self._attach()
        if self.run_comm.rank == 0:
            announce_engine(config, self.comm, self.units, self.reducer, trains=train)

    def _open_checkpoints(self, built: BuiltUnits) -> Checkpointing:
        return Checkpointing(self.module, built, self.schedule, self.config, self._check_saved)

    def _attach(self) -> ModelAttachment:
        """Put the engine on its model."""
        types = ComputeTypes(
            torch_dtype(self.config.dtype), torch_dtype(self.config.precision.autocast), self.loss_scale
        )
        grads, param_grads = self.reducer.accumulators, self.schedule.param_grads
        context = ModelContext(self.module, self.units, self.params, grads, param_grads, self.device, self.rank, types)

        def deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
            return deepcopy_of(self, module, memo, type(self))

        _LIVE.add(self)
        # A function, which copy.deepcopy of the model does not copy: of a bound method it would copy the schedule.
        attributes = {
            _KEY: self,
            "no_sync": lambda: self.schedule.no_sync(),
            "join_hook": lambda **settings: Joining(self, **settings),  # torch's Join calls it
        }
        attachment = ModelAttachment(context, self.reports.around(self.schedule), deepcopy, attributes)
        self.schedule.attachment = attachment
        self.on_uninstall(self.reports.watch_forward(self.module))
        for part in self.parts:
            part.attach()
        return attachment

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are placeholders between uses."""
        return any(unit.on_demand for unit in self.units)

    @property
    def _join_config(self) -> Any:
        """The settings of torch's Join, which sets them on the engine or on the model."""
        return self.module.__dict__["_join_config"]

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self.module.__dict__["_join_config"] = config

    @property
    def run_comm(self) -> Comm:
        """The group of all ranks of the run, the first of which logs: those that share the model, or more."""
        return self.comm

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    @property
    def device(self) -> torch.device:
        return self.comm.device

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        return self.schedule.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: ShardedOptimizer | None) -> None:
        self.schedule.optimizer = optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step` steps after the optimizer; None for no schedule, or one that others step."""
        return self.schedule.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, lr_scheduler: Any) -> None:
        self.schedule.lr_scheduler = lr_scheduler

    @property
    def accumulation_steps(self) -> int:
        """The number of micro-batches of an update."""
        return self.schedule.accumulation_steps

    @property
    def global_steps(self) -> int:
        """The number of optimizer steps so far, including steps skipped on an fp16 overflow."""
        return self.schedule.global_steps

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because their gradient was not finite; `global_steps` counts them too."""
        return self.schedule.skipped_steps

    def require_all_ranks(self, name: str) -> None:
        """Raise StateError, within seconds, unless every rank calls this with the same name."""
        self._check_live(name)
        self.comm.require_all_ranks(name)

    def _check_live(self, call: str) -> None:
        if self not in _LIVE:
            why = "this engine was torn down, or another engine has taken over its model"
            raise StateError(
                f"rank {self.comm.run_rank}: {call}: {why}; use what the last hf_zero.initialize returned"
            )

    # ---------------------------------------------------------------- training
    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True, **kwargs: Any) -> torch.Tensor:
        """`loss.backward(**kwargs)`, scaled for fp16; gradients are means over ranks and accumulation either way.

        All ranks must call, equally often: a loss without samples is a zero that the model's outputs take part in.

        Args:
            scale_wrt_gas: False: the caller has divided the loss by the accumulation steps already.
        Returns:
            The loss divided by the accumulation steps: the sum over an accumulation window is the window's mean.
        """
        whole = loss if scale_wrt_gas else loss * self.accumulation_steps
        self.reports.loss(whole)
        with self.loss_scale.scaled(whole) as scaled, self.reports.backward():
            scaled.backward(**kwargs)
        return loss / self.accumulation_steps if scale_wrt_gas else loss

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Skip the gradient reduction inside the block, at stages 0 and 1. Stages 2 and 3 reduce anyway.

        No step updates there: one that ends the window by the count of micro-batches raises StateError.
        """
        return self.schedule.no_sync()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary update the parameters and step the scheduler. All ranks must call.

        `lr_kwargs` are given to the scheduler's step.
        """
        self._check_live("engine.step")
        self.reports.step_starts()
        boundary = self.schedule.step(lr_kwargs or {})
        self.reports.step_ends(boundary=boundary)
        if boundary:
            self.checkpoints.after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this accumulation window. All ranks must call. `step` does so by itself."""
        self.schedule.zero_grad()

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> ShardedOptimizer:
        """Point the param groups of `optimizer` at this rank's master shards, in place.

        Raises ConfigError for an optimizer that cannot be right on shards, StateError for an engine without masters.
        """
        if not self.trains:
            raise StateError(
                "this model is held for inference only: give hf_zero.initialize the optimizer, or prepare both"
            )
        if self.optimizer is not None:  # another Trainer on the same model: the state starts anew, as with torch
            self.finish_updates()
            self.reload_states()
            self.optimizer.close()
        clip = 0.0 if self.managed else self.config.gradient_clipping
        untested = "zero_allow_untested_optimizer"
        is_tried = self.config.is_changed(untested) and not self.config.is_written(untested)
        self.optimizer = ShardedOptimizer(
            optimizer,
            self.schedule.param_grads,
            self.reducer,
            self.comm,
            self.params,
            clip=clip,
            allow_untested=None if is_tried else self.config.zero_allow_untested_optimizer,
            offload=HostAdamSettings.of(self.config, self.placements.host, clips=clip > 0),
            guard=StepGuard(self.config.precision, self.config.stage, self.loss_scale),
            after_step=self.schedule.end_step,
        )
        return self.optimizer

    def offload_states(
        self,
        include: Iterable[object] | None = None,
        device: object = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training states from the device to the host until `reload_states`. All ranks must call, alike.

        Until then the model still runs and generates (unless "lp_params" are away), and `memory_report()` counts what
        moved as "host". A backward, a step, a checkpoint and the optimizer's state raise StateError. Parameters that
        are not sharded between uses stay on the device, and so do masters that share their memory (fp32 at stages
        0-2). Where the host computes, states are there already, and nothing moves.

        Args:
            include: Of "optim_states", "hp_params" (master weights), "lp_params" (parameter shards of stage 3),
                "lp_grads" and "contiguous_grad_buffer" (gradients), as texts or DeepSpeed's enum; None is all of them.
            device: "cpu".
            pin_memory: Copies are faster to and from pinned memory; pinning itself takes time.
            non_blocking: Has no effect: the call returns when the device's memory is free.
        Raises:
            ConfigError: A name of `include`, or `device`, is unknown.
            StateError: There is no optimizer; masters and moments have 8 and 16 bits (msamp O2 and O3).
        """
        kinds = kinds_of(include)
        if str(getattr(device, "value", device)) != "cpu":
            raise ConfigError(f'offload_states(device={device!r}): expected "cpu", the only place states can move to')
        if self.optimizer is None:
            raise StateError("offload_states: this engine has no optimizer, so it has no states")
        self.run_comm.note_call(f"offload_states({', '.join(kinds)})")
        self.finish_updates()
        if self.comm.computes_on_host:
            logger.info("offload_states: the host computes, so states are there already")
            return
        self.params.reshard_all()
        with self.comm.stop_together():
            if self._states is None:
                self._states = OffloadedStates(
                    self.units, self.reducer, self.optimizer, self.placements, pin=pin_memory
                )
            self._states.offload(kinds)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved; nothing where nothing is away. Any rank may call.

        Args:
            non_blocking: Has no effect: the call returns when all is there.
        """
        if self._states is not None:
            self._states.reload()
            self._states = None

    def finish_updates(self) -> None:
        """Wait for offloaded updates that run beside the training, delayed ones too. All ranks must call."""
        self.schedule.finish_updates()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the mean gradient to `max_norm`; return its norm before. All ranks must call.

        0-dim, on the compute device: fp64 on the CPU, and fp32 on others, as torch's own of fp32 gradients is.
        """
        if self.optimizer is None:
            raise StateError("clip_grad_norm_ needs an optimizer: hf_zero.initialize or engine.attach_optimizer")
        norm = self.optimizer.clip_grad_norm(float(max_norm))
        dtype = torch.float64 if self.comm.computes_on_host else torch.float32  # not every device has fp64
        return torch.full((), norm, dtype=dtype, device=self.device)  # torch.tensor waits for the device

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's mean gradient before clipping; None before the first step.

        A step that is skipped on an fp16 overflow keeps the norm before it, as in DeepSpeed.
        """
        return None if self.optimizer is None else self.optimizer.last_norm

    # ---------------------------------------------------------------- weights
    def full_state_dict(self, keep: bool, *, trainable_only: bool = False) -> dict[str, torch.Tensor]:
        """Return unsharded weights on the CPU under the model's state_dict names, where `keep`; {} elsewhere.

        All ranks must call. Tied names share one tensor; persistent buffers are included. Peak extra memory: one unit.
        """
        self.require_all_ranks("full_state_dict")
        self._check_model()
        self.finish_updates()
        return self.weights.state_dict(keep, trainable_only=trainable_only)

    def weights_for_ranks(self, wanted: Sequence[Set[str]]) -> dict[str, torch.Tensor]:
        """Return unsharded weights on the CPU that are named in `wanted[rank]`; {} on ranks behind its end.

        All ranks must call, with the same names. Buffers are those of rank 0. Peak extra memory: one unit.
        """
        self._check_model()
        self.finish_updates()
        return self.weights.for_ranks(wanted)

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take weights from a mapping of full tensors; masters start from these values. All ranks must call, alike."""
        self.run_comm.note_call("load_full_state_dict")
        self.finish_updates()
        self.weights.load_state_dict(state, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set weights and buffers from full tensors, the same on every rank, master weights too. All ranks must call.

        Args:
            state_dict: Names with "module." in front, as `state_dict()` has them, or the model's own.
            assign: Ignored: the parameters stay where they are.
        Returns:
            (missing_keys, unexpected_keys), both empty where `strict`.
        Raises:
            CheckpointError: With `strict`, names that do not fit; other shapes.
        """
        self.require_all_ranks("load_state_dict")
        own = {name for name, _ in own_tensors(self.module)}
        foreign = all(name.startswith(_CHILD) for name in state_dict) and not own & state_dict.keys()
        given = {name.removeprefix(_CHILD) if foreign else name: value for name, value in state_dict.items()}
        self.load_full_state_dict(given, strict=strict)
        names = {clean_name(name) for name in given}
        return _IncompatibleKeys([] if strict else sorted(own - names), [] if strict else sorted(names - own))

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Compile the model's forward in place, as `model.compile` does, with all arguments together.

        Raises:
            ConfigError: The mode records CUDA graphs, which stage 3 does not go with.
        """
        given = {**({} if backend is None else {"backend": backend}), **(compile_kwargs or {}), **kwargs}
        if text := recording_problem(given.get("mode"), shards_parameters=self.config.shards_parameters):
            raise ConfigError(f"{text}\n{REMEDY}")
        super().compile(**given)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ZeroEngine:
        """Accept `.to`, `.half`, `.float`, `.cuda` and the like where no parameter changes by them."""
        probed: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        for name, param in ((name, param) for unit in self.units for name, param in _named_params(unit)):
            kind = (param.dtype, param.device)
            if kind not in probed:
                probed[kind] = fn(torch.empty(1, dtype=param.dtype, device=param.device))
            moved = probed[kind]
            if (moved.dtype, moved.device) != kind:
                raise StateError(
                    f"rank {self.comm.run_rank}: {name} is {param.dtype} on {param.device} and belongs to the engine, "
                    f"which cannot cast or move it to {moved.dtype} on {moved.device}.\nSet the type in the "
                    "configuration (bf16.enabled, fp16.enabled, keep_fp32) or before hf_zero.initialize (dtype= "
                    "in from_pretrained); to move or cast a plain model call engine.teardown() first."
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        # A deep copy of a model whose parameters are never sharded is a plain model: it has no engine.
        if id(self.module) not in memo:
            raise StateError("an engine cannot be copied: copy its model, copy.deepcopy(engine.module)")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "an engine, or a model that has one, cannot be pickled.\nSave with engine.save_checkpoint or "
            "model.save_pretrained, save engine.full_state_dict, or call engine.teardown() before torch.save(model)."
        )

    def _check_saved(self) -> None:
        """Check the model as `_check_model` does, and that parameters have the names that the engine knows."""
        self._check_live("save_checkpoint")
        self._check_model(self._attachment.check_names)

    def _check_model(self, *more: Callable[[], None]) -> None:
        """Raise StateError on every rank if one has a model that does not hold what would be saved."""

        def check() -> None:
            for one in (self._attachment.check_model, *more):
                one()
            for flat in (flat for unit in self.units for flat in unit.flats):
                flat.check_views()

        self.run_comm.agree("the model's parameters", check, StateError)

    # ---------------------------------------------------------------- checkpoints
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint into `save_dir/tag`; it loads at any world size and stage. Returns True.

        All ranks must call, with the same arguments. Without a tag it is "global_stepN". With `save_latest`, loading
        `save_dir` without a tag finds this one. Without frozen parameters it loads only where these are the same
        already. `client_state` is rank 0's: any value of numbers, texts, containers, tensors, and NumPy arrays.

        Raises CheckpointError on every rank: ranks name different folders or tags, or client_state holds an object
        of another class (nothing is written), or a rank could not write its part.
        """
        exclude_frozen = exclude_frozen_parameters
        self.checkpoints.save(save_dir, tag, client_state, save_latest=save_latest, exclude_frozen=exclude_frozen)
        return True

    def write_checkpoint(self, folder: str | Path, exclude_frozen_parameters: bool = False) -> None:
        """Write a checkpoint into `folder` itself, without a tag or `latest`. All ranks must call."""
        self.checkpoints.write(folder, exclude_frozen=exclude_frozen_parameters)

    def finish_saves(self) -> None:
        """Wait until the checkpoint that is written in the background (`checkpoint.async`) is published.

        All ranks must call. Raises CheckpointError on every rank if it could not be written. The next save, a load and
        `teardown` wait by themselves.
        """
        self.run_comm.note_call("finish_saves")
        self.checkpoints.finish()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        strict: bool = True,
        load_module_strict: bool = True,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, Any]:
        """Restore weights, optimizer state, scheduler and counters; returns (the checkpoint's folder, client_state).

        All ranks must call, with the same arguments. Without a tag it is the one saved last in `load_dir`, and where
        nothing was saved yet (None, {}) with a warning. `load_module_only` leaves all but weights and buffers as they
        are. Without `strict`, parameters and buffers that the checkpoint lacks stay as they are, with a new optimizer
        state, and those that the model lacks are left out; rank 0 names them in a warning. `load_module_strict` is
        DeepSpeed's name of `strict`.

        Raises CheckpointError on every rank where the checkpoint is not there, is damaged or does not fit, or where
        ranks would load different ones; ConfigError for a `custom_load_fn`.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): use hf_zero.load_fp32_state_dict and set_full_param"
            )
        parts = Parts(
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            strict=strict and load_module_strict,
        )
        self._check_live("load_checkpoint")
        return self.checkpoints.load(load_dir, tag, parts)

    def read_checkpoint(self, folder: str | Path, parts: Parts = ALL_PARTS) -> Any:
        """Restore from `folder` itself, whatever its `latest` names; returns the client_state or {}.

        All ranks must call. Raises CheckpointError on every rank, also where there is none.
        """
        self._check_live("load_checkpoint")
        return self.checkpoints.read(folder, parts)

    # ---------------------------------------------------------------- memory and end
    def memory_report(self) -> dict[str, int]:
        """Return bytes on this rank: what lives between steps by kind, and the peaks of what comes and goes.

        The kinds count every medium; `device`, `host` and `disk` say where `total` lies, `host` with what waits there
        to be published. `gathered_peak` counts unsharded parameters of on-demand units, `gradients_peak`
        gradients before their reduce, both inside forward and backward.

        `saved_inputs_device`, `_host` and `_disk` are what the activation_checkpointing block has placed there of
        checkpointed regions and backward has not used yet, with `_peak` the most so far. `gather_allocations`,
        `reduce_allocations` and `staging_allocations` count since the start: a second report a step later says what
        the step has allocated, which is nothing once the first two steps are over.
        """
        self._check_live("memory_report")
        state_bytes = 0 if self.optimizer is None else self.optimizer.state_bytes()
        return {
            **memory_report(self.units, self.reducer, self.placements, state_bytes),
            "gathered_peak": self.params.live.peak_bytes,
            "gradients_peak": self.pool.peak_live_bytes,
            **{kind: count for part in self.parts for kind, count in part.memory().items()},
            **allocation_counts(self.params.live, self.pool, self.comm, self.placements),
        }

    def summarize(self) -> None:
        """Let the engine's parts log what the run came to. Any rank may call."""
        for part in self.parts:
            part.summarize()

    def teardown(self) -> None:
        """Give the plain model back: unsharded parameters, no hooks; group and threads end. All ranks must call.

        An engine that has left its model already does nothing. Raises StateError where other ranks do not come;
        CheckpointError, at the end, if a save has failed.
        """
        if self not in _LIVE:
            return
        if self.comm.is_connected:  # after an error there is nobody to wait for
            # The wait is as long as for a collective: another rank may still be writing what it has learned.
            self.comm.require_all_ranks("engine.teardown", self.comm.timeout_s)
        self.summarize()
        failed: CheckpointError | None = None
        try:
            self.uninstall()
        except CheckpointError as error:  # of all ranks: they go on to the end together
            failed = error
        for unit in self.units:
            self.params.unshard(unit, exact=True)
            for flat in unit.flats:
                flat.detach()
        self.placements.close()
        end_unless_shared(self.comm)
        if failed is not None:
            raise failed

    def uninstall(self) -> None:
        """Leave nothing of the engine on its model but the units, for another engine. All ranks must call."""
        self.finish_updates()
        self.reload_states()
        for unit in self.units:
            if unit.state is UnitState.UNSHARDING:
                self.params.unshard(unit)
        self._detach()
        if self.optimizer is not None:
            self.optimizer.close()
        _LIVE.discard(self)
        for part in self.parts:
            part.close()
        self.checkpoints.close()

    def _detach(self) -> None:
        self._attachment.uninstall()
        while self._uninstalls:
            self._uninstalls.pop()()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is a plain module with placeholders: nothing of the engine is on it."""
        self._detach()
        try:
            yield
        finally:
            self._attachment = self._attach()

    def on_uninstall(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the engine leaves the model."""
        self._uninstalls.append(undo)


def _named_params(unit: ShardUnit) -> Iterator[tuple[str, nn.Parameter]]:
    for flat in unit.flats:
        for slot, param in zip(flat.layout.slots, flat.params, strict=True):
            yield slot.name, param


def end_unless_shared(comm: Comm) -> None:
    """End the group, unless another engine that it was handed on to lives on. All ranks must call."""
    comm.end(is_shared=any(engine.comm is comm for engine in _LIVE))


def live_engines() -> list[ZeroEngine]:
    return list(_LIVE)


def engine_of(model: Any) -> ZeroEngine | None:
    """Return the engine of `model`, also inside torch.compile's and DDP-like wrappers; None if it has none."""
    while model is not None:
        state = getattr(model, "__dict__", {})
        if isinstance(state.get(_KEY), ZeroEngine):
            engine: ZeroEngine = state[_KEY]
            return engine
        modules = state.get("_modules", {})
        model = modules.get("_orig_mod") or modules.get("module")
    return None
