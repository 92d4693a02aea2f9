"""An engine that is garbage ends its thread of updates, wherever Python collects it."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def collected_inside_of_threading() -> bool:
    engine = hf_zero.initialize(model=nn.Linear(4, 4), config=CONFIG)[0]
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    (thread,) = (one for one in threading.enumerate() if one.name == "hf_zero-update")
    gc.collect()
    del engine
    assert thread.is_alive(), "vacuous: it ended without a collection"
    with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as threading.enumerate holds it
        gc.collect()
    thread.join(10)
    return not thread.is_alive()


def test_a_collection_inside_of_threading_does_not_wait_for_the_thread() -> None:
    assert run_ranks(collected_inside_of_threading, 2, timeout=30) == [True, True]
