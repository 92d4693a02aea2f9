"""Lets ranks have different numbers of batches under Trainer: the key `uneven_data`.

"stop" leaves out, of each optimizer step, what the rank with the fewest batches lacks: all stop at the shortest data.
"join" goes on to the end of the longest. A rank that lacks a batch repeats one with a loss of weight 0, so that it
makes every call that the others make, those of a trainer's own `compute_loss` too. The batches of the others weigh
more instead: the gradient is the mean over what is there, batches or tokens, whichever Trainer takes.
An evaluation goes on to the last batch under both; what comes of a repeated batch is left out.
The ranks agree by a small exchange before each optimizer step, and before each batch of such an evaluation.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import find_batch_size, recursively_apply, send_to_device
from transformers.trainer_utils import has_length

from hf_zero.distributed.processes import all_ranks_give
from hf_zero.engine.engine import ZeroEngine
from hf_zero.errors import ConfigError
from hf_zero.hf.accelerator.plugin import ZeroPlugin
from hf_zero.hf.patching import instead, replaced
from hf_zero.hf.trainer.replaced_methods import Original, engine_of_trainer, in_place_of, plugin_of

ERROR, STOP = "error", "stop"  # the third value is "join"
_NO_LOSS = -100  # the label of a token that has none


# ---------------------------------------------------------------- training
class SharedSteps:
    """The batches of one training that were agreed on and not run yet, by their weights, and the last of this rank."""

    def __init__(self) -> None:
        self.ended: Iterator[Any] | None = None  # no rank has more of this epoch
        self.last: Any = None
        self.weights: collections.deque[float] = collections.deque()
        self.weight = 1.0  # of the batch that runs, or ran last

    @property
    def repeats(self) -> bool:
        """Whether the batch that runs was there before."""
        return self.weight == 0


class _OfLength:
    """A data loader with the number of batches that all ranks make, for Trainer to plan with."""

    def __init__(self, loader: Any, length: int) -> None:
        self._loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _steps(trainer: Any) -> SharedSteps:
    steps: SharedSteps = trainer.__dict__.setdefault("_zero_steps", SharedSteps())
    return steps


def _mode(plugin: ZeroPlugin) -> str:
    return str(plugin.config.get("uneven_data", ERROR))


def _lengths(loader: Any, what: str, plugin: ZeroPlugin) -> list[int | None]:
    """Return the number of batches of every rank, None where it is not known. All ranks must call."""
    return all_ranks_give(len(loader) if has_length(loader) else None, what, plugin.config.desync_timeout)


@in_place_of("set_initial_training_values", "args", "dataloader", needs=plugin_of)
def set_initial_training_values(self: Any, orig: Original, plugin: ZeroPlugin, args: Any, dataloader: Any) -> Any:
    """Plan equal numbers of steps. All ranks must call.

    Raises ConfigError on every rank where epochs would have different numbers of steps and `uneven_data` is not given.
    """
    self._zero_steps = SharedSteps()
    mode, lengths = _mode(plugin), _lengths(dataloader, "Trainer's training data", plugin)
    if len(set(lengths)) == 1 or (mode == ERROR and args.max_steps > 0):  # a rank may begin a new epoch by itself
        return orig(args, dataloader)
    known = [length for length in lengths if length is not None]
    if mode == ERROR or len(known) < len(lengths):
        numbers = ", ".join(f"rank {rank} {length or 'an unknown number'}" for rank, length in enumerate(lengths))
        raise ConfigError(
            f"ranks have different numbers of training batches: {numbers}. Expected the same on all of them.\n"
            'Set uneven_data, at the top level of the configuration, to "stop" (all ranks stop at the shortest data) '
            'or "join" (all go on to the end of the longest). Where a loader has no length, all need max_steps.'
        )
    return orig(args, _OfLength(dataloader, min(known) if mode == STOP else max(known)))


@in_place_of("get_batch_samples", "epoch_iterator", "num_batches", "device", needs=engine_of_trainer)
def get_batch_samples(
    self: Any, orig: Original, engine: ZeroEngine, epoch_iterator: Iterator[Any], num_batches: int, device: Any
) -> Any:
    """Give every rank as many batches for an optimizer step, and count the tokens of those that are new."""
    steps = _steps(self)
    if engine.config.uneven_data == ERROR:
        return orig(epoch_iterator, num_batches, device)
    if steps.ended is epoch_iterator:
        return orig(iter(()), num_batches, device)
    batches = list(itertools.islice(epoch_iterator, num_batches))
    steps.last = batches[-1] if batches else steps.last
    rows = engine.comm.all_gather_numbers([len(batches), steps.last is not None], "batches of an optimizer step")
    counts = [int(count) for count, _ in rows]
    size = min(counts) if engine.config.uneven_data == STOP else max(counts)
    if size == 0:
        steps.ended = epoch_iterator
    elif size > min(counts) and not all(has_one for _, has_one in rows):
        steps.last = _one_of_any(steps.last, device)
    new = batches[:size]
    repeated = [copy.copy(steps.last) for _ in range(size - len(new))]
    samples, num_items = orig(iter([*new, *map(_without_labels, repeated)]), size, device)
    weight = _weight(self, num_items, [min(count, size) for count in counts])
    steps.weights = collections.deque([weight] * len(new) + [0.0] * len(repeated))
    return [*samples[: len(new)], *repeated], num_items


def _one_of_any(mine: Any, device: Any) -> Any:
    """Return a batch of this rank, or of the first that has one. All ranks must call."""
    given = all_ranks_give(send_to_device(mine, "cpu"), "a batch to repeat")
    return next(send_to_device(one, device) for one in given if one is not None) if mine is None else mine


def _without_labels(batch: Any) -> Any:
    """Return `batch` as one that has no tokens to count."""
    if not isinstance(batch, Mapping):
        return batch
    counted = {"labels", "shift_labels"} & set(batch)
    return {**batch, **{name: torch.full_like(batch[name], _NO_LOSS) for name in counted}}


def _weight(trainer: Any, num_items: Any, counts: list[int]) -> float:
    """Return what the loss of a new batch is multiplied by, so that means are over the new batches of all ranks.

    Args:
        counts: The new batches of each rank in this step.
    """
    by_tokens = getattr(trainer, "loss_is_scaled_for_ga", None)  # newer than transformers 5.16
    if by_tokens is None:
        by_tokens = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if num_items is None or not by_tokens:
        return len(counts) * max(counts) / max(1, sum(counts))
    return 1.0 if trainer.args.average_tokens_across_devices else len(counts) / max(1, sum(map(bool, counts)))


@in_place_of("training_step", "model", "inputs", needs=plugin_of)
def training_step(self: Any, orig: Original, plugin: ZeroPlugin, *args: Any, **kwargs: Any) -> Any:
    """Weigh the loss of the batch, and what is logged of it."""
    steps = _steps(self)
    steps.weight = weight = steps.weights.popleft() if steps.weights else 1.0
    if weight == 1:
        return orig(*args, **kwargs)
    backward = self.accelerator.backward
    with instead(self.accelerator, "backward", lambda loss, **options: backward(loss * weight, **options)):
        return orig(*args, **kwargs) * weight


@in_place_of("floating_point_ops", "inputs", needs=plugin_of)
def floating_point_ops(self: Any, orig: Original, plugin: ZeroPlugin, inputs: Any) -> Any:
    """Count no operation for a batch that is repeated."""
    return 0 if _steps(self).repeats else orig(inputs)


@in_place_of("_track_num_input_tokens", "inputs", needs=plugin_of)
def track_num_input_tokens(self: Any, orig: Original, plugin: ZeroPlugin, inputs: Any) -> Any:
    """Count no token of a batch that is repeated. The ranks add theirs, so all must call."""
    if _steps(self).repeats:
        inputs = recursively_apply(lambda tensor: tensor[:0] if tensor.dim() else tensor, dict(inputs))
    return orig(inputs)


# ---------------------------------------------------------------- evaluation
class _JoinedLoader:
    """The batches of this rank, and a repeated one for each that other ranks have after them. All ranks iterate."""

    def __init__(self, trainer: Any, loader: Any) -> None:
        self._trainer = trainer
        self._loader = loader
        self.num_samples = 0  # of all ranks
        self._repeats = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        own, last = iter(self._loader), None
        while True:
            batch = next(own, None)
            self._repeats = batch is None
            last = last if batch is None else batch
            size = 0 if batch is None else find_batch_size(batch) or 0
            rows = self._tell([batch is not None, size, last is not None])
            if not any(is_new for is_new, _, _ in rows):
                return
            self.num_samples += sum(size for _, size, _ in rows)
            if not all(has_one for *_, has_one in rows):
                last = _one_of_any(last, self._trainer.args.device)
            yield last

    def gather(self, tensors: Any) -> Any:
        """Return the rows of all ranks' tensors, in rank order, without those of repeated batches."""
        return recursively_apply(self._gather, tensors)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor if tensor.dim() else tensor[None]
        counts = [count for (count,) in self._tell([0 if self._repeats else len(rows)])]
        accelerator = self._trainer.accelerator
        padded = accelerator.gather(accelerator.pad_across_processes(rows, dim=0))
        of_rank = padded.chunk(len(counts))
        return torch.cat([part[:count] for part, count in zip(of_rank, counts, strict=True)])

    def _tell(self, numbers: list[int | bool]) -> list[list[int]]:
        accelerator = self._trainer.accelerator
        mine = torch.tensor([numbers], dtype=torch.int64, device=accelerator.device)
        everyone: list[list[int]] = accelerator.gather(mine).tolist()
        return everyone


