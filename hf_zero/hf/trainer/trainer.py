"""Trainer under ZeRO: what differs from the stock Trainer, written once and used in two ways.

Each function that is `_in_place_of` a method of transformers.Trainer gets that method, bound, as `orig`.
`ZeroTrainerMixin` puts them in front of a Trainer class; `enable` puts them into transformers.Trainer itself, so that
unmodified subclasses inherit them. Where ZeRO is not in force they do what the stock Trainer does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import remove_dummy_checkpoint

from hf_zero.access.copy_weights import copy_weights
from hf_zero.checkpoint.agreement import refuse_differences
from hf_zero.checkpoint.file_list import write_list
from hf_zero.checkpoint.load import Parts
from hf_zero.checkpoint.replaced_files import drop, put_back, set_aside
from hf_zero.engine.engine import ZeroEngine, engine_of
from hf_zero.errors import CheckpointError, ConfigError, StateError, ZeroError
from hf_zero.hf.accelerator.plugin import ZeroPlugin
from hf_zero.hf.conflicts import check_run
from hf_zero.hf.local_files import on_all_ranks, reading, writing, writing_alone
from hf_zero.hf.models.generation import calls_in_a_row
from hf_zero.hf.models.peft import computes_its_adapters, is_peft_model, keeps_base, unsharded_prompt_encoders
from hf_zero.hf.models.restore import restore_weights
from hf_zero.hf.models.saving import saving_alone, weights_to_save
from hf_zero.hf.patching import ACTIVATION, PatchPoint, instead
from hf_zero.hf.trainer.logged_values import LoggedValues
from hf_zero.hf.trainer.node_folders import agree_on_nodes, one_writer_each, weights_where_asked
from hf_zero.hf.trainer.out_of_memory import naming_lost_ranks, run_attempt
from hf_zero.hf.trainer.replaced_methods import FUNCTIONS, Original, engine_of_trainer, in_place_of, plugin_of
from hf_zero.hf.trainer.resume import (
    AUTO,
    agree_on_checkpoint,
    agree_on_start,
    delete_older,
    has_sharded_state,
    lacks_frozen_weights,
    read_scheduler,
    rng_state_file,
    tell_of_start,
    write_scheduler,
)
from hf_zero.hf.trainer.trl_hash import hash_over_shards
from hf_zero.hf.trainer.uneven_data import evaluate_joined
from hf_zero.logs import set_verbosity
from hf_zero.native.checksum import crc32_of_bytes
from hf_zero.optim.registry import optimizer_of
from hf_zero.optim.schedules.build_schedule import choose_scheduler

logger = logging.getLogger(__name__)


@in_place_of("create_accelerator_and_postprocess")
def create_accelerator(self: Any, orig: Original) -> None:
    """Make the Accelerator and put it under ZeRO, with the configuration of the arguments or the enabled one."""
    config = getattr(self.args, "zero_config", None) or ACTIVATION.enabled
    if config is None:
        if self.args.process_index == 0 and isinstance(self, ZeroTrainerMixin):
            logger.warning(
                "%s trains without ZeRO: its arguments have no zero=. Pass zero=FILE to the arguments (those of "
                "hf_zero.TrainingArguments or zero_arguments(...)), or call hf_zero.enable(FILE) first.",
                type(self).__name__,
            )
        orig()
        return
    if self.args.log_level != "passive":
        set_verbosity(self.args.get_process_log_level())
    check_run(config, self.args, self.model)
    if self.args.n_gpu > 1:
        # Trainer would wrap the model in DataParallel, which copies it at every step.
        logger.warning(
            "%d GPUs are visible to one process; using one. Launch with torchrun to use all.", self.args.n_gpu
        )
        self.args._n_gpu = 1
    with ACTIVATION.held_back():
        orig()
    ZeroPlugin(config, args=self.args).attach(self.accelerator)
    if _overrides(self, "save_model") and not _comes_to_ours(type(self).save_model):
        self.save_model = functools.partial(FUNCTIONS["save_model"][0], self, self.save_model)
    hash_over_shards()


@in_place_of("_move_model_to_device", "model", "device", needs=plugin_of)
def move_model_to_device(
    self: Any, orig: Original, plugin: ZeroPlugin, model: nn.Module, device: torch.device
) -> None:
    """Leave a model alone that an engine has placed, or will place shard by shard (stage 3)."""
    if not plugin.config.shards_parameters and engine_of(model) is None:
        orig(model, device)


@in_place_of("create_optimizer", "model", needs=plugin_of)
def create_optimizer(self: Any, orig: Original, plugin: ZeroPlugin, model: nn.Module | None = None) -> Any:
    """Make the optimizer that the configuration's `optimizer` block names, if it has one, over Trainer's groups."""
    made = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
    if made or plugin.config.get("optimizer") is None:
        return orig(model)
    block = plugin.resolve(self.accelerator, self.model).optimizer
    assert block is not None
    self.optimizer_cls_and_kwargs = optimizer_of(block, self.model)
    try:
        return orig(model)
    finally:
        self.optimizer_cls_and_kwargs = None


@in_place_of("create_scheduler", "num_training_steps", "optimizer", needs=plugin_of)
def create_scheduler(
    self: Any, orig: Original, plugin: ZeroPlugin, num_training_steps: int, optimizer: Any = None
) -> Any:
    """Make the scheduler that the configuration's `scheduler` block names, if it has one, instead of Trainer's."""
    block = plugin.config.get("scheduler")
    if block is None:
        return orig(num_training_steps, optimizer)
    if self.lr_scheduler is None:
        resolved = plugin.resolve(self.accelerator, self.model, num_training_steps)
        self.lr_scheduler = choose_scheduler(None, resolved.scheduler, optimizer or self.optimizer)
        self._created_lr_scheduler = True
    elif not self._created_lr_scheduler:
        raise ConfigError(
            f"Trainer has a {type(self.lr_scheduler).__name__} (optimizers=), and the configuration has a scheduler "
            f"block ({block.get('type')}): expected one of them.\nRemove one of the two."
        )
    return self.lr_scheduler


@in_place_of("train", "resume_from_checkpoint", needs=plugin_of)
def train(
    self: Any,
    orig: Original,
    plugin: ZeroPlugin,
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Resume from the newest complete checkpoint where the stock Trainer takes the newest of all.

    The argument of the Trainer counts where it is "auto", which the stock Trainer does not know.
    """
    if resume_from_checkpoint is None and self.args.resume_from_checkpoint == AUTO:
        resume_from_checkpoint = AUTO
    if agree_on_start(self.args, resume_from_checkpoint, plugin.config.desync_timeout):
        agree = agree_on_nodes if self.args.save_on_each_node else agree_on_checkpoint
        asked, resume_from_checkpoint = resume_from_checkpoint, agree(self.args, resume_from_checkpoint)
        if asked == AUTO:
            tell_of_start(self.args, resume_from_checkpoint)
    _mix_references_by_shards(self)
    _warn_of_unused_block(self, plugin)
    with _around_own_loading(self):
        result = orig(resume_from_checkpoint, *args, **kwargs)
    if (engine := engine_of_trainer(self)) is not None:
        engine.finish_updates()
        engine.summarize()
    return result


