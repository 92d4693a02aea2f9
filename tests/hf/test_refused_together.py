"""Every rank refuses these by itself, right after the processes have joined: none ends while another still
connects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

import hf_zero
from tests.harness.ranks import run_ranks
from tests.hf.runs import arguments, zero_config
from tests.hf.test_quantized import packed

_REFUSED = "refused/1"
_PLAIN = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}


def trainer_arguments(folder: str) -> None:
    hf_zero.TrainingArguments(**arguments(folder, gradient_accumulation_steps=2), zero=_PLAIN)


def model_of_a_trainer(folder: str) -> None:
    hf_zero.Trainer(model=packed(), args=hf_zero.TrainingArguments(**arguments(folder), zero=zero_config(3)))


def accelerator(folder: str) -> None:
    hf_zero.ZeroPlugin({**_PLAIN, "train_batch_size": 7}).attach(Accelerator(cpu=True))


def model_of_an_accelerator(folder: str) -> None:
    hf_zero.ZeroPlugin(_PLAIN).attach(Accelerator(cpu=True)).prepare(packed())


def initialize(folder: str) -> None:
    model, config = nn.Linear(2, 2), {**_PLAIN, "train_batch_size": 7}
    hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)


def second_model(folder: str) -> None:
    hf_zero.shard(nn.Linear(2, 2), {**_PLAIN, "train_batch_size": 7})


def refuse(make: Callable[[str], None], folder: str) -> str:
    """The refusal; rank 0, which is slow to join, finds out whether rank 1 had ended by then."""
    join = dist.init_process_group

    def join_slowly(*args: Any, **kwargs: Any) -> None:
        join(*args, **kwargs)
        time.sleep(0.5)
        assert not dist.distributed_c10d._get_default_store().check([_REFUSED]), "rank 1 has ended"

    with pytest.MonkeyPatch.context() as patch, pytest.raises(hf_zero.ConfigError) as caught:
        if os.environ["RANK"] == "0":
            patch.setattr(dist, "init_process_group", join_slowly)
        make(folder)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait([_REFUSED])  # rank 0 holds the store
    else:
        store.set(_REFUSED, "1")
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (trainer_arguments, "gradient_accumulation_steps"),
        (model_of_a_trainer, "quantized"),
        (accelerator, "train_batch_size"),
        (model_of_an_accelerator, "quantized"),
        (initialize, "train_batch_size"),
        (second_model, "train_batch_size"),
    ],
)
def test_no_rank_ends_while_another_joins(make: Callable[[str], None], words: str, tmp_path: Path) -> None:
    for text in run_ranks(refuse, 2, make, str(tmp_path), init_group=False):
        assert words in text
