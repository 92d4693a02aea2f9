"""The engine of one model: wiring only.

It works in place: the model object keeps its class, its attributes and its Parameter objects; hooks and placeholders
do the rest. It owns no tensors and does not ask for the stage.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.deepcopy import deepcopy_of
from hf_zero.engine.module_calls import ModuleCalls
from hf_zero.engine.reports import Reports
from hf_zero.engine.script_calls import reported
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import StateError
from hf_zero.optim.loss_scaler import StepGuard
from hf_zero.optim.offload.host_adam import HostAdamSettings
from hf_zero.optim.sharded import ShardedOptimizer
from hf_zero.runtime.attach import Callbacks, Computes, Fitted, ModelAttachment
from hf_zero.runtime.build import BuildSettings, BuiltUnits, build_units, share_the_rest, torch_dtype
from hf_zero.runtime.full_weights import FullWeights
from hf_zero.runtime.grad_accumulator import GradAccumulator
from hf_zero.runtime.memory_report import announce_engine, memory_report
from hf_zero.sharding.partition import check_parameters
from hf_zero.sharding.unit import UnitState

Install = Callable[["ZeroEngine"], None]
_KEY = "_hf_zero_engine"
_LIVE: weakref.WeakSet[ZeroEngine] = weakref.WeakSet()  # engines whose model is still there


class ZeroEngine(ModuleCalls):
    """ZeRO for one model over one process group.

    Args:
        model: Built alike on all ranks, parameters whole; rank 0's values win. Changed in place.
        config: Resolved; see ZeroConfig.resolve.
        managed: Trainer or Accelerate accumulates, scales the loss for that, and clips: the engine does neither.
        group: Ranks that share the model; None means all.
        device: Where parameters live and compute; None takes the accelerator of this process, or the CPU.
        built: Units of this model that were made already (see replace.py); None makes them from whole parameters.
        train: False keeps neither masters nor gradients: the model runs, and `replace.renew` makes it trainable.
    All ranks must construct it. Raises ConfigError, StateError (the model has an engine), DivergenceError.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ResolvedConfig,
        *,
        managed: bool = False,
        group: Any = None,
        device: torch.device | None = None,
        built: BuiltUnits | None = None,
        train: bool = True,
    ) -> None:
        if engine_of(model) is not None:
            raise StateError("this model already has a hf_zero engine; call engine.teardown() before making another")
        check_parameters(model, cut=config.stage == 3)  # before there is a process group to leave half made
        super().__init__()
        self.module = model
        self.config = config
        self.managed = managed
        self.lr_scheduler: Any = None
        self.trains = train
        accumulation_steps = 1 if managed else config.gradient_accumulation_steps
        if built is None:
            comm = Comm.join(device, group=group, timeout_s=config.desync_timeout)
            scale = 1 / (comm.world_size * accumulation_steps)
            built = build_units(model, BuildSettings.of(config, scale, train=train), comm)
        self.comm = built.comm
        share_the_rest(model, built.units, self.comm)
        self.homes, self.units, self.pool = built.homes, built.units, built.pool
        self.loss_scale = built.settings.grads.loss_scale
        self.schedule = StepSchedule(
            built, config, accumulation_steps, trains=train, on_new_gradients=self._on_new_gradients
        )
        self.params, self.reducer = self.schedule.params, self.schedule.reducer
        self.weights = FullWeights(model, self.units, self.params, self.comm, before_write=self.finish_updates)
        self._uninstalls: list[Callable[[], None]] = []
        self._before_teardown: list[Callable[[ZeroEngine], None]] = []
        self.installs: list[Install] = []
        reports = train and self.rank == 0
        self.reports = Reports.of(self, config, self.device, self.train_batch_size) if reports else Reports()
        self._attachment = self._fit()
        if self.rank == 0:
            announce_engine(config, self.device, self.world_size, self.units, self.reducer, trains=train)

    def _fit(self) -> ModelAttachment:
        """Put the engine on its model."""
        computes = Computes(
            torch_dtype(self.config.dtype), torch_dtype(self.config.precision.autocast), self.loss_scale
        )
        fitted = Fitted(self.module, self.units, self.params, self.reducer, self.device, self.rank, computes)
        callbacks = Callbacks(
            forward_starts=self.schedule.begin_forward,
            forward_ends=self.schedule.end_forward,
            backward_starts=self.schedule.begin_backward,
            backward_ends=self.schedule.end_backward,
            state_dict=self.schedule.check_current,
            deepcopy=lambda module, memo: deepcopy_of(self, module, memo, ZeroEngine),
        )
        _LIVE.add(self)
        attributes = {_KEY: self, "no_sync": lambda: self.no_sync()}
        attachment = ModelAttachment(fitted, self.reports.around(callbacks), attributes)
        self.on_uninstall(self.reports.watch_forward(self.module))
        for install in self.installs:
            install(self)
        return attachment

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are placeholders between uses."""
        return any(unit.on_demand for unit in self.units)

    # ---------------------------------------------------------------- training
    def train(self, mode: bool = True) -> ZeroEngine:
        self.module.train(mode)
        return self

    def eval(self) -> ZeroEngine:
        return self.train(False)

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool = True, **kwargs: Any) -> torch.Tensor:
        """`loss.backward(**kwargs)`, scaled for fp16; gradients are means over ranks and accumulation either way.

        Args:
            scale_wrt_gas: DeepSpeed's name. False: the loss is divided by the accumulation steps already.
        Returns:
            The loss divided by the accumulation steps: the sum over a window is the window's mean.
        """
        whole = loss if scale_wrt_gas else loss * self.accumulation_steps
        with self.loss_scale.scaled(whole) as scaled:
            scaled.backward(**kwargs)
        return loss / self.accumulation_steps if scale_wrt_gas else loss

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last before the step: stages 0-1 wait with their reduce, 2-3 take no notice."""
        with self.schedule.no_sync():
            yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before the update."""
        return self.schedule.is_boundary()

    @reported
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary update the parameters and step the scheduler. All ranks must call.

        `lr_kwargs` are given to the scheduler's step.
        """
        if self not in _LIVE:
            why = "this engine was torn down, or another engine has taken over its model"
            raise StateError(f"rank {self.rank}: engine.step: {why}; use what the last hf_zero.initialize returned")
        boundary = self.schedule.ends_window()
        self.schedule.micro_steps += 1
        if not boundary:
            return
        if self.optimizer is None:
            raise StateError("this engine has no optimizer: pass one to hf_zero.initialize, or an optimizer block")
        self.optimizer.step()
        if self.lr_scheduler is not None and not self.optimizer.overflow:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this window. `step` does it by itself."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.reducer.shown.discard()

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
            self.optimizer.close()
        clip = 0.0 if self.managed else self.config.gradient_clipping
        self.optimizer = ShardedOptimizer(
            optimizer,
            self.reducer,
            self.comm,
            list(self.params.orders.values()),
            clip=clip,
            allow_untested=self.config.zero_allow_untested_optimizer,
            offload=HostAdamSettings.of(self.config, self.homes.host, clips=clip > 0),
            guard=StepGuard(self.config.precision, self.config.stage, self.loss_scale),
            after_step=self.schedule.end_step,
        )
        return self.optimizer

    def _on_new_gradients(self, added: list[GradAccumulator]) -> None:
        self._attachment.on_gradients(added)

    def finish_updates(self) -> None:
        """Wait for offloaded updates that run beside the training, delayed ones too. All ranks must call."""
        if self.optimizer is not None:
            self.optimizer.finish_updates()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the mean gradient to `max_norm`; return its norm before. 0-dim. All ranks must call."""
        if self.optimizer is None:
            raise StateError("clip_grad_norm_ needs an optimizer: hf_zero.initialize or engine.attach_optimizer")
        return torch.tensor(self.optimizer.clip_grad_norm(float(max_norm)), dtype=torch.float64, device=self.device)

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of the mean gradient, before clipping, of the last step that was not left out (fp16); None at first.

        As in DeepSpeed, a step that overflows keeps the norm before it.
        """
        return None if self.optimizer is None else self.optimizer.last_norm

    # ---------------------------------------------------------------- memory and end
    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank: what lives between steps by kind, and the peaks of what comes and goes.

        The kinds count every medium; `device`, `host` and `disk` say where `total` lies, `host` with what waits there
        to be published. `gathered_peak` counts whole parameters of on-demand units, `gradients_peak` whole
        gradients before their reduce, both inside forward and backward.
        """
        state_bytes = 0 if self.optimizer is None else self.optimizer.state_bytes()
        return memory_report(self.units, self.reducer, self.homes, state_bytes) | {
            "gathered_peak": self.params.peak_live_bytes,
            "gradients_peak": self.pool.peak_live_bytes,
        }

    def teardown(self) -> None:
        """Give the plain model back: whole parameters, no hooks; group and threads end. All ranks must call.

        Raises StateError where other ranks do not come.
        """
        if self.comm.is_connected:  # after an error there is nobody to wait for
            # As long as for a collective: another rank may still be writing what it has learned.
            self.comm.require_all_ranks("engine.teardown", self.comm.timeout_s)
        for call in self._before_teardown:
            call(self)
        self.retire()
        for unit in self.units:
            self.params.unshard(unit)
            for buffer in unit.buffers:
                buffer.detach()
        self.homes.close()
        end_unless_shared(self.comm)

    def retire(self) -> None:
        """Take everything off the model but its units, which another engine is to take over. All ranks must call."""
        self.finish_updates()
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                self.params.unshard(unit)
        self._uninstall()
        if self.optimizer is not None:
            self.optimizer.close()
        _LIVE.discard(self)

    def _uninstall(self) -> None:
        self._attachment.uninstall()
        while self._uninstalls:
            self._uninstalls.pop()()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the model is a plain module with placeholders: nothing of the engine is on it."""
        self._uninstall()
        try:
            yield
        finally:
            self._attachment = self._fit()

    def naming_shards(self) -> contextlib.AbstractContextManager[None]:
        return self._attachment.naming_shards()

    def install(self, install: Install) -> None:
        """Call `install(engine)` now and whenever the engine comes back to its model: it puts something on it."""
        self.installs.append(install)
        install(self)

    def on_uninstall(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the engine leaves the model."""
        self._uninstalls.append(undo)

    def before_teardown(self, call: Callable[[ZeroEngine], None]) -> None:
        """Call `call(engine)` when `teardown` begins."""
        self._before_teardown.append(call)


def end_unless_shared(comm: Comm) -> None:
    """Engines hand their group on to others, which may live on. All ranks must call."""
    comm.end(is_shared=any(engine.comm is comm for engine in _LIVE))


def live_engines() -> list[ZeroEngine]:
    return list(_LIVE)


def engine_of(model: Any) -> ZeroEngine | None:
    """The engine of `model`, looking through torch.compile's and DDP-like wrappers; None if it has none."""
    while model is not None:
        state = getattr(model, "__dict__", {})
        if isinstance(state.get(_KEY), ZeroEngine):
            engine: ZeroEngine = state[_KEY]
            return engine
        modules = state.get("_modules", {})
        model = modules.get("_orig_mod") or modules.get("module")
    return None