@contextlib.contextmanager
def _around_own_loading(trainer: Any) -> Iterator[None]:
    """Load what the engine has saved where the class of `trainer` loads weights in its own way alone.

    That way is made for a plain model: it assigns to parameters, which is an error where they are sharded. A method
    that calls `super()`, perhaps for some models only, is called; ours is where it has not come there.
    """

    def load(name: str, own: Original, *args: Any) -> Any:
        if not has_sharded_state(args[0] if args else trainer.state.best_model_checkpoint):
            return own(*args)
        trainer._zero_loads = False  # until ours is called
        if _comes_to_ours(own):
            try:
                own(*args)
            except RuntimeError as error:  # torch's load_state_dict may have made it of a StateError
                is_other = isinstance(error, ZeroError | torch.OutOfMemoryError) and not isinstance(error, StateError)
                if trainer._zero_loads or is_other:
                    raise
        return None if trainer._zero_loads else FUNCTIONS[name][0](trainer, own, *args)

    with ExitStack() as stack:
        for name in ("_load_from_checkpoint", "_load_best_model"):
            if _overrides(trainer, name) and not isinstance(trainer, ZeroTrainerMixin):
                stack.enter_context(instead(trainer, name, functools.partial(load, name, getattr(trainer, name))))
        yield


def _overrides(trainer: Any, name: str) -> bool:
    """Whether a Trainer's class has a method of its own in front of ours."""
    return getattr(type(trainer), name) not in (getattr(transformers.Trainer, name), getattr(ZeroTrainerMixin, name))


