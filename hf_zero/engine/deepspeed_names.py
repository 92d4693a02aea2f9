"""DeepSpeed's names of the engine: what scripts written for DeepSpeed call on it beside the training step.

The mixin owns no state but what a call sets. Its answers are those of the configuration that the run has, so under
Trainer the accumulation steps are Trainer's, though the engine itself accumulates one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_zero.checkpoint.consolidate import published
from hf_zero.checkpoint.format import ConsolidateError
from hf_zero.config import ResolvedConfig
from hf_zero.distributed.comm import Comm
from hf_zero.engine.loaders import share_loader
from hf_zero.engine.module_wrapper import ModuleWrapper
from hf_zero.engine.step_schedule import StepSchedule
from hf_zero.errors import CheckpointError, ConfigError, StateError
from hf_zero.optim.hyperparameters import learning_rates, momenta
from hf_zero.runtime.loss_scale import LossScale

logger = logging.getLogger(__name__)


# The types that DeepSpeed has optimizers of its own for, as it names them.
OWN_OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muon")


class DeepSpeedNames(ModuleWrapper):
    """The part of ZeroEngine that answers to DeepSpeed's names.

    Any rank may call a method whose docstring does not mention ranks.
    """

    # ZeroEngine's, which the names answer from.
    config: ResolvedConfig
    comm: Comm
    loss_scale: LossScale
    schedule: StepSchedule
    tput_timer: Any  # of an engine that trains: monitors/step_lines.py
    shuffles = True  # the samples of a loader that it makes
    _consolidated: tuple[weakref.ref[OrderedDict[str, torch.Tensor]], int] | None = None

    @property
    def is_compiled(self) -> bool:
        return self.module._compiled_call_impl is not None

    # ---------------------------------------------------------------- ranks
    @property
    def global_rank(self) -> int:
        return self.comm.rank

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that share the data: all of them."""
        return self.comm.world_size

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that share the data: torch's default group.

        Raises:
            StateError: Ranks hold different stages of a pipeline.
        """
        if self.run_comm.world_size != self.comm.world_size:
            raise StateError("data_parallel_group: not all ranks share this engine's part of the model")
        return dist.group.WORLD

    @property
    def local_rank(self) -> int:
        """This process's number on its node, from the launcher; 0 where one process was started alone."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    # ---------------------------------------------------------------- batches
    def train_batch_size(self) -> int:
        """Return the number of samples of one step, over all ranks and accumulation steps."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches whose `step()` was called."""
        return self.schedule.micro_steps

    @property
    def global_samples(self) -> int:
        """The number of samples that all steps so far have seen, at the present batch size."""
        return self.schedule.global_steps * self.train_batch_size()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of accumulation steps so that a step has this many samples. All ranks must call, alike.

        Raises:
            ConfigError: It is no multiple of micro-batch size times ranks.
            StateError: Inside an accumulation window, or where Trainer or Accelerate accumulate.
        """
        if self.managed:
            raise StateError("set_train_batch_size: Trainer and Accelerate accumulate by themselves; set it there")
        schedule = self.schedule
        is_empty = all(acc.is_empty for acc in schedule.reducer.accumulators)
        if schedule.micro_steps % schedule.accumulation_steps or not is_empty:
            raise StateError(
                f"rank {self.comm.run_rank}: set_train_batch_size({train_batch_size}) came inside an accumulation "
                "window, whose gradients are scaled for the old size.\nCall it right after the step() that ends one."
            )
        micro = self.config.train_micro_batch_size_per_gpu * self.comm.world_size
        if train_batch_size < 1 or train_batch_size % micro:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): expected a multiple of {micro}, which is "
                f"{self.config.train_micro_batch_size_per_gpu} (train_micro_batch_size_per_gpu) x "
                f"{self.comm.world_size} ranks."
            )
        steps = train_batch_size // micro
        self.config = dataclasses.replace(
            self.config, train_batch_size=train_batch_size, gradient_accumulation_steps=steps
        )
        self.run_comm.note_call(f"set_train_batch_size({train_batch_size})")
        self.schedule.accumulate_over(steps)

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's share of `dataset`, see `share_loader`.

        The share is shuffled for the route "train", but for a pipeline, which takes samples in their order.
        """
        return share_loader(
            dataset,
            self.comm,
            self.config,
            shuffle=self.shuffles and route == "train",
            batch_size=batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before the update."""
        return self.schedule.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next backward is the last before the update, from now on. All ranks must call, alike.

        For loops that call `step()` once per update. Gradients are still divided by the accumulation steps.

        Raises:
            StateError: `managed_gradient_accumulation` is false, so that every `step()` updates.
        """
        if not self.config.managed_gradient_accumulation:
            raise StateError(
                "set_gradient_accumulation_boundary: managed_gradient_accumulation is false, so every engine.step() "
                "updates.\nRemove the call, or the key."
            )
        self.run_comm.note_call(f"set_gradient_accumulation_boundary({is_boundary})")
        self.schedule.forced_boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters: not before the boundary, and not on an overflow."""
        return self.schedule.step_applied

    # ---------------------------------------------------------------- gradients
    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return `loss` times the loss scale of fp16, for a direct `backward()` of it; without fp16 the loss itself.

        It spares gradients between the model and its loss the underflow. Where it is left out, gradients are scaled
        as they enter the model.
        """
        return self.loss_scale.multiply(loss)

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce the gradients that backwards have left, before `step()` does. All ranks must call.

        `param.grad` then holds the mean at stage 0. `bucket_size` is for DeepSpeed's sake.
        """
        self.schedule.reduce_gradients()

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backwards inside at its end. All ranks must enter and leave.

        Stages 2 and 3 reduce in every backward, as they do in `no_sync`.
        """
        with self.no_sync():
            yield
        self.allreduce_gradients()

    # ---------------------------------------------------------------- rates
    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group; [] without an optimizer."""
        return learning_rates(self._groups())

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group. All ranks must call, alike. A scheduler overrides it."""
        self.run_comm.note_call(f"set_lr({lr})")
        for group in self._groups():
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the betas of each param group, or its momentum; 0.0 where the optimizer has neither."""
        return momenta(self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self.schedule.optimizer
        return [] if optimizer is None else optimizer.param_groups

    # ---------------------------------------------------------------- configuration
    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def zero_optimization(self) -> bool:
        return self.config.stage > 0

    def is_first_weights_partition_group(self) -> bool:
        """Whether parameters are sharded: stage 3."""
        return self.config.shards_parameters

    def zero_optimization_partition_gradients(self) -> bool:
        return self.config.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.config.shards_parameters

    def optimizer_name(self) -> str | None:
        """Return the type of the optimizer block; None without one.

        Types that DeepSpeed has optimizers of its own for are in small letters, as programs compare them.
        """
        if self.config.optimizer is None:
            return None
        name: str = self.config["optimizer"]["type"]
        return name.lower() if name.lower() in OWN_OPTIMIZERS else name

    def scheduler_name(self) -> str | None:
        """Return the type of the scheduler block; None without one."""
        block = self.config.scheduler
        return None if block is None else block["type"]

    def fp16_enabled(self) -> bool:
        return self.config.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        return self.config.dtype == "bfloat16"

    def gradient_clipping(self) -> float:
        """Return the limit of the gradient norm; 0.0 is none."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> int:
        """Return the number of steps between two lines of progress; 0 is never."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self.config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        return self.config.memory_breakdown

    # ---------------------------------------------------------------- weights
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's unsharded weights as it holds them, on every rank. All ranks must call at stage 3.

        Where parameters are never sharded these are the live tensors of `module.state_dict()`, else copies on the CPU.
        """
        state: dict[str, Any]
        if self.is_sharded:
            state = self.full_state_dict(keep=True, trainable_only=exclude_frozen_parameters)
            return state
        state = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether weights are written at stage 3: unless `stage3_gather_16bit_weights_on_model_save` is false."""
        return self.config.zero.stage3_gather_16bit_weights_on_model_save is not False

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return unsharded weights on rank 0, None elsewhere, to accelerate and transformers. All ranks must call."""
        is_first = self.comm.rank == 0
        state = OrderedDict(self.full_state_dict(keep=is_first, trainable_only=exclude_frozen_parameters))
        self._consolidated = None
        if is_first and not exclude_frozen_parameters:
            self._consolidated = weakref.ref(state), self.schedule.global_steps
        return state if is_first else None

    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """`_zero3_consolidated_16bit_state_dict` by the name that programs of today call. All ranks must call."""
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model's weights, as it holds them, into one file. All ranks must call; rank 0 writes.

        A name that ends in .safetensors gives that format, in which tied weights stand under their first name; any
        other is written by torch.save. Needs the full model in rank 0's host memory.

        Returns:
            False, and nothing is written, where `stage3_gather_16bit_weights_on_model_save` is false at stage 3.
        Raises:
            CheckpointError: Rank 0 could not write; on every rank.
        """
        path = Path(save_dir) / save_filename
        if self.config.shards_parameters and not self.zero_gather_16bit_weights_on_model_save():
            if self.rank == 0:
                logger.warning("%s is not written: stage3_gather_16bit_weights_on_model_save is false", path)
            return False
        writes = self.run_comm.rank == 0
        state = self.full_state_dict(keep=writes, trainable_only=exclude_frozen_parameters)
        work = (lambda: _write_weights(state, path)) if writes else None
        self.run_comm.agree("save_16bit_model", work, CheckpointError)
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """`save_16bit_model` under its older name."""
        return self.save_16bit_model(save_dir, save_filename)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """The layers whose gradients travel as sparse tensors: none, for `sparse_gradients` is refused."""
        return set()

    # ---------------------------------------------------------------- memory and end
    def empty_partition_cache(self) -> None:
        """Reshard parameters that were gathered ahead or kept. All ranks must call; not within a step."""
        self.run_comm.note_call("empty_partition_cache")
        self.schedule.params.reshard_all()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def destroy(self) -> None:
        """Give up training: take the engine off its model, free its files and host memory. All ranks must call.

        Gathers nothing: at stage 3 the model keeps placeholders only, which read as NaN. `teardown()` gives the
        plain model back. A second call does nothing.
        """
        if self.placements.closed:
            return
        if self.run_comm.is_connected:
            self.run_comm.require_all_ranks("engine.destroy", self.run_comm.timeout_s)
        self.uninstall()
        self.placements.close()
        self.schedule.optimizer = None


def consolidated_weights(engine: DeepSpeedNames) -> dict[str, torch.Tensor] | None:
    """Return the weights of this step that rank 0's program holds from `_consolidated_16bit_state_dict`, or None."""
    state, step = engine._consolidated or (None, -1)
    return state() if state is not None and step == engine.schedule.global_steps else None


def _write_weights(state: dict[str, torch.Tensor], path: Path) -> None:
    try:
        with published(path) as partial:
            if path.suffix == ".safetensors":
                firsts = {id(tensor): name for name, tensor in reversed(state.items())}
                save_file({name: state[name].contiguous() for name in firsts.values()}, partial, {"format": "pt"})
            else:
                with partial.open("xb") as file:
                    torch.save(state, file)
    except ConsolidateError as error:
        raise CheckpointError(str(error)) from error
    except Exception as error:  # each format raises another error for a full disk
        raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error
