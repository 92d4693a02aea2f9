"""The way back when one rank ran out of memory: all stop at once, and may try again with a smaller batch.

The rank that fails leaves its reason in the key-value store and closes its connections, so nobody waits for it until
a timeout. Then all ranks connect again and forget the pass that was broken off: gathered parameters, gradients, the
recorded order of use. Masters and optimizer state are as after the last update. An update itself cannot be broken off
and repeated: then training ends, with a sentence.
"""

from __future__ import annotations

import gc
import traceback

import torch

from hf_zero.distributed.processes import all_ranks_give
from hf_zero.engine.engine import ZeroEngine, live_engines
from hf_zero.errors import OffloadError, OutOfMemoryError, StateError


def abandon(reason: OffloadError | OutOfMemoryError | StateError) -> None:
    """Let every rank that waits for this one raise an error of the same kind and text, in all engines."""
    for engine in live_engines():
        engine.comm.abandon(reason)


def drop_frames(error: BaseException) -> None:
    """Let go of the local variables in the tracebacks of `error`: activations, gathers under way."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def is_updating() -> bool:
    """Whether an optimizer's step of this rank has begun and is not over."""
    return any(engine.optimizer is not None and engine.optimizer.is_updating for engine in live_engines())


def recover() -> None:
    """Make every engine ready for another forward after `abandon` on some rank. All ranks must call.

    Raises:
        StateError: On all ranks, if an update was under way on some rank: its shards are a step ahead of others'.
    """
    gc.collect()
    # Before anything waits: where this rank only heard of the failure, a third one may be waiting for this rank.
    for engine in live_engines():
        engine.comm.disconnect()
    # Queued work may still use memory that is given back now.
    for device in {engine.comm.device for engine in live_engines() if not engine.comm.computes_on_host}:
        torch.accelerator.synchronize(device)
    for engine in live_engines():
        _drop_pending(engine)
    # A model that was given up may have gone on some ranks only: nobody uses it any more.
    names = all_ranks_give({engine.comm.name for engine in live_engines()}, "recovery")
    shared = set.intersection(*names)
    engines = sorted((engine for engine in live_engines() if engine.comm.name in shared), key=_order)
    for engine in engines:
        engine.comm.reconnect()
    for engine in engines:
        _check_between_updates(engine)
    for engine in engines:
        _forget_pass(engine)


def _drop_pending(engine: ZeroEngine) -> None:
    """Give up gradients and gathers that were under way."""
    engine.schedule.param_grads.forget()
    for unit in engine.units:
        for flat in unit.flats:
            flat.drop_gather()


def _order(engine: ZeroEngine) -> tuple[int, str]:
    """Return a key that sorts engines by when they were made, which is the same on all ranks."""
    name = engine.comm.name
    return len(name), name


def _check_between_updates(engine: ZeroEngine) -> None:
    is_updating = engine.optimizer is not None and engine.optimizer.is_updating
    everyone = engine.comm.all_gather_object((engine.global_steps, is_updating), "recovery")
    if any(updating for _, updating in everyone) or len({steps for steps, _ in everyone}) > 1:
        raise StateError(cut_update(f"steps made, in rank order: {[steps for steps, _ in everyone]}"))


def cut_update(detail: str) -> str:
    """Return the message for memory that ran out inside an update."""
    return (
        f"memory ran out inside the optimizer's step ({detail}): the update cannot be repeated, and a smaller batch "
        "would not help.\nOffload the optimizer (zero_optimization.offload_optimizer), use more ranks or a higher "
        "stage, and start from the last checkpoint."
    )


def _forget_pass(engine: ZeroEngine) -> None:
    with engine.suspended():  # hooks that remember the pass are installed again
        engine.params.forget()
        for flat in engine.params.flats:
            flat.drop_row()  # a gather that was broken off has filled a part of it
        engine.schedule.param_grads.forget()
        engine.loss_scale.forget()
        engine.reports.forget()
    engine.zero_grad()
    engine.schedule.restart_at(engine.global_steps, engine.skipped_steps)