def _comes_to_ours(method: Callable[..., Any]) -> bool:
    """Whether a method calls that of transformers, by `super()` or by its name."""
    code = inspect.unwrap(method).__code__
    return "__class__" in code.co_freevars or code.co_name in code.co_names


def _warn_of_unused_block(trainer: Any, plugin: ZeroPlugin) -> None:
    """A Trainer's own create_scheduler decides whether the configuration's block counts."""
    method = "create_scheduler"
    owner = next(one for one in type(trainer).__mro__ if method in one.__dict__)
    if owner is ZeroTrainerMixin or owner is transformers.Trainer or plugin.config.get("scheduler") is None:
        return
    if trainer.args.process_index == 0:
        logger.warning("%s.%s: the scheduler block counts only if it calls super().%s", owner.__name__, method, method)


@in_place_of("_inner_training_loop", "batch_size", "args", needs=plugin_of)
def inner_training_loop(
    self: Any, orig: Original, plugin: ZeroPlugin, batch_size: int | None = None, **kwargs: Any
) -> Any:
    """Let all ranks stop where one is out of memory, and all of them try again under auto_find_batch_size."""
    return run_attempt(self, plugin, orig, batch_size, **kwargs)


def _mix_references_by_shards(trainer: Any) -> None:
    """TRL's callback that moves a reference towards the policy writes to parameters, which may be placeholders."""
    for callback in trainer.callback_handler.callbacks:
        if callable(getattr(type(callback), "sync_target_model", None)):
            callback.sync_target_model = lambda model, target, alpha: copy_weights(model, target, tau=alpha)


@in_place_of("_save_checkpoint", "model", "trial", needs=engine_of_trainer)
def save_checkpoint(self: Any, orig: Original, engine: ZeroEngine, *args: Any, **kwargs: Any) -> None:
    """Save with every update in it, delayed ones too; what one rank cannot write is an error of all."""
    engine.finish_updates()
    self._zero_saves_on_all_ranks = True
    trial = kwargs.get("trial", args[1] if len(args) > 1 else None)
    saved = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
    folders = engine.comm.all_gather_object(os.path.abspath(saved), "a save of Trainer")
    refuse_differences("a save of Trainer", folders, "nothing was written")
    try:
        with one_writer_each(self.args, engine.comm):
            _save_or_put_back(self, engine, saved, lambda: orig(*args, **kwargs))
    finally:
        del self._zero_saves_on_all_ranks


