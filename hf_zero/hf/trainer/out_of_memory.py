"""Tells every rank at once when one runs out of memory under Trainer, so that auto_find_batch_size retries on all.

transformers runs the training loop in accelerate's find_executable_batch_size, which knows an error of memory by its
text and makes the batch smaller. It looks at one rank alone; here the ranks that have memory left raise such an error
too, so that all of them make the same next attempt.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.utils.memory import should_reduce_batch_size

from hf_zero.engine import recovery
from hf_zero.engine.engine import engine_of
from hf_zero.errors import OutOfMemoryError, StateError
from hf_zero.hf.accelerator.plugin import ZeroPlugin

logger = logging.getLogger(__name__)


def run_attempt(trainer: Any, plugin: ZeroPlugin, loop: Callable[..., Any], batch_size: Any, **kwargs: Any) -> Any:
    """One attempt of the training loop, with `batch_size` samples per step on each rank. All ranks must call.

    Raises:
        RuntimeError: Whatever the loop raises; OutOfMemoryError where another rank ran out of memory.
        StateError: Memory ran out inside an update, which cannot be repeated.
    """
    finds = bool(trainer.args.auto_find_batch_size)
    if finds and batch_size is not None:
        plugin.take_batch_size(batch_size // max(1, trainer.args.n_gpu))
        if (engine := engine_of(trainer.model)) is not None:  # of an earlier attempt
            engine.config = plugin.resolve(trainer.accelerator, trainer.model)
    try:
        with naming_lost_ranks(trainer, "training"):
            return loop(batch_size, **kwargs)
    except RuntimeError as error:
        recovery.drop_frames(error)
        if not isinstance(error, OutOfMemoryError):  # another rank ran out of memory, and this one was stopped
            _stop_others(trainer.args.process_index, error)
        if finds and should_reduce_batch_size(error):
            recovery.recover()
            if trainer.args.process_index == 0:
                logger.warning("a batch of %s per rank does not fit: %s", batch_size, str(error).splitlines()[0])
        raise


@contextlib.contextmanager
def naming_lost_ranks(trainer: Any, what: str) -> Iterator[None]:
    """Let errors of collectives that Trainer and accelerate make inside the block name the ranks that have ended."""
    try:
        yield
    except RuntimeError as error:  # the engine may have been made inside
        if (engine := engine_of(trainer.model)) is None:
            raise
        with engine.comm.naming_lost_ranks(what):
            raise error


def _stop_others(rank: int, error: RuntimeError) -> None:
    """Let the other ranks stop with this one, if it ran out of memory."""
    first = (str(error).splitlines() or [""])[0][:300]
    if should_reduce_batch_size(error) and recovery.is_updating():
        # Other ranks may have made the update and gone on: this one must not wait for them. The words by which
        # accelerate knows an error of memory must not be in the text.
        reason = StateError(f"rank {rank}: {recovery.cut_update(type(error).__name__)}")
        recovery.abandon(reason)
        raise reason from error
    if should_reduce_batch_size(error):
        recovery.abandon(OutOfMemoryError(f"rank {rank} ran out of memory. ({first})"))
    elif isinstance(error.__cause__, RuntimeError) and should_reduce_batch_size(error.__cause__):
        # In evaluation, where a smaller training batch would not help: nobody tries again.
        recovery.abandon(StateError(f"rank {rank} stopped: {first}"))
