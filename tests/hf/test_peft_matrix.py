"""Every tuner of PEFT is in the matrix, and those that work from weights train in shards as in one process.

The whole matrix is in tests/nightly.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import hf_zero
from hf_zero.errors import StateError
from tests.harness.ranks import run_ranks
from tests.hf import peft_matrix
from tests.hf.peft_matrix import KINDS, NOT_HERE, Runs


def test_the_matrix_has_every_tuner_and_every_initialisation() -> None:
    made = {name: make() for name, make in KINDS.items() if name not in NOT_HERE}
    missing = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING} - {one.peft_type.value for one in made.values()}
    assert missing <= {name.upper() for name in NOT_HERE}, "a new tuner: add it to KINDS"
    initialisations = {
        value.replace("[number of iters]", "4")
        for one in typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])
        for value in typing.get_args(one)
    }
    there = {one.init_lora_weights for one in made.values() if isinstance(one, peft.LoraConfig)}
    assert initialisations - there <= {name.removeprefix("lora_") for name in NOT_HERE}, "a new way to initialise LoRA"


# One for each way in which PEFT comes to the weights of a base.
@pytest.mark.parametrize(
    "kind", ["lora_dora", "lora_tokens", "lora_pissa", "lora_embedding", "delora", "adalora", "cpt", "frod"]
)
def test_kinds_that_work_from_weights(kind: str, tmp_path: Path) -> None:
    peft_matrix.check(kind, tmp_path, [3])


@pytest.mark.parametrize("kind", ["lora_dora", "hra"])
def test_another_adapter_after_a_merge(kind: str, tmp_path: Path) -> None:
    peft_matrix.save_base(tmp_path / "base")
    want = Runs(kind, tmp_path, None).after_a_merge()
    merged, unmerged, base, second = want
    key = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    left = base["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(merged[key], unmerged[key]) and not torch.equal(second[key], left)
    for outcomes in run_ranks(peft_matrix.in_shards, 2, kind, tmp_path, [0, 2, 3], Runs.after_a_merge):
        for stage, got in zip([0, 2, 3], outcomes, strict=True):
            for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
                peft_matrix.close(mine, theirs, f"{kind}, stage {stage}, weights {number}")


def misused(runs: Runs) -> list[str]:
    """Return what is said to AdaLoRA's allocation of ranks, and to a parameter that was made from a placeholder."""
    texts = []
    model = runs.adapted()
    runs.train(model)
    with pytest.raises(StateError) as raised:
        model.base_model.update_and_allocate(3)
    texts.append(str(raised.value))
    base: Any = runs.base()
    with pytest.raises(StateError) as raised:
        base.rows = torch.nn.Parameter(base.lm_head.weight.detach()[:2].clone())
        hf_zero.initialize(model=base, config=runs.config)
    texts.append(str(raised.value))
    return texts


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    peft_matrix.save_base(tmp_path / "base")
    for ((allocation, parameter),) in run_ranks(peft_matrix.in_shards, 2, "adalora", tmp_path, [3], misused):
        assert "update_and_allocate" in allocation and "AdaLoRA" in allocation
        assert "gathered_params" in parameter