def _save_or_put_back(trainer: Any, engine: ZeroEngine, saved: Path, save: Callable[[], None]) -> None:
    """Let the folder hold all of what `save` writes, or what it held before: nothing, or an earlier checkpoint.

    Older checkpoints go when this one is complete: until then it may fail, and they are what a resume takes.
    """
    args, comm, in_background = trainer.args, engine.comm, engine.config.checkpoint.asynchronous
    writes, limit = args.should_save, args.save_total_limit

    def restore() -> None:
        with contextlib.suppress(OSError):  # what failed says more
            put_back(saved)

    on_all_ranks(comm, writing(saved), lambda: set_aside(saved) if writes else None)
    args.save_total_limit = None
    try:
        on_all_ranks(comm, writing(saved), save)
        keep = {saved, Path(trainer.state.best_model_checkpoint or saved)}
        complete = functools.partial(_complete, trainer, saved, limit, keep)
        if not in_background:  # every rank has written all its files
            on_all_ranks(comm, writing(saved), lambda: complete() if writes else None)
    except BaseException:
        if writes:  # in the background a rank may be writing still
            engine.checkpoints.when_published(restore, otherwise=restore)
        raise
    finally:
        args.save_total_limit = limit
    if in_background and writes:
        engine.checkpoints.when_published(functools.partial(_all_or, restore, complete), otherwise=restore)


def _all_or(restore: Callable[[], None], complete: Callable[[], None]) -> None:
    """Complete a save in the background, or restore what it replaced, on one rank: no other one waits for it."""
    try:
        complete()
    except CheckpointError as error:
        restore()
        logger.error("the checkpoint was not saved: %s", error)


def _complete(trainer: Any, saved: Path, limit: int | None, keep: set[Path]) -> None:
    """All of a checkpoint is in `saved`."""
    with writing_alone(saved):
        write_list(saved, crc32_of_bytes)
        drop(saved)
    if limit is not None:
        being_written = saved.with_name(f"checkpoint-{trainer.state.global_step}")
        delete_older(saved.parent, limit, keep=keep, leave_out=being_written)


@in_place_of("_push_from_checkpoint", "checkpoint_folder", needs=engine_of_trainer)
def push_from_checkpoint(self: Any, orig: Original, engine: ZeroEngine, *args: Any, **kwargs: Any) -> Any:
    """Publish the files before the first rank uploads them. All ranks come here."""
    engine.finish_saves()
    return orig(*args, **kwargs)


@in_place_of("_finalize_training", "trial", "num_train_samples", "start_time", needs=engine_of_trainer)
def finalize_training(self: Any, orig: Original, engine: ZeroEngine, *args: Any, **kwargs: Any) -> Any:
    """A save in the background is over before the best model is looked for, and before train returns."""
    engine.finish_saves()
    if self.args.load_best_model_at_end:  # a rank that did not find it would keep its last weights
        best = self.state.best_model_checkpoint
        folder = "no folder was found" if best is None else os.path.abspath(best)
        folders = engine.comm.all_gather_object(folder, "load_best_model_at_end")
        refuse_differences("load_best_model_at_end", folders, "the best model was not loaded")
    with one_writer_each(self.args, engine.comm):  # Trainer may delete the last checkpoint here, beside the best one
        return orig(*args, **kwargs)