def evaluate_joined(
    trainer: Any, plugin: ZeroPlugin | None, orig: Original, dataloader: Iterable[Any], *args: Any, **kwargs: Any
) -> Any:
    """Evaluate to the end of the longest data, if `uneven_data` lets ranks differ. All ranks must call."""
    if plugin is None or _mode(plugin) == ERROR:
        return orig(dataloader, *args, **kwargs)
    lengths = _lengths(dataloader, "Trainer's evaluation data", plugin)
    if len(set(lengths)) == 1 and lengths[0] is not None:
        return orig(dataloader, *args, **kwargs)
    for name in ("batch_eval_metrics", "eval_use_gather_object"):
        if getattr(trainer.args, name):
            raise ConfigError(
                f"TrainingArguments.{name} = True, and ranks have different or unknown numbers of evaluation batches, "
                f"which uneven_data joins: expected {name} = False.\nTurn it off, or give every rank as many batches."
            )
    loader = _JoinedLoader(trainer, dataloader)
    # The tokens of other ranks' batches, of repeated ones too, would count in the mean of a batch.
    with (
        replaced(trainer, "gather_function", loader.gather),
        replaced(trainer.args, "average_tokens_across_devices", False),
    ):
        return orig(loader, *args, **kwargs)._replace(num_samples=loader.num_samples)