@in_place_of("save_model", "output_dir", "_internal_call", needs=engine_of_trainer)
def save_model(
    self: Any, orig: Original, engine: ZeroEngine, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Give `_save` full weights, on the ranks that write. All ranks must call where the model is sharded.

    The stock method comes to `_save` on every rank, or, up to transformers 5.22, on those that write.
    """
    if engine.is_sharded:
        engine.require_all_ranks("trainer.save_model")
    outside = engine.is_sharded and not getattr(self, "_zero_saves_on_all_ranks", False)
    came = False

    def save(folder: str | None = output_dir, state_dict: dict[str, Any] | None = None) -> None:
        nonlocal came
        came = True
        if state_dict is None:
            _save_full(self, engine, self.args.output_dir if folder is None else folder)
        else:
            type(self)._save(self, folder, state_dict=state_dict)

    with one_writer_each(self.args, engine.comm) if outside else nullcontext():
        with instead(self, "_save", save):
            orig(output_dir, _internal_call=True)
        if not came:
            save()
    if self.args.push_to_hub and not _internal_call:  # as the stock method does, when every rank has saved
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _save_full(self: Any, engine: ZeroEngine, folder: str) -> None:
    # Adapters are no gathered 16-bit weights: they are small, and nothing else would hold them.
    writes = engine.config.writes_full_weights or is_peft_model(self.model)
    saved: AbstractContextManager[dict[str, Any]] = nullcontext({})
    if writes:
        saved = weights_to_save(self.model, engine, folder, writes=self.args.should_save)
    with saved as weights:

        def write() -> None:
            with unsharded_prompt_encoders(self.model), weights_where_asked(self):
                if self.args.should_save:
                    with saving_alone(engine, weights) if writes else nullcontext():
                        type(self)._save(self, folder, state_dict=weights)
            if not writes:
                remove_dummy_checkpoint(self.args.should_save, folder, ["model.safetensors"])

        # Unsharded parameters may be saved by one rank alone, in a script of its own.
        if engine.is_sharded or getattr(self, "_zero_saves_on_all_ranks", False):
            on_all_ranks(engine.comm, writing(folder), write)
        else:
            write()


@in_place_of("_save_optimizer_and_scheduler", "output_dir", needs=engine_of_trainer)
def save_optimizer_and_scheduler(self: Any, orig: Original, engine: ZeroEngine, output_dir: str) -> None:
    """Every rank writes its shards of masters and optimizer state; the writer adds the scheduler."""
    # Frozen weights are left out where another file has them: the model's beside, or that of an adapter's base.
    elsewhere = keeps_base(self.model) if is_peft_model(self.model) else engine.config.writes_full_weights
    engine.write_checkpoint(output_dir, exclude_frozen_parameters=elsewhere)
    if self.args.should_save:
        write_scheduler(self, output_dir)


@in_place_of("_save_rng_state", "output_dir", needs=engine_of_trainer)
def save_rng_state(self: Any, orig: Original, engine: ZeroEngine, output_dir: str) -> None:
    """Every rank writes a file of its own."""
    with writing(rng_state_file(self.args, output_dir)):
        orig(output_dir)


@in_place_of("_load_from_checkpoint", "resume_from_checkpoint", "model", needs=plugin_of)
def load_from_checkpoint(
    self: Any, orig: Original, plugin: ZeroPlugin, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """Load weights before the model is prepared, unless the engine will load them with the optimizer state."""
    self._zero_loads = True
    target = self.model if model is None else model
    # Frozen weights that are in no file either, those of a PEFT model's base, are compared when the engine loads.
    if not has_sharded_state(resume_from_checkpoint) or (
        lacks_frozen_weights(resume_from_checkpoint) and not computes_its_adapters(target)
    ):
        restore_weights(target, Path(resume_from_checkpoint), engine_of(target))


@in_place_of("_load_optimizer_and_scheduler", "checkpoint", needs=engine_of_trainer)
def load_optimizer_and_scheduler(self: Any, orig: Original, engine: ZeroEngine, checkpoint: str | None) -> None:
    """Load weights, masters, optimizer state and scheduler. Comes after the model is prepared, on all ranks."""
    if checkpoint is None:
        return
    if not has_sharded_state(checkpoint):
        if self.args.process_index == 0:
            logger.warning("%s holds weights only: optimizer state and schedule start anew", checkpoint)
        return
    engine.read_checkpoint(checkpoint, Parts(is_scheduled=True))
    read_scheduler(self, engine.comm, checkpoint)


@in_place_of("_load_rng_state", "checkpoint", needs=engine_of_trainer)
def load_rng_state(self: Any, orig: Original, engine: ZeroEngine, checkpoint: str | None) -> None:
    """Every rank reads a file of its own."""
    if checkpoint is not None:
        on_all_ranks(engine.comm, reading(rng_state_file(self.args, checkpoint)), lambda: orig(checkpoint))


@in_place_of("_load_best_model", needs=engine_of_trainer)
def load_best_model(self: Any, orig: Original, engine: ZeroEngine) -> None:
    """Load the best checkpoint's weights into the live shards: from its masters where it has them."""
    self._zero_loads = True
    best = self.state.best_model_checkpoint
    logger.info("Loading best model from %s (score: %s).", best, self.state.best_metric)
    if has_sharded_state(best):  # frozen weights have not moved since
        engine.read_checkpoint(best, Parts(optimizer=False, scheduler=False))
    else:
        restore_weights(self.model, Path(best), engine)


@in_place_of("_prepare_for_training", "max_steps", "train_dataloader", "resume_from_checkpoint", needs=plugin_of)
def prepare_for_training(self: Any, orig: Original, plugin: ZeroPlugin, *args: Any, **kwargs: Any) -> Any:
    """The engine is where scripts look for DeepSpeed's."""
    prepared = orig(*args, **kwargs)
    if (engine := engine_of_trainer(self)) is not None:
        self.deepspeed = engine  # Trainer's own attribute, None elsewhere
        self._zero_values = LoggedValues(engine) if self.args.report_to else None
    return prepared


@in_place_of("log", "logs", "start_time", needs=engine_of_trainer)
def log(self: Any, orig: Original, engine: ZeroEngine, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
    """Log ZeRO's own values beside those of a training step, where `report_to` names a tracker."""
    values: LoggedValues | None = getattr(self, "_zero_values", None)
    if values is not None and "loss" in logs:
        logs.update(values.take())  # in place: Trainer adds to the same dict, and callers look into it
    orig(logs, *args, **kwargs)


@in_place_of("_get_learning_rate", needs=engine_of_trainer)
def get_learning_rate(self: Any, orig: Original, engine: ZeroEngine) -> Any:
    """0 until a first step has been applied: while fp16's loss scale is still too high, nothing is learned."""
    return 0.0 if engine.skipped_steps and engine.skipped_steps == engine.global_steps else orig()


@in_place_of("evaluation_loop", "dataloader", "description")
def evaluation_loop(self: Any, orig: Original, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluate with one gather for all batches where generation runs for every batch."""
    in_a_row = calls_in_a_row() if getattr(self.args, "predict_with_generate", False) else nullcontext()
    with in_a_row, naming_lost_ranks(self, "evaluation"):
        return evaluate_joined(self, plugin_of(self), orig, dataloader, *args, **kwargs)


class ZeroTrainerMixin:
    """Puts ZeRO in front of a Trainer class: `class MyTrainer(ZeroTrainerMixin, SFTTrainer)`.

    Needs arguments with `zero` (`hf_zero.TrainingArguments`, `hf_zero.zero_arguments(SFTConfig)`), or `enable`.
    """

    @property
    def zero(self) -> ZeroEngine | None:
        """The engine of the model, once it has one. While it trains, `trainer.deepspeed` is the same."""
        return engine_of_trainer(self)


def _in_front(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(getattr(transformers.Trainer, name))
    def method(self: ZeroTrainerMixin, *args: Any, **kwargs: Any) -> Any:
        return function(self, getattr(super(ZeroTrainerMixin, self), name), *args, **kwargs)

    return method


for _name, (_function, _) in FUNCTIONS.items():
    setattr(ZeroTrainerMixin, _name, _in_front(_name, _function))


class Trainer(ZeroTrainerMixin, transformers.Trainer):
    """transformers.Trainer that runs under ZeRO when its arguments have `zero` (or `enable` was called)."""


class Seq2SeqTrainer(ZeroTrainerMixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer that runs under ZeRO when its arguments have `zero` (or `enable` was called)."""


def trainer_patch_points() -> list[PatchPoint]:
    """The methods of transformers.Trainer that `enable` and the mixin act through."""
    return [
        PatchPoint(transformers.Trainer, name, parameters, functools.partial(_act, function))
        for name, (function, parameters) in FUNCTIONS.items()
    ]


def _act(function: Callable[..., Any], original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    bound = functools.partial(original, self)
    # The mixin has acted already when its `super()` call comes here.
    return bound(*args, **kwargs) if isinstance(self, ZeroTrainerMixin) else function(self, bound, *args, **kwargs)
